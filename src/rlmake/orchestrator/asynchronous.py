"""Asynchronous collection: rollouts start whenever the policy is not too far behind, batches are cut as they fill.

A group pins the policy version at its dispatch. Work that would be too old to train is cancelled when a newer version
is announced, and whatever became too old in the queue is dropped before a batch is cut.
"""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from loguru import logger

from rlmake.inference.concurrency import Controller
from rlmake.orchestrator.accounts import Accounts
from rlmake.orchestrator.cut import Silence, cut_batch
from rlmake.orchestrator.groups import Groups
from rlmake.orchestrator.pacing import Burst, TaskRate
from rlmake.orchestrator.queue import Queue, is_stale
from rlmake.orchestrator.records import Group, Unit
from rlmake.orchestrator.rollouts import Rollouts
from rlmake.orchestrator.sources import Sources
from rlmake.orchestrator.watcher import Watcher

TARGET_LAG = 1  # versions by which collection may run ahead of training
STARTS = 8  # in one turn of the event loop: many free places must not stall it


class Asynchronous:
    """A collector with its dispatcher; `background` are coroutines that must run beside the main loop."""

    lag = 0  # nothing is collected for a later step than the one being cut

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
        self.largest = max(source.group_size for source in config.train.source)
        self.burst = Burst(self.largest)
        self.rate = TaskRate(config.tasks_per_minute)
        self.silence = Silence(config)
        self.step = 1  # the batch being collected
        self.first = watcher.version + 1  # the version that the trainer offers before anything else
        self.held = False  # an evaluation still has episodes to start: it gets permits first
        self.ended = False  # no more training rollouts
        self.open: dict[int, Group] = {}  # by index; until their units are in the queue
        self.waiting: list[Group] = []  # drawn, and to be started anew: opened before a resume, or cut for overload
        self.tasks: dict[int, set[asyncio.Task]] = {}
        self.wake, self.arrived = asyncio.Event(), asyncio.Event()
        self.failure: BaseException | None = None
        self.background: list[Callable] = [self.dispatch, watcher.follow]

    async def collect(self, step: int) -> list[Unit]:
        self.step = step
        self.wake.set()
        self._sweep(step)
        while True:
            self.arrived.clear()
            if self.queue.missing():
                await self.arrived.wait()
            elif not self._sweep(step):  # what has come since may have waited for its group too long
                await self.watcher.wait(step - 1 - TARGET_LAG)
                if units := cut_batch(self.queue, self.config):
                    return units

    def _sweep(self, step: int) -> int:
        if dropped := self.queue.sweep(step):
            logger.info(f"{dropped} queued rollouts are too old for step {step} and are replaced")
        return dropped

    async def end(self) -> None:
        """The last batch is shipped: no more training rollouts."""
        self.ended = True
        await self._drop_each(self.open.values(), "superseded")

    async def finish(self, version: int) -> None:
        """Wait for the last version and its evaluations."""
        await self.end()  # a resume behind the last step has no step to end at
        await self.watcher.settled(version)

    def hold(self, held: bool) -> None:
        """An evaluation has episodes to start, or no more: it gets permits first."""
        self.held = held
        self.wake.set()

    def on_version(self, version: int) -> None:
        """A new version is served and evaluated: the gate may be open again."""
        self.wake.set()

    async def drop_stale(self, pending: int) -> None:
        """Version `pending` is announced: cancel what could not train any more, before the engines are paused."""
        step, bound = max(self.step, pending + 1), self.config.max_off_policy_steps
        await self._drop_each(
            (group for group in self.open.values() if not group.frozen and is_stale(group.version, step, bound)),
            "stale",
        )

    async def cut(self, excess: int) -> None:
        """The engines are overloaded: give up the youngest groups until `excess` episodes are gone; their tasks are
        started anew when there is room."""
        groups = sorted(self.open.values(), key=lambda group: group.index)
        while groups and excess > 0:
            group = groups.pop()
            running = group.started - len(group.episodes)
            if running > 0 and self.open.get(group.index) is group:
                excess -= running
                self._drop(group, "overload")
                self.waiting.append(group.again())
                await asyncio.sleep(0)

    async def dispatch(self) -> None:
        """Start rollouts while the gate is open and permits are left. Open groups are continued first."""
        started = 0
        while True:
            self.wake.clear()
            if self.failure is not None:
                raise self.failure
            self.burst.limit = max(self.largest, self.controller.max_inflight // 10)
            pause = self.burst.wait()
            if not self._gate_open() or pause > 0:
                with suppress(TimeoutError):  # not `wait_for`: that may swallow a cancellation (CPython 3.11)
                    async with asyncio.timeout(pause or None):
                        await self.wake.wait()
                continue
            group = self._unfinished() or await self._open()
            if group.index in self.open:  # it may have been dropped while the rate was waited for
                self._start(group)
                started += 1
                if started % STARTS == 0:
                    await asyncio.sleep(0)

    def _unfinished(self) -> Group | None:
        """The group that has rollouts left to start: the newest, if any, for one is opened when all are started."""
        newest = next(reversed(self.open.values()), None)
        return newest if newest is not None and newest.started < newest.size else None

    def _gate_open(self) -> bool:
        lead = (self.step - 1) - self.watcher.version
        open_ = lead <= TARGET_LAG and self.watcher.version >= self.first and not (self.held or self.ended)
        return open_ and self.accounts.total < self.controller.max_inflight

    async def _open(self) -> Group:
        if self.waiting:
            group = self.waiting.pop(0)
            group.step, group.version = self.step, self.watcher.version
        else:
            group = self.sources.draw(self.step, self.watcher.version)
        self.open[group.index] = group
        await self.rate.take()
        return group

    def _start(self, group: Group) -> None:
        task = asyncio.create_task(self._episode(group, group.started))
        group.started += 1
        self.accounts.start(group.env)
        self.burst.start()
        self.tasks.setdefault(group.index, set()).add(task)
        task.add_done_callback(lambda task: self._done(group, task))

    async def _episode(self, group: Group, sample: int) -> None:
        episode = await self.rollouts.run(group, sample)
        group.episodes[sample] = episode
        generated = any(node.sampled for trace in episode.traces for node in trace.nodes)
        self.controller.completed(self.accounts.total, generated)
        self.accounts.end(group.env, episode.ok)
        self.burst.finish()
        self.wake.set()
        if group.accounted:
            await self._finish(group)

    async def _finish(self, group: Group) -> None:
        units = await self.groups.finish(group, self.watcher.version)
        if self.open.pop(group.index, None) is None:
            return  # dropped meanwhile
        self.queue.extend(units)
        self.silence.note(group, len(units), self.sources.draws)
        self.arrived.set()

    def _done(self, group: Group, task: asyncio.Task) -> None:
        if group.index in self.tasks:
            self.tasks[group.index].discard(task)
            if not self.tasks[group.index] and group.index not in self.open:
                del self.tasks[group.index]
        if not task.cancelled() and task.exception() is not None and self.failure is None:
            self.failure = task.exception()
            self.wake.set()

    async def _drop_each(self, groups: Iterable[Group], reason: str) -> None:
        """One group a turn of the event loop: thousands of cancelled episodes at once would stall it."""
        groups = list(groups)[::-1]
        while groups:
            group = groups.pop()  # nothing else may hold it: what it has collected is freed now, not all at the end
            if self.open.get(group.index) is group:  # it may have ended meanwhile
                self._drop(group, reason)
                await asyncio.sleep(0)

    def _drop(self, group: Group, reason: str) -> None:
        """Cancel a whole group: its rollouts share one version and age together."""
        self.open.pop(group.index, None)
        for task in self.tasks.pop(group.index, ()):
            task.cancel()
        failed = sum(not episode.ok for episode in group.episodes.values())
        running = group.started - len(group.episodes)
        self.accounts.cancel(group.env, reason, running, len(group.episodes) - failed, failed)
        self.wake.set()

    def metrics(self) -> dict[str, float]:
        """How far behind the policy what is in flight was started."""
        ages = [max(0, self.watcher.version - group.version) for group in self.open.values() if not group.frozen]
        mean = sum(ages) / len(ages) if ages else 0.0
        return {"dispatcher/off_policy/mean": mean, "dispatcher/off_policy/max": float(max(ages, default=0))}

    def state_dict(self) -> dict[str, Any]:
        """Tasks that were drawn and are not in the queue yet: a resume starts them anew, none is lost."""
        pending = [*self.open.values(), *self.waiting]
        rows = [{"index": g.index, "env": g.env, "draw": g.draw, "task": g.task} for g in pending]
        return {"open": rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Those of sources that go on with their tasks; a source may have another group size or algorithm by now."""
        for row in state.get("open", []):
            source = self.sources.by_name.get(row["env"])
            if source is not None and not source.anew:
                self.waiting.append(source.group(row["index"], row["draw"], row["task"], step=0, version=0))

    async def close(self) -> None:
        """Cancel what is in flight and wait for it to be gone."""
        running = [task for tasks in self.tasks.values() for task in tasks]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
