"""Cutting a batch from the queue, and noticing that nothing comes out of finished rollouts."""

import math
import time
from collections import Counter
from typing import Any

import msgspec
from loguru import logger

from rlmake.core.errors import RunFailed
from rlmake.orchestrator.queue import Queue
from rlmake.orchestrator.records import Group, Unit
from rlmake.orchestrator.samples import prune

FATAL = 3  # batches
TAKEN = ("EnvWorkerDied", "EnvServerGone")  # errors that one event gives to all that is in flight
REPEAT_SECONDS = 60.0


def cut_batch(queue: Queue, config: Any) -> list[Unit]:
    """The next batch. With `constant_trainer_batch_size` the queue holds useful traces only; without, silent tokens
    are pruned now, the batch may be smaller, and an empty one ([]) must not be shipped: collect on."""
    units = queue.take()
    if config.constant_trainer_batch_size:
        return units
    pruned = [[sample for old in unit.samples if (sample := prune(old)) is not None] for unit in units]
    kept = [msgspec.structs.replace(unit, samples=s) for unit, s in zip(units, pruned, strict=True) if s]
    if not kept:
        logger.warning(f"none of {len(units)} rollouts carries a training signal; collecting another batch")
    return kept


class Silence:
    """Warns when a whole batch's worth of rollouts ended without one useful trace, once a minute while that goes on;
    ends a run (`RunFailed`) in which `FATAL` batches' worth in a row failed without one rollout that came to its end:
    waiting mends nothing then. An env worker or server that dies takes all that is in flight along, however much that
    is: it counts as one batch.
    """

    def __init__(self, config: Any):
        self.target = config.batch_size or max(1, config.token_batch_size // config.seq_len)
        self.silent = self.failed = self.ended = self.rejected = self.failures = self.cut = 0
        self.excused = 0  # groups opened before this one went with the last death that was counted
        self.seq_len, self.told = config.seq_len, -math.inf
        self.errors: Counter[str] = Counter()

    def note(self, group: Group, useful: int, opened: int) -> None:
        """A group has finished, and `useful` of its traces went to the queue; `opened`: groups of the run so far."""
        if useful:
            self.silent = self.rejected = self.failures = self.cut = 0
        else:
            self.silent += group.size
            failures = sum(not episode.ok for episode in group.episodes.values())
            self.failures += failures
            self.rejected += group.size - failures if group.rejected else 0
            self.cut += group.cut if not group.rejected else 0
        if any(episode.ok for episode in group.episodes.values()):
            self.failed = self.ended = 0
            self.errors.clear()
        else:
            errors = [_error(episode) for episode in group.episodes.values()]
            if not all(error.startswith(TAKEN) for error in errors):
                self.failed += group.size
            elif group.index >= self.excused:
                self.failed, self.excused = self.failed + max(group.size, self.target), opened
            self.ended += group.size
            self.errors.update(errors)
        if self.failed >= FATAL * self.target:
            (error, count), *_ = self.errors.most_common(1)
            raise RunFailed(
                f"the last {self.ended} rollouts all failed, {count} of them with: {error}; the env servers' logs "
                "(logs/latest/envs/train) say more"
            )
        if self.silent >= self.target and time.monotonic() - self.told >= REPEAT_SECONDS:
            self.told = time.monotonic()
            quiet = max(0, self.silent - self.failures - self.rejected - self.cut)  # an episode may have more traces
            cut = f"{self.cut} reply beyond seq_len = {self.seq_len}, " if self.cut else ""
            logger.warning(
                f"the last {self.silent} rollouts gave nothing to train on: {self.failures} failed, {self.rejected} "
                f"were rejected by a gate, {cut}{quiet} have no signal (equal rewards)"
            )


def _error(episode: Any) -> str:
    """The last error of an episode or its traces, in one line."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not errors:
        return "no error was recorded"
    text = " ".join(f"{errors[-1].type}: {errors[-1].message}".split())
    return text if len(text) <= 300 else text[:299] + "…"
