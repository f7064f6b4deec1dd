"""The embedded engine: continuous batching over the exact forward, in one thread, with a KV cache of fixed slots.

Each pass runs one flat row: a token for every running sequence, and the prompts of those just admitted. Running
sequences occupy the first slots without gaps, so a pass costs what is running. Equal prompts admitted together are
prefilled once. A sequence keeps its slot until it ends, so nothing is ever preempted.
"""

import itertools
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from loguru import logger

from rlmake.core.errors import UserError
from rlmake.core.seeds import derive
from rlmake.inference.engines.base import Completion, EngineFailed, Entry, Refused, Sampling, Stats
from rlmake.inference.engines.sampling import sample
from rlmake.inference.weights import read_version
from rlmake.models import exact, loading
from rlmake.models.logprobs import log_distribution, logits_of
from rlmake.models.packing import Plan, up
from rlmake.models.text import decode as decode_text
from rlmake.models.text import load_tokenizer, template_text

IDLE_BEAT = 1.0  # seconds between signs of life of an idle or paused engine
PROMPT_ROWS = 256  # rows of prompt logprobs scored at a time


@dataclass(eq=False)
class Sequence:
    """A completion in progress. Its slot is its index among the running ones."""

    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    future: "Future[Completion]"
    out: Completion = field(default_factory=Completion)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.out.token_ids)


