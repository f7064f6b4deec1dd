"""Online evaluations: each measures exactly one policy version, before anything newer is received."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from loguru import logger

from rlmake.core.rundir import RunContext
from rlmake.envs.client import EnvHandle
from rlmake.evals import summary
from rlmake.evals.runner import episode_deadline, evaluate, wire_sampling
from rlmake.monitors import Monitors
from rlmake.monitors import read as read_rows
from rlmake.monitors.traces import Recorder


class Evaluator:
    """`on_version(v)` runs what is due at v: the base model first, by interval per source, everything at the end."""

    def __init__(
        self,
        config: Any,
        envs: Mapping[str, EnvHandle],
        client: Any,
        model: str,
        monitors: Monitors,
        recorder: Recorder,
        ctx: RunContext,
        resumed_at: int | None,
        hold: Callable[[bool], None],
        room: Callable[[], int],
    ):
        self.config, self.envs, self.client, self.model = config, envs, client, model
        self.monitors, self.recorder = monitors, recorder
        self.ctx, self.resumed_at, self.hold = ctx, resumed_at, hold
        self.room = room  # permits that training leaves
        self.stop: asyncio.Event | None = None  # set: the evaluation under way is given up
        self.inflight = 0
        self.seconds = 0.0  # spent since the last report
        self.errored = self.cancelled = 0  # episodes since the last report

    def due(self, version: int) -> list[Any]:
        """Sources to evaluate at `version`. After a resume: those of that version that did not get to it."""
        if self.config.eval is None:
            return []
        final = self.config.max_steps is not None and version >= self.config.max_steps
        if version == 0:
            return [] if self.config.eval.skip_first_step else list(self.config.eval.source)
        due = [source for source in self.config.eval.source if final or version % source.interval == 0]
        if version == self.resumed_at:
            if self.config.eval.retrigger_on_resume:
                return list(self.config.eval.source)
            due = [source for source in due if source.name not in self._done(version)]
        return due

    def _done(self, version: int) -> set[str]:
        rows = [row.metrics for row in read_rows(self.ctx.run_dir) if row.step == version]
        return {name for name in self.envs if any(f"eval/{name}/policy_version" in row for row in rows)}

    async def on_version(self, version: int) -> None:
        if not (due := self.due(version)):
            return
        self.hold(True)
        try:
            for source in due:
                if self.stop is None or not self.stop.is_set():
                    await self._run(source, version, due[-1])
        finally:
            self.hold(False)

    def _note(self, inflight: int) -> None:
        self.inflight = inflight

    async def _run(self, source: Any, version: int, last: Any) -> None:
        result = await evaluate(
            self.envs[source.name],
            self.client,
            self.model,
            group_size=source.group_size,
            sampling=wire_sampling(source.sampling) | {"cache_salt": str(version)},
            seed=self.config.seed,
            max_inflight=lambda: max(1, self.room()),
            deadline=episode_deadline(source.env),
            stop=self.stop,
            on_inflight=self._note,
            on_all_started=lambda: self.hold(False) if source is last else None,
            recorder=self.recorder,
            version=version,
        )
        entry = summary.summarise(result)
        self.monitors.log(version, summary.metrics(result, entry, version))
        logger.success(summary.line(result, entry, version))
        self.seconds += result.seconds
        self.errored += entry["failed"]
        self.cancelled += result.planned - len(result.records)

    def report(self) -> dict[str, float]:
        row = {"dispatcher/errored/eval": float(self.errored), "dispatcher/cancelled/eval": float(self.cancelled)}
        self.seconds, self.errored, self.cancelled = 0.0, 0, 0
        return row
