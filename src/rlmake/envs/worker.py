"""A worker of an env server: `python -m rlmake.envs.worker @ <resolved>/envs/<split>/<name>.json ipc://…`.

The user's taskset, harness and scoring run here. A fault of theirs is recorded in the episode that met it; one that
takes the process down is the broker's to notice (`rlmake.envs.pool`).
"""

import functools
import os
import sys

from setproctitle import setproctitle

from rlmake.core import procs
from rlmake.core.errors import ConfigError, Fault, entry_point


@entry_point
def main(argv: list[str] | None = None) -> None:
    """Serve one address until SIGTERM or the end of the broker."""
    procs.die_with_parent()
    setproctitle("PRL::EnvWorker")
    from rlmake.config import EnvServerConfig, load_resolved

    argv = sys.argv[1:] if argv is None else argv
    if len(argv) != 3 or argv[0] != "@":
        raise ConfigError("usage: python -m rlmake.envs.worker @ env.json ipc://…")
    config = load_resolved(EnvServerConfig, argv[1])
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tokenizers are local directories by now
    from rlmake.envs import plugins

    try:
        env = plugins.resolve(config.env)
    except Exception as error:  # a user's code may raise anything while it is imported
        raise ConfigError(Fault(plugins.reason(error), f"env of source '{config.name}'", argv[1])) from error
    from verifiers.v1.serve import env_config_data, serve_env

    serve_env(
        max_workers=1,
        max_concurrent=config.max_concurrent and max(1, config.max_concurrent // config.max_workers),
        address=argv[2],
        log_setup=functools.partial(plugins.start_worker, config.log.vf_level),
        config_data=env_config_data(env),
    )


if __name__ == "__main__":
    main()
