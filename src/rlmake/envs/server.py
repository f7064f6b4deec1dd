"""The env server of one source: `python -m rlmake.envs.server @ <resolved>/envs/<split>/<name>.json`.

Runs episodes for whoever asks over ZMQ (verifiers' protocol), on a loopback port that the system chose, and publishes
its address for the clients of its run (`rlmake.envs.address`). A fault of a taskset, harness or engine is recorded in
the episode that met it; the server goes on.
"""

import functools
import os
import sys
from pathlib import Path

from setproctitle import setproctitle

from rlmake.core import log, procs
from rlmake.core.errors import ConfigError, Fault, entry_point
from rlmake.core.rundir import RunContext
from rlmake.envs import address


class _Published:
    """Stands where verifiers puts the bound address, and writes the address file."""

    def __init__(self, path, ctx: RunContext, name: str):
        self._path, self._ctx, self._name = path, ctx, name

    def put(self, bound: str) -> None:
        address.publish(self._path, bound, self._ctx, self._name)


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
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tokenizers are local directories by now
    ctx = RunContext.from_env(cfg.output_dir)
    _serve(cfg, ctx, argv[1])


def _serve(cfg, ctx: RunContext, file: str) -> None:
    from rlmake.envs import plugins

    try:
        env = plugins.resolve(cfg.env)
    except (ValueError, ImportError, AttributeError, TypeError) as error:
        raise ConfigError(Fault(str(error).splitlines()[0], f"env of source '{cfg.name}'", file)) from error
    from verifiers.v1.serve import env_config_data, serve_env

    _check_free(cfg.address)
    path = Path(cfg.address_file) if cfg.address_file else address.address_file(ctx, cfg.split, cfg.name)
    serve_env(
        max_workers=cfg.max_workers,
        multiplex=cfg.multiplex,
        max_concurrent=cfg.max_concurrent and max(1, cfg.max_concurrent // cfg.max_workers),
        address=cfg.address,
        address_queue=_Published(path, ctx, cfg.name),
        log_setup=functools.partial(plugins.start_worker, cfg.log.vf_level),
        config_data=env_config_data(env),
    )


def _check_free(where: str) -> None:
    """A configured port in use is one line now, where ZMQ would show a traceback later."""
    host, _, port = where.removeprefix("tcp://").rpartition(":")
    if where.startswith("tcp://") and port.isdigit() and port != "0":
        procs.claim_port("0.0.0.0" if host == "*" else host, int(port), "address").close()


if __name__ == "__main__":
    main()
