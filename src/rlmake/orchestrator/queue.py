"""Trainable traces waiting for a batch: first in, first out, none older than the staleness bound."""

from collections import deque
from collections.abc import Iterable

from rlmake.orchestrator.records import Unit


def is_stale(start: int, step: int, bound: int) -> bool:
    """Whether a rollout dispatched at version `start` may no longer train in batch `step`, which trains v(step−1)."""
    return start < (step - 1) - bound


class Queue:
    """A batch is `batch_size` traces, or as many as reach `token_batch_size` tokens of what is shipped."""

    def __init__(self, batch_size: int | None, token_batch_size: int | None, max_off_policy_steps: int):
        self.batch_size, self.token_batch_size, self.bound = batch_size, token_batch_size, max_off_policy_steps
        self.units: deque[Unit] = deque()
        self.dropped = 0  # stale ones since the last report

    def __len__(self) -> int:
        return len(self.units)

    @property
    def tokens(self) -> int:
        return sum(unit.tokens for unit in self.units)

    def extend(self, units: Iterable[Unit]) -> None:
        self.units.extend(units)

    def sweep(self, step: int) -> int:
        """Drop what batch `step` may not train on any more; how many."""
        kept = [unit for unit in self.units if unit.frozen or not is_stale(unit.start, step, self.bound)]
        dropped = len(self.units) - len(kept)
        self.units = deque(kept)
        self.dropped += dropped
        return dropped

    def missing(self) -> int:
        """How many traces (or tokens) short of a batch; 0: ready."""
        have, want = (len(self), self.batch_size) if self.batch_size else (self.tokens, self.token_batch_size)
        return max(0, want - have)

    def take(self) -> list[Unit]:
        """The next batch; call it when nothing is missing."""
        if self.batch_size:
            return [self.units.popleft() for _ in range(self.batch_size)]
        batch, tokens = [], 0
        while tokens < self.token_batch_size:
            batch.append(self.units.popleft())
            tokens += batch[-1].tokens
        return batch
