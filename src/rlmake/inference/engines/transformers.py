"""The embedded engine: continuous batching over the exact forward, in one thread.

Requests wait in a queue until a slot is free. Between two passes, and only there, the thread runs commands: pause,
resume, new weights. `batch` holds what is being generated.
"""

import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from loguru import logger

from rlmake.core.errors import UserError
from rlmake.core.seeds import derive
from rlmake.inference import metrics
from rlmake.inference.engines.base import Completion, EngineFailed, Sampling, Stats, check_prompt
from rlmake.inference.engines.batch import Batch, Sequence
from rlmake.inference.weights import compare, read_version
from rlmake.models import exact, loading, lora
from rlmake.models.digest import digest
from rlmake.models.text import load_tokenizer, template_text

IDLE_BEAT = 1.0  # seconds between signs of life of an idle or paused engine


class TransformersEngine:
    """See `engines.base.Engine`. The constructor returns when the model is loaded and has passed its self-test."""

    openai = None

    def __init__(self, cfg: Any):
        name = cfg.vllm.model
        config = loading.load_config(name, trust_remote_code=cfg.vllm.trust_remote_code)
        exact.require(config)
        self.max_model_len = cfg.vllm.max_model_len or config.max_position_embeddings
        if self.max_model_len > config.max_position_embeddings:
            raise UserError(
                f"inference.vllm.max_model_len: {self.max_model_len} is beyond the model's "
                f"{config.max_position_embeddings} positions"
            )
        folder = loading.locate(name)
        self.tokenizer = load_tokenizer(folder)
        if cfg.vllm.chat_template is not None:
            self.tokenizer.chat_template = template_text(cfg.vllm.chat_template)
        self.vocab_size = config.vocab_size
        self.default_stop_ids = frozenset(loading.stop_ids(folder, self.tokenizer))
        self._cfg, self._folder = cfg, folder
        self._counter = itertools.count()
        self._wake = threading.Condition()  # guards everything below
        self._waiting: deque[Sequence] = deque()
        self._commands: deque[tuple[Callable[[], Any], Future]] = deque()
        self._paused = self._closed = self._cancelled = False
        self._failure: BaseException | None = None
        self._beat = time.monotonic()
        self._version = 0
        self.seconds: dict[str, float] = {}
        self._adapter: lora.Adapter | None = None
        self._receiver: Any = None  # of the trainer's group
        self._prompt_tokens = self._generation_tokens = 0
        self._finished: Counter[str] = Counter({"stop": 0, "length": 0, "abort": 0, "error": 0})
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._main, args=(ready,), name="engine", daemon=True)
        self._thread.start()
        ready.result()

    # Called from other threads.

    def submit(self, prompt: tuple[int, ...], sampling: Sampling, cache_salt: str | None) -> "Future[Completion]":
        """No prefix outlives a pass, so every `cache_salt` is respected."""
        check_prompt(prompt, self.max_model_len, self.vocab_size)
        seed = sampling.seed
        if seed is None:
            seed = derive(self._cfg.seed, "request", next(self._counter))
        limit = min(sampling.max_tokens, self.max_model_len - len(prompt))
        sequence = Sequence(prompt, sampling, seed, Future(), limit, len(prompt))
        sequence.future.add_done_callback(self._note_cancelled)
        with self._wake:
            self._check()
            self._waiting.append(sequence)
            self._wake.notify()
        return sequence.future

    def _note_cancelled(self, future: Future) -> None:
        if future.cancelled():
            with self._wake:
                self._cancelled = True
                self._wake.notify()

    def pause(self) -> None:
        self._command(lambda: setattr(self, "_paused", True))

    def resume(self) -> None:
        self._command(lambda: setattr(self, "_paused", False))

    def update_weights(self, folder: Path, version: int | None, checksum: str | None = None) -> int:
        begun = time.perf_counter()
        tensors, found = read_version(folder, version, checksum)
        checked = time.perf_counter()
        served = self._assign(tensors, found, str(folder), None)
        self.seconds = {"check": checked - begun, "load": time.perf_counter() - checked}
        return served

    def workers(self) -> list[dict[str, Any]]:
        return [{"rank": 0, "device": "cpu", "nccl": None}]

    def join(self, rendezvous: dict[str, Any], first: int, world: int, timeout: float) -> None:
        from rlmake.transport.collective import Receiver

        self._receiver = Receiver(rendezvous, first, world, torch.device("cpu"), timeout)

    def receive_weights(
        self, version: int, plan: list[dict[str, Any]], dtype: str, digests: dict[str, str] | None
    ) -> int:
        if self._receiver is None:
            raise UserError("no group was joined; POST /init_broadcaster comes first")
        tensors = dict(self._receiver.receive(version, plan, loading.DTYPES[dtype]))
        return self._assign(tensors, version, "the trainer's group", digests)

    def _assign(
        self, tensors: dict[str, torch.Tensor], version: int | None, where: str, digests: dict[str, str] | None
    ) -> int:
        def assign() -> int:
            if self._adapter is not None:
                raise UserError("this server runs an adapter, which belongs to the weights it has; start another one")
            model = self._batch.model
            loading.assign(model, tensors, where)
            self._batch.refresh_head()
            if self._cfg.check_weights:
                state, sent = model.state_dict(keep_vars=True), {n: t.to(model.dtype) for n, t in tensors.items()}
                found = {name: digest(state[name]) for name in sent}
                compare(found, digests or {name: digest(tensor) for name, tensor in sent.items()}, where)
            self._version = self._version + 1 if version is None else version
            return self._version

        served = self._command(assign)
        logger.info(f"weights v{served} from {where}")
        return served

    def load_adapter(self, folder: Path, name: str) -> int:
        tensors, found = read_version(folder, None, key="lora_path")
        adapter = lora.read_config(folder)

        def assign() -> int:
            model = self._batch.model
            if self._adapter is None:
                self._adapt(adapter)
            elif (self._adapter.rank, self._adapter.alpha) != (adapter.rank, adapter.alpha):
                raise UserError(
                    f"{folder}: rank or alpha differs from the adapter that is loaded; start another server"
                )
            lora.assign(model, tensors, str(folder))
            self._version = self._version + 1 if found is None else found
            return self._version

        served = self._command(assign)
        logger.info(f"adapter v{served} from {folder}")
        return served

    def _adapt(self, adapter: lora.Adapter) -> None:
        """Put an adapter's modules into the model, which must still be exact with them."""
        model = self._batch.model
        with torch.inference_mode(False):
            self._adapter = lora.inject(model, adapter, 0)
        model.requires_grad_(False).eval()
        if self._cfg.transformers.dtype == "float32":
            with lora.stirred(model):
                self._test(model)

    def metrics(self, model: str) -> str:
        return metrics.render(self.stats(), model)

    def stats(self) -> Stats:
        with self._wake:
            used = sum(sequence.length for sequence in self._batch.running)
            capacity = self._batch.slots * self.max_model_len
            return Stats(
                running=len(self._batch.running),
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
        """Threads are counted per thread that computes, so all of this belongs here."""
        torch.set_num_threads(self._cfg.cpu_threads)
        options, trust = self._cfg.transformers, self._cfg.vllm.trust_remote_code
        model = loading.load(self._folder, attn=exact.NAME, dtype=options.dtype, trust_remote_code=trust)
        model.requires_grad_(False)
        if options.dtype == "float32":
            self._test(model)
        head = self._cfg.enable_fp32_lm_head
        self._batch = Batch(model, self.tokenizer, options.max_slots, self.max_model_len, head)

    def _test(self, model: torch.nn.Module) -> None:
        result = exact.establish(model)
        log = logger.info if result.ok else logger.warning
        log(f"self-test: {result}{'' if result.ok else '; logprobs agree with the trainer to about 1e-5 only'}")

    def _wait_for_work(self) -> bool:
        """Run commands, drop what was cancelled, and wait until there is something to do. False at the end."""
        while True:
            with self._wake:
                self._beat = time.monotonic()
                self._drop_cancelled()
                if self._closed:
                    return False
                if not self._commands:
                    if not self._paused and (self._batch.running or self._waiting):
                        return True
                    self._wake.wait(IDLE_BEAT)
                    continue
                action, done = self._commands.popleft()
            try:
                done.set_result(action())
            except BaseException as error:
                done.set_exception(error)
                if isinstance(error, EngineFailed):  # weights that may not be served
                    raise

    def _step(self) -> None:
        """One pass, and the results of what has ended by it."""
        fresh = self._admit()
        ended = self._batch.step(fresh)
        with self._wake:
            self._prompt_tokens += sum(len(sequence.prompt) for sequence in fresh)
            self._generation_tokens += len(self._batch.running) + len(ended)
            self._finished.update(sequence.reason for sequence in ended)
        for sequence in ended:
            if not sequence.future.set_running_or_notify_cancel():
                continue
            if sequence.reason == "error":
                sequence.future.set_exception(EngineFailed("the model gave a logprob that is not finite"))
            else:
                sequence.out.finish_reason = sequence.reason
                sequence.future.set_result(sequence.out)

    def _admit(self) -> list[Sequence]:
        """Waiting sequences for the free slots, up to `prefill_tokens` of distinct prompts (one at least)."""
        fresh: list[Sequence] = []
        budget, seen = self._cfg.transformers.prefill_tokens, set()
        with self._wake:
            free = self._batch.slots - len(self._batch.running)
            while self._waiting and len(fresh) < free:
                prompt = self._waiting[0].prompt
                cost = 0 if prompt in seen else len(prompt)
                if fresh and cost > budget:
                    break
                budget -= cost
                seen.add(prompt)
                fresh.append(self._waiting.popleft())
        return fresh

    def _drop_cancelled(self) -> None:
        if not self._cancelled:
            return
        self._cancelled = False
        left = deque(sequence for sequence in self._waiting if not sequence.future.cancelled())
        gone = len(self._waiting) - len(left) + self._batch.remove_if(lambda sequence: sequence.future.cancelled())
        self._waiting = left
        self._finished["abort"] += gone

    def _give_up(self) -> None:
        with self._wake:
            self._closed = True
            left = [sequence.future for sequence in (*self._batch.running, *self._waiting)]
            left += [done for _, done in self._commands]
            self._batch.running.clear()
            self._waiting.clear()
        error = EngineFailed(f"the engine has failed: {self._failure!r}" if self._failure else "the server is closing")
        for future in left:
            if not future.done():
                future.set_exception(error)