class TransformersEngine:
    """See `engines.base.Engine`. The constructor returns when the model is loaded and has passed its self-test."""

    def __init__(self, cfg: Any):
        name, trust = cfg.vllm.model, cfg.vllm.trust_remote_code
        self._config = loading.load_config(name, trust_remote_code=trust)
        exact.require(self._config)
        self.max_model_len = cfg.vllm.max_model_len or self._config.max_position_embeddings
        if self.max_model_len > self._config.max_position_embeddings:
            raise UserError(
                f"inference.vllm.max_model_len: {self.max_model_len} is beyond the model's "
                f"{self._config.max_position_embeddings} positions"
            )
        folder = loading.locate(name)
        self.tokenizer = load_tokenizer(str(folder))
        if cfg.vllm.chat_template is not None:
            self.tokenizer.chat_template = template_text(cfg.vllm.chat_template)
        self.vocab_size = self._config.vocab_size
        self.default_stop_ids = frozenset(loading.stop_ids(folder, self.tokenizer))
        self._cfg, self._folder = cfg, folder
        self._max_slots, self._prefill_tokens = cfg.transformers.max_slots, cfg.transformers.prefill_tokens
        self._counter = itertools.count()
        self._wake = threading.Condition()
        self._waiting: deque[Sequence] = deque()
        self._commands: deque[tuple[Callable[[], Any], Future]] = deque()
        self._running: list[Sequence] = []
        self._paused = self._closed = False
        self._failure: BaseException | None = None
        self._beat = time.monotonic()
        self._version = 0
        self._prompt_tokens = self._generation_tokens = 0
        self._finished: Counter[str] = Counter({"stop": 0, "length": 0, "abort": 0, "error": 0})
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._main, args=(ready,), name="engine", daemon=True)
        self._thread.start()
        ready.result()

    # Called from other threads.

    def submit(self, prompt: tuple[int, ...], sampling: Sampling, cache_salt: str | None) -> "Future[Completion]":
        """No prefix outlives a pass, so every `cache_salt` is respected."""
        if not prompt:
            raise Refused("the prompt is empty")
        if len(prompt) >= self.max_model_len:
            raise Refused(
                f"the prompt has {len(prompt)} tokens; this model's maximum context length is {self.max_model_len}"
            )
        if max(prompt) >= self.vocab_size or min(prompt) < 0:
            raise Refused(f"a prompt token is outside of the vocabulary of {self.vocab_size}")
        seed = sampling.seed
        if seed is None:
            seed = derive(self._cfg.seed, "request", next(self._counter))
        sequence = Sequence(prompt, sampling, seed, Future())
        with self._wake:
            self._check()
            self._waiting.append(sequence)
            self._wake.notify()
        return sequence.future

    def pause(self) -> None:
        self._command(lambda: setattr(self, "_paused", True))

    def resume(self) -> None:
        self._command(lambda: setattr(self, "_paused", False))

    def update_weights(self, folder: Path, version: int | None) -> int:
        tensors, found = read_version(folder, version)

        def assign() -> int:
            loading.assign(self._model, tensors, str(folder))
            self._head = self._head_weight()
            self._version = self._version + 1 if found is None else found
            return self._version

        served = self._command(assign)
        logger.info(f"weights v{served} from {folder}")
        return served

    def stats(self) -> Stats:
        with self._wake:
            used = sum(sequence.length for sequence in self._running)
            capacity = self._max_slots * self.max_model_len
            return Stats(
                running=len(self._running),
                waiting=len(self._waiting),
                kv_usage=used / capacity,
                capacity=capacity,
                preemptions=0,
                prompt_tokens=self._prompt_tokens,
                generation_tokens=self._generation_tokens,
                finished=dict(self._finished),
                version=self._version,
                paused=self._paused,
            )

    def alive(self, timeout: float) -> bool:
        return self._thread.is_alive() and time.monotonic() - self._beat < timeout

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(timeout=10)

    def _command(self, action: Callable[[], Any]) -> Any:
        """Run `action` in the engine's thread between two passes; its result or its exception."""
        done: Future[Any] = Future()
        with self._wake:
            self._check()
            self._commands.append((action, done))
            self._wake.notify()
        return done.result()

    def _check(self) -> None:
        if self._failure is not None:
            raise EngineFailed(f"the engine has failed: {self._failure!r}")
        if self._closed:
            raise EngineFailed("the engine is closed")

    # The engine's thread.

    def _main(self, ready: "Future[None]") -> None:
        try:
            self._load()
        except BaseException as error:
            ready.set_exception(error)
            return
        ready.set_result(None)
        try:
            with torch.inference_mode():
                while self._wait_for_work():
                    self._step()
        except BaseException as error:
            logger.exception("the engine has failed")
            self._failure = error
        self._give_up()

    def _load(self) -> None:
        torch.set_num_threads(self._cfg.cpu_threads)
        dtype = self._cfg.transformers.dtype
        self._model = loading.load(
            self._folder, attn=exact.NAME, dtype=dtype, trust_remote_code=self._cfg.vllm.trust_remote_code
        ).requires_grad_(False)
        self._head = self._head_weight()
        self._cache = exact.KVCache.make(self._config, self._max_slots, self.max_model_len, self._model.dtype)
        if dtype == "float32":
            result = exact.establish(self._model)
            log = logger.info if result.ok else logger.warning
            log(f"self-test: {result}{'' if result.ok else '; logprobs agree with the trainer to about 1e-5 only'}")

    def _head_weight(self) -> torch.Tensor:
        weight = self._model.lm_head.weight
        return weight.float() if self._cfg.enable_fp32_lm_head else weight

    def _wait_for_work(self) -> bool:
        """Run commands, drop what was cancelled, and wait until there is something to do. False at the end."""
        while True:
            with self._wake:
                self._beat = time.monotonic()
                self._drop_cancelled()
                if self._closed:
                    return False
                if not self._commands:
                    if not self._paused and (self._running or self._waiting):
                        return True
                    self._wake.wait(IDLE_BEAT)
                    continue
                action, done = self._commands.popleft()
            try:
                done.set_result(action())
            except BaseException as error:
                done.set_exception(error)

    def _drop_cancelled(self) -> None:
        gone = [sequence for sequence in self._waiting if sequence.future.cancelled()]
        if gone:
            self._waiting = deque(sequence for sequence in self._waiting if not sequence.future.cancelled())
        for slot in range(len(self._running) - 1, -1, -1):
            if self._running[slot].future.cancelled():
                gone.append(self._running[slot])
                self._free(slot)
        self._finished["abort"] += len(gone)

    def _give_up(self) -> None:
        with self._wake:
            self._closed = True
            left = [*self._running, *self._waiting]
            self._running.clear()
            self._waiting.clear()
            commands = list(self._commands)
        error = EngineFailed(f"the engine has failed: {self._failure!r}" if self._failure else "the server is closing")
        for future in [*(sequence.future for sequence in left), *(done for _, done in commands)]:
            if not future.done():
                future.set_exception(error)

    def _step(self) -> None:
        """One forward pass: a token for each running sequence, and the prompts of those admitted now."""
        fresh = self._admit()
        running = len(self._running) - len(fresh)
        hidden = self._forward(self._running[:running], fresh)
        sequences = self._running
        tokens, logprobs, tops = sample(
            logits_of(hidden if self._head.dtype == hidden.dtype else hidden.float(), self._head),
            [sequence.sampling for sequence in sequences],
            [sequence.seed for sequence in sequences],
            [sequence.length for sequence in sequences],
            [len(sequence.out.token_ids) for sequence in sequences],
        )
        for sequence, token, logprob, top in zip(sequences, tokens, logprobs, tops, strict=True):
            sequence.out.token_ids.append(token)
            sequence.out.logprobs.append(logprob)
            if sequence.sampling.top_logprobs:
                sequence.out.top.append(top)
        self._generation_tokens += len(sequences)
        self._retire()

    def _admit(self) -> list[Sequence]:
        """Move waiting sequences into free slots, up to `prefill_tokens` of distinct prompts (one at least)."""
        fresh: list[Sequence] = []
        budget, seen = self._prefill_tokens, set()
        with self._wake:
            while self._waiting and len(self._running) < self._max_slots:
                prompt = self._waiting[0].prompt
                cost = 0 if prompt in seen else len(prompt)
                if fresh and cost > budget:
                    break
                budget -= cost
                seen.add(prompt)
                fresh.append(self._waiting.popleft())
                self._running.append(fresh[-1])
        return fresh

    def _forward(self, running: list[Sequence], fresh: list[Sequence]) -> torch.Tensor:
        """The hidden state [B, hidden] after the newest token of each, running ones first."""
        ids: list[torch.Tensor] = []
        places: list[torch.Tensor] = []
        decode = packed = None
        if running:
            tokens = torch.tensor([sequence.out.token_ids[-1] for sequence in running])
            decode = exact.Decode.of(self._cache, torch.tensor([sequence.length - 1 for sequence in running]))
            ids.append(F.pad(tokens, (0, len(decode.slots) - len(tokens))))
            places.append(decode.positions)
        first = len(ids[0]) if ids else 0
        owners: dict[tuple[int, ...], int] = {}
        for index, sequence in enumerate(fresh):
            owners.setdefault(sequence.prompt, index)
        if fresh:
            prompt_ids, packed = self._pack(list(owners), [len(running) + index for index in owners.values()])
            ids.append(prompt_ids)
            places.append(packed.positions)
        context = exact.Context(packed, decode, self._cache)
        hidden = exact.run(self._model, torch.cat(ids)[None], torch.cat(places)[None], context)
        rows = list(range(len(running)))
        if fresh:
            ends = dict(zip(owners, itertools.accumulate(len(prompt) for prompt in owners), strict=True))
            for index, sequence in enumerate(fresh):
                end, owner = first + ends[sequence.prompt], owners[sequence.prompt]
                rows.append(end - 1)
                self._prompt_tokens += len(sequence.prompt)
                if owner != index:
                    self._cache.copy(len(running) + owner, len(running) + index, len(sequence.prompt))
                if sequence.sampling.prompt_logprobs is not None:
                    sequence.out.prompt_logprobs = self._score_prompt(
                        sequence, hidden[end - len(sequence.prompt) : end]
                    )
        return hidden[rows]

    def _pack(self, prompts: list[tuple[int, ...]], slots: list[int]) -> tuple[torch.Tensor, exact.Packed]:
        """Distinct prompts one after the other, padded to a multiple of 16; the padding is a document of its own."""
        lens = [len(prompt) for prompt in prompts]
        padding = up(sum(lens)) - sum(lens)
        ids = F.pad(torch.tensor(list(itertools.chain.from_iterable(prompts))), (0, padding))
        places = F.pad(torch.cat([torch.arange(length) for length in lens]), (0, padding))
        owner = torch.repeat_interleave(torch.tensor(slots), torch.tensor(lens))
        owner = F.pad(owner, (0, padding), value=self._cache.spare)
        return ids, exact.Packed(Plan.of([*lens, padding] if padding else lens), owner, places)

    def _score_prompt(self, sequence: Sequence, hidden: torch.Tensor) -> list[list[Entry] | None]:
        """Per prompt position the given token's entry, then the most likely ones; None for the first."""
        found: list[list[Entry] | None] = [None]
        wanted = sequence.sampling.prompt_logprobs
        for start in range(0, len(sequence.prompt) - 1, PROMPT_ROWS):
            targets = torch.tensor(sequence.prompt[start + 1 : start + 1 + PROMPT_ROWS])
            part = hidden[start : start + len(targets)].to(self._head.dtype)
            logp = log_distribution(logits_of(part, self._head), None)
            given = logp.gather(1, targets[:, None])
            ranks = (logp > given).sum(-1) + 1
            values, ids = logp.topk(min(wanted, self.vocab_size), -1)
            for row, target in enumerate(targets.tolist()):
                entries = [Entry(target, given[row, 0].item(), int(ranks[row]))]
                likely = enumerate(zip(ids[row].tolist(), values[row].tolist(), strict=True), 1)
                entries += [Entry(token, value, rank) for rank, (token, value) in likely if token != target]
                found.append(entries)
        return found

    def _retire(self) -> None:
        """Complete the sequences that have ended."""
        for slot in range(len(self._running) - 1, -1, -1):
            sequence = self._running[slot]
            reason = self._ended(sequence)
            finite = math.isfinite(sequence.out.logprobs[-1])
            if reason is None and finite:
                continue
            with self._wake:
                self._free(slot)
                self._finished[reason if finite else "error"] += 1
            if not sequence.future.set_running_or_notify_cancel():
                continue
            if not finite:
                sequence.future.set_exception(EngineFailed("the model gave a logprob that is not finite"))
            else:
                sequence.out.finish_reason = reason
                sequence.future.set_result(sequence.out)

    def _ended(self, sequence: Sequence) -> str | None:
        """Why a sequence ends here, or None. Sets the text where a stop text was met."""
        out, sampling = sequence.out, sequence.sampling
        made = len(out.token_ids)
        if sampling.stop:
            text = decode_text(self.tokenizer, out.token_ids)
            hits = [at for stop in sampling.stop if (at := text.find(stop)) >= 0]
            if hits and made >= sampling.min_tokens:
                out.text = text[: min(hits)]
                return "stop"
        if out.token_ids[-1] in sampling.stop_ids:
            return "stop"
        full = made >= sampling.max_tokens or sequence.length >= self.max_model_len
        return "length" if full else None

    def _free(self, slot: int) -> None:
        """Give a slot back: the last running sequence moves into it, so that no gap is left."""
        last = self._running.pop()
        if slot < len(self._running):
            self._cache.copy(len(self._running), slot, last.length)
            self._running[slot] = last
