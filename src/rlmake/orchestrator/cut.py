"""Cutting a batch from the queue, and noticing that nothing comes out of finished rollouts."""

from typing import Any

import msgspec
from loguru import logger

from rlmake.orchestrator.queue import Queue
from rlmake.orchestrator.records import Unit
from rlmake.orchestrator.samples import prune


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


class SilenceWarning:
    """Warns each time a whole batch's worth of rollouts ended without one useful trace."""

    def __init__(self, config: Any):
        self.target = config.batch_size or max(1, config.token_batch_size // config.seq_len)
        self.silent = 0

    def note(self, rollouts: int, useful: int) -> None:
        self.silent = 0 if useful else self.silent + rollouts
        if self.silent >= self.target:
            logger.warning(
                f"the last {self.silent} rollouts gave nothing to train on (equal rewards, errors, or too old): "
                "see errored_rollouts/*, reward/* and off_policy/dropped"
            )
            self.silent = 0
