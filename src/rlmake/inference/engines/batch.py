"""The sequences that are being generated: their slots in the KV cache, and the forward pass that moves all of them on.

Each pass runs one flat row: a token for every running sequence, and the prompts of those just admitted. Running
sequences occupy the first slots without gaps, so a pass costs what is running. Equal prompts admitted together are
prefilled once. A sequence keeps its slot until it ends, so nothing is ever preempted.
"""

import itertools
import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from rlmake.inference.engines.base import Completion, Entry, Sampling
from rlmake.inference.engines.sampling import sample
from rlmake.models import exact
from rlmake.models.logprobs import log_distribution, logits_of
from rlmake.models.packing import Plan, up
from rlmake.models.text import decode

PROMPT_ROWS = 256  # rows of prompt logprobs scored at a time


@dataclass(eq=False, slots=True)
class Sequence:
    """A completion in progress. Its slot is its index among the running ones."""

    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int
    future: "Future[Completion]"
    limit: int  # tokens after which it ends, by request or for want of room
    length: int  # prompt and generated tokens
    made: int = 0
    out: Completion = field(default_factory=Completion)
    reason: str | None = None  # stop, length or error, once it has ended


class Batch:
    """At most `slots` sequences of at most `max_len` tokens on one model. The engine's thread owns it."""

    def __init__(self, model: torch.nn.Module, tokenizer: Any, slots: int, max_len: int, fp32_head: bool):
        self.model, self.tokenizer, self.slots, self.fp32_head = model, tokenizer, slots, fp32_head
        self.cache = exact.KVCache.make(model.config, slots, max_len, model.dtype)
        exact.tabulate(model, max_len)
        self.running: list[Sequence] = []
        self.refresh_head()

    def refresh_head(self) -> None:
        """Call after the model's weights have changed."""
        weight = self.model.lm_head.weight
        self._head = weight.float() if self.fp32_head else weight

    def step(self, fresh: list[Sequence]) -> list[Sequence]:
        """One pass: a token for each running sequence and each fresh one. Returns those that have ended by it."""
        hidden = self._forward(fresh)
        self.running += fresh
        running = self.running
        tokens, logprobs, tops = sample(
            self._logits(hidden),
            [sequence.sampling for sequence in running],
            [sequence.seed for sequence in running],
            [sequence.length for sequence in running],
            [sequence.made for sequence in running],
        )
        ended = []
        for slot, (sequence, token, logprob) in enumerate(zip(running, tokens, logprobs, strict=True)):
            sequence.out.token_ids.append(token)
            sequence.out.logprobs.append(logprob)
            sequence.length += 1
            sequence.made += 1
            sampling = sequence.sampling
            if sequence.made >= sequence.limit or token in sampling.stop_ids or sampling.stop:
                sequence.reason = self._reason(sequence, token)
                if sequence.reason is not None:
                    ended.append(slot)
            if sampling.top_logprobs:
                sequence.out.top.append(tops[slot])
        if not math.isfinite(math.fsum(logprobs)):
            ended = sorted({*ended, *self._broken(logprobs)})
        return [self._remove(slot) for slot in reversed(ended)]

    def remove_if(self, gone: Callable[[Sequence], bool]) -> int:
        """Take out the sequences for which `gone`; how many they were."""
        slots = [slot for slot, sequence in enumerate(self.running) if gone(sequence)]
        for slot in reversed(slots):
            self._remove(slot)
        return len(slots)

    def _remove(self, slot: int) -> Sequence:
        """Give a slot back: the last running sequence moves into it, so that no gap is left."""
        gone, last = self.running[slot], self.running.pop()
        if slot < len(self.running):
            self.cache.copy(len(self.running), slot, last.length)
            self.running[slot] = last
        return gone

    def _reason(self, sequence: Sequence, token: int) -> str | None:
        """Why a sequence ends with `token`, or None. Sets the text where a stop text was met."""
        if sequence.sampling.stop and sequence.made >= sequence.sampling.min_tokens:
            text = decode(self.tokenizer, sequence.out.token_ids)
            hits = [at for stop in sequence.sampling.stop if (at := text.find(stop)) >= 0]
            if hits:
                sequence.out.text = text[: min(hits)]
                return "stop"
        if token in sequence.sampling.stop_ids:
            return "stop"
        return "length" if sequence.made >= sequence.limit else None

    def _broken(self, logprobs: list[float]) -> list[int]:
        """Mark the sequences whose logprob is not finite; their slots."""
        slots = [slot for slot, logprob in enumerate(logprobs) if not math.isfinite(logprob)]
        for slot in slots:
            self.running[slot].reason = "error"
        return slots

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return logits_of(hidden.to(self._head.dtype), self._head)

    def _forward(self, fresh: list[Sequence]) -> torch.Tensor:
        """The hidden state [B, hidden] after the newest token of each sequence, running ones first."""
        ids: list[torch.Tensor] = []
        places: list[torch.Tensor] = []
        decoding, count = None, len(self.running)
        if count:
            newest = torch.tensor([sequence.out.token_ids[-1] for sequence in self.running])
            at = torch.tensor([sequence.length - 1 for sequence in self.running])
            decoding = exact.Decode.of(self.cache, at)
            ids.append(F.pad(newest, (0, len(decoding.positions) - count)))
            places.append(decoding.positions)
        if not fresh:
            context = exact.Context(decode=decoding, cache=self.cache)
            return exact.run(self.model, ids[0][None], places[0][None], context)[:count]
        owners: dict[tuple[int, ...], int] = {}  # distinct prompt → slot of the first sequence that has it
        for slot, sequence in enumerate(fresh, count):
            owners.setdefault(sequence.prompt, slot)
        prompt_ids, positions, packed = self._pack(owners)
        ids.append(prompt_ids)
        places.append(positions)
        context = exact.Context(packed, decoding, self.cache)
        hidden = exact.run(self.model, torch.cat(ids)[None], torch.cat(places)[None], context)
        first = len(ids[0]) if count else 0
        ends = dict(zip(owners, itertools.accumulate(map(len, owners), initial=first), strict=False))
        rows = list(range(count))
        for slot, sequence in enumerate(fresh, count):
            size, owner = len(sequence.prompt), owners[sequence.prompt]
            start = ends[sequence.prompt]
            rows.append(start + size - 1)
            if owner != slot:
                self.cache.copy(owner, slot, size)
            if sequence.sampling.prompt_logprobs is not None:
                sequence.out.prompt_logprobs = self._score_prompt(sequence, hidden[start : start + size])
        return hidden[rows]

    def _pack(self, owners: dict[tuple[int, ...], int]) -> tuple[torch.Tensor, torch.Tensor, exact.Packed]:
        """Ids, positions and layout of distinct prompts, one after the other, padded to a multiple of 16; the padding
        is a document of its own."""
        lens = [len(prompt) for prompt in owners]
        padding = up(sum(lens)) - sum(lens)
        ids = F.pad(torch.tensor(list(itertools.chain.from_iterable(owners))), (0, padding))
        places = F.pad(torch.cat([torch.arange(length) for length in lens]), (0, padding))
        slots = torch.repeat_interleave(torch.tensor(list(owners.values())), torch.tensor(lens))
        slots = F.pad(slots, (0, padding), value=self.cache.spare)
        plan = Plan.of([*lens, padding] if padding else lens)
        return ids, places, exact.Packed(plan, self.cache.rows(slots, places))

    def _score_prompt(self, sequence: Sequence, hidden: torch.Tensor) -> list[list[Entry] | None]:
        """Per prompt position the given token's entry, then the most likely ones; None for the first."""
        found: list[list[Entry] | None] = [None]
        wanted = min(sequence.sampling.prompt_logprobs, self._head.shape[0])
        for start in range(0, len(sequence.prompt) - 1, PROMPT_ROWS):
            targets = torch.tensor(sequence.prompt[start + 1 : start + 1 + PROMPT_ROWS])
            logp = log_distribution(self._logits(hidden[start : start + len(targets)]), None)
            given = logp.gather(1, targets[:, None])
            ranks = (logp > given).sum(-1) + 1
            values, ids = logp.topk(wanted, -1)
            for row, target in enumerate(targets.tolist()):
                entries = [Entry(target, given[row, 0].item(), int(ranks[row]))]
                likely = enumerate(zip(ids[row].tolist(), values[row].tolist(), strict=True), 1)
                entries += [Entry(token, value, rank) for rank, (token, value) in likely if token != target]
                found.append(entries)
        return found
