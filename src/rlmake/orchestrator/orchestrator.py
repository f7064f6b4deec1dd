"""The orchestrator: components wired together, and the main loop."""

import asyncio
import itertools
import time
from collections.abc import Iterator
from typing import Any

from loguru import logger

from rlmake import monitors, transport
from rlmake.algorithms import AlgorithmContext, Endpoint
from rlmake.algorithms import build as build_algorithm
from rlmake.core.collector import collect_grown, collected_on_growth
from rlmake.core.errors import UserError
from rlmake.core.offload import off_loop
from rlmake.core.rundir import RunContext
from rlmake.envs.client import EnvHandle, connect_all, engine_client
from rlmake.orchestrator import checkpoints
from rlmake.orchestrator.accounts import Accounts
from rlmake.orchestrator.asynchronous import Asynchronous
from rlmake.orchestrator.background import run_with
from rlmake.orchestrator.batches import Packer
from rlmake.orchestrator.engines import Engines, await_answer
from rlmake.orchestrator.evaluation import Evaluator
from rlmake.orchestrator.groups import Groups
from rlmake.orchestrator.health import LoopLag, Warnings, advise
from rlmake.orchestrator.lockstep import LockStep
from rlmake.orchestrator.metrics import Clock, Progress, Window
from rlmake.orchestrator.queue import Queue
from rlmake.orchestrator.records import Group, Unit
from rlmake.orchestrator.rollouts import Rollouts
from rlmake.orchestrator.sources import Sources
from rlmake.orchestrator.steering import Steering
from rlmake.orchestrator.watcher import Watcher

FETCH_POLL_SECONDS = 0.05


