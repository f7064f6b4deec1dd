"""`python -m rlmake.orchestrator.online @ <resolved>/online_eval.json`: evaluations beside an SFT trainer.

Each version that the trainer offers is installed once the evaluation before it has ended (or was given up, see
`eval.cancel_on_new_checkpoint`), and then evaluated, source by source: an epoch measures exactly one version. The last
version ends the process; its evaluation is never given up.
"""

import asyncio
import signal
import sys
from typing import Any

from loguru import logger
from setproctitle import setproctitle

from rlmake import monitors, transport
from rlmake.config import load_resolved
from rlmake.config.online import OnlineEvalProcessConfig
from rlmake.core import log
from rlmake.core.errors import UserError, entry_point
from rlmake.core.offload import favour_loop
from rlmake.core.procs import die_with_parent
from rlmake.core.rundir import RunContext

TERMINATED = 128 + signal.SIGTERM
POLL_SECONDS = 0.05


class OnlineEvaluation:
    """`watcher` installs versions, `evaluator` measures them."""

    def __init__(self, config: OnlineEvalProcessConfig, watcher: Any, evaluator: Any):
        self.config, self.watcher, self.evaluator = config, watcher, evaluator
        self.stop = asyncio.Event()  # gives up the evaluation at hand

    async def run(self) -> None:
        """Until the last version has been evaluated; without `max_steps` for ever."""
        running: asyncio.Future | None = None
        while True:
            await self._offered()
            if running is not None:
                await self._end(running)
            version = await self.watcher.next()
            self.stop = self.evaluator.stop = asyncio.Event()
            running = asyncio.ensure_future(self.evaluator.on_version(version))
            if self.config.max_steps is not None and version >= self.config.max_steps:
                await running
                return

    async def _offered(self) -> None:
        while self.watcher.receiver.poll(self.watcher.version) is None:
            await asyncio.sleep(POLL_SECONDS)

    async def _end(self, running: asyncio.Future) -> None:
        """Give the evaluation up, or wait for it; the trainer waits meanwhile."""
        if not running.done():
            if self.config.eval.cancel_on_new_checkpoint:
                logger.warning(f"evaluation of v{self.watcher.version} is given up: newer weights are ready")
                self.stop.set()
            else:
                logger.info(f"the trainer waits for the evaluation of v{self.watcher.version}")
        await running


async def evaluate(config: OnlineEvalProcessConfig, ctx: RunContext) -> None:
    """Connect to engines and environments and evaluate what the trainer offers."""
    from rlmake.envs.client import connect_all, engine_client
    from rlmake.orchestrator.engines import Engines
    from rlmake.orchestrator.evaluation import Evaluator
    from rlmake.orchestrator.watcher import Watcher

    writer = monitors.setup(config.monitors, "eval", ctx)
    adapter = config.model.lora and config.model.lora.name
    engines = Engines(config.model.client, config.model.name, ctx, adapter)
    await engines.wait_ready()

    handles = await connect_all(ctx, "eval", config.eval.source)
    bound = config.eval.concurrency.max_inflight or 1024
    begun = config.resume.step if config.resume and config.resume.dir is None else None
    evaluator = Evaluator(
        config,
        handles,
        engine_client(config.model.client, engines.base_url, config.renderer, config.tokenizer.name),
        engines.model,
        writer,
        writer.recorder(ctx.run_id),
        ctx,
        begun,
        lambda held: None,
        lambda: bound,
    )
    receiver = transport.WeightReceiver(ctx.run_dir, ctx)
    watcher = Watcher(receiver, engines, config.weight_broadcast.timeout, (begun or 0) - 1, _nothing, _nothing)
    try:
        await OnlineEvaluation(config, watcher, evaluator).run()
    finally:
        for handle in handles.values():
            await handle.close()
        await engines.close()
        writer.close()


async def _nothing(version: int) -> None:
    """An installed version is evaluated beside the waiting for the next one, not within it."""


async def _run(config: OnlineEvalProcessConfig, ctx: RunContext) -> int:
    favour_loop()
    task = asyncio.ensure_future(evaluate(config, ctx))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        return TERMINATED
    return 0


@entry_point
def main(argv: list[str] | None = None) -> int:
    die_with_parent()
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) != 2 or argv[0] != "@":
        raise UserError("usage: python -m rlmake.orchestrator.online @ <resolved>/online_eval.json")
    config = load_resolved(OnlineEvalProcessConfig, argv[1])
    log.setup("eval", config.log.level, config.log.json_logging)
    setproctitle("PRL::Eval")
    return asyncio.run(_run(config, RunContext.from_env(config.output_dir)))


if __name__ == "__main__":
    main()
