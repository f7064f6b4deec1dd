"""Collection in lock-step: the same configuration gives the same batches, also through kills and resumes.

Batch s is collected with v(s−1−lag), in waves of whole groups; weights change only between batches. Results are used
in the order of (group, sample), never in the order of arrival.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from rlmake.inference.concurrency import Controller
from rlmake.orchestrator.accounts import Accounts
from rlmake.orchestrator.cut import Silence, cut_batch
from rlmake.orchestrator.groups import Groups
from rlmake.orchestrator.pacing import TaskRate
from rlmake.orchestrator.queue import Queue
from rlmake.orchestrator.records import Group, Unit
from rlmake.orchestrator.rollouts import Rollouts
from rlmake.orchestrator.sources import Sources
from rlmake.orchestrator.watcher import Watcher


class LockStep:
    """A collector: `collect(step)` gives the units of one batch."""

    def __init__(
        self,
        config: Any,
        sources: Sources,
        rollouts: Rollouts,
        groups: Groups,
        queue: Queue,
        watcher: Watcher,
        accounts: Accounts,
        controller: Controller,
    ):
        self.config, self.sources, self.rollouts, self.groups = config, sources, rollouts, groups
        self.queue, self.watcher, self.accounts, self.controller = queue, watcher, accounts, controller
        self.lag = config.lag
        self.permits = asyncio.Semaphore(controller.max_inflight)
        self.rate = TaskRate(config.tasks_per_minute)
        self.silence = Silence(config)
        self.background: list[Callable] = []
        self.traces: dict[str, list[int]] = {}  # env → clean episodes so far, and their traces

    async def collect(self, step: int) -> list[Unit]:
        """Wait for the version that `step` is collected with, then run waves until the batch is full."""
        await self.watcher.reach(max(0, step - 1 - self.lag))
        self.queue.sweep(step)
        while True:
            while missing := self.queue.missing():
                await self._wave(self._draw(missing, step))
            if units := cut_batch(self.queue, self.config):
                return units

    async def end(self) -> None:
        """The last batch is shipped: nothing is in flight."""

    async def finish(self, version: int) -> None:
        """Receive up to the last version: its evaluations run as it arrives."""
        await self.watcher.reach(version)

    def _draw(self, missing: int, step: int) -> list[Group]:
        """As many groups as fill the batch if every trace counts (and, for token batches, is as long as can be)."""
        traces = missing if self.queue.batch_size else -(-missing // self.config.seq_len)
        wave: list[Group] = []
        while sum(group.size * self._traces_of(group.env) for group in wave) < traces:
            wave.append(self.sources.draw(step, self.watcher.version))
        return wave

    def _traces_of(self, env: str) -> float:
        """Traces of an episode: the mean so far, at first one for each agent."""
        episodes, traces = self.traces.get(env, (1, len(self.rollouts.envs[env].agents)))
        return max(1.0, traces / episodes)

    async def _wave(self, wave: list[Group]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for group in wave:
                await self.rate.take()
                for sample in range(group.size):
                    tasks.create_task(self._episode(group, sample))
        for group in wave:
            for episode in group.in_order():
                if episode.ok:
                    seen = self.traces.setdefault(group.env, [0, 0])
                    self.traces[group.env] = [seen[0] + 1, seen[1] + len(episode.traces)]
            units = await self.groups.finish(group, self.watcher.version)
            self.queue.extend(units)
            self.silence.note(group, len(units), self.sources.draws)

    async def _episode(self, group: Group, sample: int) -> None:
        async with self.permits:
            self.accounts.start(group.env)
            episode = await self.rollouts.run(group, sample)
            group.episodes[sample] = episode
            self.controller.completed(self.accounts.total, sum(trace.num_output_tokens for trace in episode.traces))
            self.accounts.end(group.env, episode.ok)

    def hold(self, held: bool) -> None:
        """An evaluation starts or ends: nothing else runs then anyway."""

    def on_version(self, version: int) -> None:
        """A new version is served: `collect` asked for it."""

    async def cut(self, excess: int) -> None:
        """The engines are overloaded: never called, the number of episodes in flight is pinned."""

    async def drop_stale(self, pending: int) -> None:
        """A version is announced: nothing is in flight that could be too old."""

    def metrics(self) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"traces": dict(self.traces)}  # nothing is in flight between batches

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.traces = {env: list(seen) for env, seen in state.get("traces", {}).items()}

    async def close(self) -> None:
        pass