class Orchestrator:
    """One run, one attempt. `run` returns when the last step's weights have been received and evaluated."""

    def __init__(self, config: Any, ctx: RunContext):
        if not config.train.source:
            raise UserError("orchestrator.train.source: needs at least one source")
        self.config, self.ctx = config, ctx
        advise(config)
        adapter = config.model.lora and config.model.lora.name
        self.engines = Engines(config.model.client, config.model.name, ctx, adapter)
        folder = checkpoints.resume_folder(config, ctx.run_dir)
        self.resumed = checkpoints.load(folder) if folder else None

    async def run(self) -> None:
        """The whole run."""
        finished = False
        await self._open()
        with collected_on_growth():
            try:
                await run_with(self._main(), [component() for component in self._background()])
                finished = True
            finally:
                await self._close(finished)

    async def _main(self) -> None:
        await self._ship_ahead()
        for step in self._steps():
            units = await self.collector.collect(step)
            await self._ship(step, units)
            counted = self.progress.add(units)
            await self.checkpoints.after(step, units)
            if step == self.config.max_steps:
                await self.collector.end()  # behind the checkpoint, which keeps what is open, and before the last row
            await self.steering.look()
            await self._report(step, units, counted)
        if self.config.max_steps is not None:
            await self.collector.finish(self.config.max_steps)
            while not self.sender.fetched():
                await asyncio.sleep(FETCH_POLL_SECONDS)
            logger.success(f"all {self.config.max_steps} steps are shipped and v{self.config.max_steps} is served")

    def _steps(self) -> Iterator[int]:
        """Steps to collect. With a lag, the last checkpoint holds the batches that lie beyond the last step."""
        first = self.begun + 1 + len(self.resumed.waiting.ahead if self.resumed else ())
        if self.config.max_steps is None:
            return itertools.count(first)
        beyond = self.collector.lag if self.config.ckpt else 0
        return iter(range(first, self.config.max_steps + beyond + 1))

    async def _ship(self, step: int, units: list[Unit]) -> None:
        """Pack a batch off the event loop and hand it to the trainer."""
        if self._beyond(step):
            return
        with self.clock.measure("pack"):
            batches = await asyncio.to_thread(self.packer.pack, step, units)
        await asyncio.to_thread(self.sender.send, batches)
        self.recorder.shipped([unit.name for unit in units], step, self.watcher.version)

    def _beyond(self, step: int) -> bool:
        """Whether `step` is collected only for the last checkpoint's sake."""
        return self.config.max_steps is not None and step > self.config.max_steps

    async def _ship_ahead(self) -> None:
        """After a resume: the batches that were collected for later steps before the checkpoint."""
        for batch in self.resumed.waiting.ahead if self.resumed else ():
            await self._ship(batch.step, batch.units)
            self.checkpoints.ahead.append(batch)
            await self._report(batch.step, batch.units, {})  # counted before the checkpoint

    async def _report(self, step: int, units: list[Unit], counted: dict[str, float]) -> None:
        """Metrics and the console line of a step."""
        if self._beyond(step):
            return
        useful, self.useful = self.useful, 0
        self.clock.add("save_ckpt", self.checkpoints.seconds)
        self.clock.add("eval", self.evaluator.seconds)
        self.clock.add("wait_for_policy", self.watcher.waited)
        self.checkpoints.seconds = self.watcher.waited = 0.0
        window, self.window = self.window, Window(self.window.envs)
        cancelled = self.accounts.cancelled_by_env(besides="superseded")  # which is no waste of this run
        row = self.clock.report() | counted | self.accounts.report() | self.evaluator.report()  # all of one moment
        row |= await off_loop(window.report, units, step, cancelled)
        row |= self.collector.metrics() | self.lag.report()
        row |= {"off_policy/dropped": float(self.queue.dropped), "window/useful": float(useful)}
        row |= {"queue/traces": float(len(self.queue)), "queue/tokens": float(self.queue.tokens)}
        row |= {"watcher/version": float(self.watcher.version)}
        row |= {f"watcher/{name}_seconds": seconds for name, seconds in self.watcher.seconds.items()}
        row |= self.steering.report()
        for source in self.sources.by_name.values():
            row |= source.metrics()
        self.queue.dropped = 0
        self.monitors.log(step, row)
        self.warnings.check(step, row)
        collect_grown()

    def _on_group(self, group: Group, facts: list[dict[str, Any]], units: list[Unit], admitted: bool) -> None:
        self.window.add(group, facts, units, admitted)
        self.useful += len(units)

    async def _on_installed(self, version: int) -> None:
        await self.evaluator.on_version(version)
        self.collector.on_version(version)

    def _capture(self) -> tuple[dict[str, Any], list[Unit]]:
        """The state of this moment, between two batches."""
        state = {
            "sources": self.sources.state_dict(),
            "algorithms": {name: algorithm.state_dict() for name, algorithm in self.algorithms.items()},
            "collector": self.collector.state_dict(),
            "totals": dict(self.progress.totals),
            "last": self.progress.last,
        }
        return state, list(self.queue.units)

    def _restore(self) -> None:
        if self.resumed is None:
            return
        waiting, skipped = self.resumed.waiting, self.config.ckpt and self.config.ckpt.skip_progress
        units = [unit for batch in waiting.ahead for unit in batch.units] + ([] if skipped else waiting.queue)
        longest = max((len(sample) for unit in units for sample in unit.samples), default=0)
        if longest > self.config.seq_len:
            raise UserError(
                f"orchestrator.seq_len: {self.config.seq_len} is below the {longest} tokens of a rollout that waits in "
                "the checkpoint: resume with at least as many"
            )
        if skipped:
            return
        state = self.resumed.state
        self.sources.load_state_dict(state["sources"])
        for name, algorithm in self.algorithms.items():
            if state["algorithms"].get(name):  # one without a state leaves none, and may have been another
                algorithm.load_state_dict(state["algorithms"][name])
        self.collector.load_state_dict(state["collector"])
        self.progress.totals |= state["totals"]
        self.progress.last = state.get("last", "")
        self.queue.extend(waiting.queue)

    def _background(self) -> list[Any]:
        found = [self.checkpoints.answer, self.lag.watch, *self.collector.background]
        return found + self.steering.background(self._inflight, self.collector.cut)

    def _inflight(self) -> int:
        """Episodes in flight, of training and of evaluations."""
        return self.accounts.total + self.evaluator.inflight

    async def _open(self) -> None:
        """Connect to engines and environments, build the components, restore the state."""
        config, ctx = self.config, self.ctx
        self.begun = self.resumed.step if self.resumed else 0
        self.monitors = monitors.setup(config.monitors, "orch", ctx, last=config.max_steps)
        names = [source.name for source in config.train.source]
        self.accounts, self.window, self.progress = Accounts(names), Window(names), Progress()
        self.clock, self.lag, self.warnings, self.useful = Clock(time.monotonic), LoopLag(), Warnings(), 0
        await self.engines.wait_ready()
        await self._await_frozen()
        self.steering = Steering(config, self.engines)
        await self.steering.open()
        self.envs = await self._connect("train", config.train.source)
        self.eval_envs = await self._connect("eval", config.eval.source if config.eval else [])
        self.sources = Sources(
            config.train.source, {name: env.num_tasks() for name, env in self.envs.items()}, config.seed
        )
        policy = Endpoint(self.engines.base_url, self.engines.model, config.model.client.api_key_var)
        self.algorithms = {
            source.name: build_algorithm(
                source.algo,
                AlgorithmContext(source.name, policy, config.tokenizer.name, self.envs[source.name].agents),
            )
            for source in config.train.source
        }
        self.recorder = self.monitors.recorder(ctx.run_id)
        rollouts = Rollouts(config, self.envs, self.engines, self.recorder, lambda: self.watcher.version)
        groups = Groups(config, self.sources, self.algorithms, rollouts.temperature, self._on_group, self.recorder)
        self.queue = Queue(config.batch_size, config.token_batch_size, config.max_off_policy_steps)
        self.evaluator = Evaluator(
            config,
            self.eval_envs,
            engine_client(config.model.client, self.engines.base_url, config.renderer, config.tokenizer.name),
            self.engines.model,
            self.monitors,
            self.recorder,
            ctx,
            self.begun if self.resumed else None,
            lambda held: self.collector.hold(held),
            lambda: self.steering.controller.max_inflight - self.accounts.total,
        )
        self.watcher = Watcher(
            transport.WeightReceiver(ctx.run_dir, ctx),
            self.engines,
            config.weight_broadcast.timeout,
            self.begun - 1,
            lambda version: self.collector.drop_stale(version),
            self._on_installed,
        )
        kind = LockStep if config.deterministic else Asynchronous
        parts = (self.sources, rollouts, groups, self.queue, self.watcher, self.accounts)
        self.collector = kind(config, *parts, self.steering.controller)
        self.packer = Packer(config, ctx)
        self.sender = transport.open_sender(config.rollout_transport, ctx, keep=2 + self.collector.lag)
        self.checkpoints = checkpoints.Checkpoints(config, ctx, self.collector.lag, self._capture)
        self._restore()

    async def _await_frozen(self) -> None:
        """The servers of frozen models, which the user may have started only now."""
        found = {}
        for key, model in self.config.frozen_models():
            if key.startswith("train.source.") and model.base_url is not None:  # train.algo may be used by no source
                found.setdefault(model.base_url, f"orchestrator.{key}.base_url")
        timeout = self.config.model.client.wait_for_ready_timeout
        await asyncio.gather(*(await_answer(key, url, timeout) for url, key in found.items()))

    async def _connect(self, split: str, sources: list[Any]) -> dict[str, EnvHandle]:
        return await connect_all(self.ctx, split, sources)

    async def _close(self, finished: bool) -> None:
        await self.collector.close()
        self.sender.close()
        for algorithm in self.algorithms.values():
            await algorithm.close()
        for handle in (*self.envs.values(), *self.eval_envs.values()):
            await handle.close()
        await self.engines.close()
        self.monitors.close(finished)
