"""The env server of one source: `python -m rlmake.envs.server @ <resolved>/envs/<split>/<name>.json`.

Runs episodes for whoever asks over ZMQ (verifiers' protocol), on a loopback port that the system chose, and publishes
its address for the clients of its run (`rlmake.envs.address`). This process is the broker (`rlmake.envs.pool`); the
user's code runs in its workers (`rlmake.envs.worker`).
"""

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

from loguru import logger
from setproctitle import setproctitle

from rlmake.core import log, procs
from rlmake.core.errors import ConfigError, entry_point
from rlmake.core.rundir import RunContext
from rlmake.envs import address
from rlmake.envs.pool import Broker, worker_command


@entry_point
def main(argv: list[str] | None = None) -> None:
    """Serve until SIGTERM, SIGINT or the end of the launcher."""
    procs.die_with_parent()
    setproctitle("PRL::EnvServer")
    from rlmake.config import EnvServerConfig, load_resolved

    argv = sys.argv[1:] if argv is None else argv
    if len(argv) != 2 or argv[0] != "@":
        raise ConfigError("usage: python -m rlmake.envs.server @ env.json")
    cfg = load_resolved(EnvServerConfig, argv[1])
    log.setup(f"env:{cfg.name}", cfg.log.level)
    _check_free(cfg.address)
    asyncio.run(_serve(cfg, RunContext.from_env(cfg.output_dir or "."), argv[1]))


async def _serve(cfg, ctx: RunContext, file: str) -> None:
    """Until SIGTERM or SIGINT, or until no worker can be started."""
    broker = Broker(cfg, worker_command(file), os.environ)
    if cfg.address_file or cfg.output_dir:  # else its address was given, and is known where it is used
        path = Path(cfg.address_file) if cfg.address_file else address.address_file(ctx, cfg.split, cfg.name)
        address.publish(path, broker.address, ctx, cfg.name)
    logger.info(f"environment {cfg.name}: {broker.address}, at most {cfg.max_workers} workers")
    task = asyncio.ensure_future(broker.run())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _check_free(where: str) -> None:
    """A configured port in use is one line now, where ZMQ would show a traceback later."""
    host, _, port = where.removeprefix("tcp://").rpartition(":")
    if where.startswith("tcp://") and port.isdigit() and port != "0":
        procs.claim_port("0.0.0.0" if host == "*" else host, int(port), "address").close()


if __name__ == "__main__":
    main()
