"""The number of episodes in flight, steered by the engines' load; and that load as metrics of a step."""

from collections.abc import Awaitable, Callable
from typing import Any

from loguru import logger

from rlmake.inference.concurrency import Controller, require, steer
from rlmake.inference.load import LoadReader, Unreadable
from rlmake.orchestrator.engines import Engines

UNBOUNDED = 1024  # episodes in flight in lock-step, where no bound is given
KEY = "orchestrator.concurrency"


class Steering:
    """`controller` says how many episodes may run. In lock-step their number changes no result: it is pinned."""

    def __init__(self, config: Any, engines: Engines):
        bounds = config.concurrency
        most = bounds.max_inflight or (UNBOUNDED if config.deterministic else None)
        least = most if config.deterministic else bounds.min_inflight
        tokens = engines.max_model_len or config.seq_len
        self.controller = Controller(least, most, bounds.initial_inflight, tokens)
        self.reader, self.collect, self._told = LoadReader(engines.admin), config.collect_inference_metrics, False

    async def open(self) -> None:
        """The first reading. Raises `UserError` when it is needed and an engine gives none."""
        if self.controller.pinned:
            await self.look()
        else:
            self.controller.poll(await require(self.reader, KEY), 0)

    def background(self, inflight: Callable[[], int], cut: Callable[[int], Awaitable[None]]) -> list[Callable]:
        """What must run beside the main loop: nothing when the number is pinned."""
        return [] if self.controller.pinned else [lambda: steer(self.controller, self.reader, inflight, cut)]

    async def look(self) -> None:
        """A reading for the step's metrics; an engine that gives none costs the metrics only."""
        if not self.collect:
            return
        try:
            await self.reader.look()
        except Unreadable as error:
            if not self._told:
                logger.warning(f"{error}: no inference/* metrics")
            self._told = True

    def report(self) -> dict[str, float]:
        return self.controller.metrics() | (self.reader.report() if self.collect else {})
