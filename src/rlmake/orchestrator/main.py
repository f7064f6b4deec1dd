"""`python -m rlmake.orchestrator.main @ <resolved>/orchestrator.json`: the orchestrator's process."""

import asyncio
import signal
import sys

from setproctitle import setproctitle

from rlmake.config import OrchestratorConfig, load_resolved
from rlmake.core import log
from rlmake.core.errors import UserError, entry_point
from rlmake.core.offload import favour_loop
from rlmake.core.procs import die_with_parent
from rlmake.core.rundir import RunContext

TERMINATED = 128 + signal.SIGTERM


@entry_point
def main(argv: list[str] | None = None) -> int:
    die_with_parent()
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) != 2 or argv[0] != "@":
        raise UserError("usage: python -m rlmake.orchestrator.main @ <resolved>/orchestrator.json")
    config = load_resolved(OrchestratorConfig, argv[1])
    log.setup("orchestrator", config.log.level, config.log.json_logging)
    setproctitle("PRL::Orchestrator")
    return asyncio.run(_run(config, RunContext.from_env(config.output_dir)))


async def _run(config: OrchestratorConfig, ctx: RunContext) -> int:
    """Run to the end; SIGTERM or SIGINT ends it in order."""
    from rlmake.orchestrator.orchestrator import Orchestrator

    favour_loop()
    task = asyncio.ensure_future(Orchestrator(config, ctx).run())
    for number in (signal.SIGTERM, signal.SIGINT):  # in a SLURM job the launcher says it by SIGINT
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        return TERMINATED
    return 0


if __name__ == "__main__":
    main()
