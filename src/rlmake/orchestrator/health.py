"""Is the orchestrator itself well: event-loop lag, and the warnings that say which part of a run is too slow."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from loguru import logger

from rlmake.orchestrator.metrics import stats

TICK_SECONDS = 0.1
SMALL_BATCH, SMALL_GROUP = 64, 8  # the page's floors
GROUP_RELATIVE = ("grpo", "max_rl", "hierarchical_grpo", "echo")
REPEAT_STEPS = 10  # a warning that stays true is repeated this rarely


class LoopLag:
    """How late the event loop wakes a sleeper: CPU work on the loop shows here."""

    def __init__(self):
        self.lags: list[float] = []

    async def watch(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(TICK_SECONDS)
            self.lags.append(time.monotonic() - before - TICK_SECONDS)

    def report(self) -> dict[str, float]:
        lags, self.lags = self.lags, []
        return stats("event_loop_lag", lags)


def advise(config: Any) -> None:
    """The page's advice on sizes, once at the start of a run."""
    if config.batch_size is not None and config.batch_size < SMALL_BATCH:
        logger.warning(
            f"batch_size = {config.batch_size} is small: below {SMALL_BATCH} rollouts a step the gradient is noisy"
        )
    for source in config.train.source:
        if source.algo.type in GROUP_RELATIVE and source.group_size < SMALL_GROUP:
            logger.warning(
                f"source '{source.name}': group_size = {source.group_size} is small: below {SMALL_GROUP} rollouts a "
                "task too many groups have equal rewards and no signal"
            )


class Warnings:
    """The page's warnings, from a step's metrics."""

    def __init__(self):
        self._last: dict[str, int] = {}

    def check(self, step: int, row: Mapping[str, float]) -> None:
        waited = row.get("time/wait_for_policy", 0.0)
        active = row["time/step"] - waited
        if waited > active:
            self._warn(
                step, "policy", f"waited {waited:.1f} s for new weights, was active for {active:.1f} s: "
                "the trainer is the bottleneck; add trainer nodes if this persists",
            )  # fmt: skip
        rollouts, useful = row["batch/rollouts"], row["window/useful"]
        if rollouts and useful < 0.5 * rollouts:
            cancelled = row["dispatcher/cancelled/train"] - row["dispatcher/cancelled/reason/superseded"]
            stale = row["off_policy/dropped"] + cancelled
            errored = row["dispatcher/errored/train"]
            silent = max(0.0, rollouts - useful - errored - cancelled)
            self._warn(
                step, "discarded", f"{rollouts - useful:.0f} of {rollouts:.0f} rollouts were discarded: "
                f"{stale:.0f} stale, {errored:.0f} errored, {silent:.0f} without a signal",
            )  # fmt: skip

    def _warn(self, step: int, kind: str, message: str) -> None:
        if step - self._last.get(kind, -REPEAT_STEPS) >= REPEAT_STEPS:
            self._last[kind] = step
            logger.warning(f"step {step}: {message}")
