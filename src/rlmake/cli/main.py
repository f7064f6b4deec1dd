"""The console scripts. Heavy packages are imported only for a valid configuration, so that errors come at once."""

import sys

from rlmake.cli import verbs
from rlmake.core.errors import UserError, entry_point, nearest

ENTRIES = {
    "rl": "RL run: inference, env servers, orchestrator and trainer in one launch",
    "sft": "supervised fine-tuning",
    "inference": "inference server",
    "trainer": "RL trainer by itself",
    "orchestrator": "orchestrator by itself",
    "env-server": "server of one environment",
    "eval": "evaluation on environments",
    "dashboard": "runs in a browser: metrics, traces, logs, configurations, reports",
}


def run_entry(name: str, argv: list[str]) -> int | None:
    """One of `ENTRIES` with its arguments."""
    if name == "dashboard":
        from rlmake.dashboard import server

        return server.main(argv)
    from rlmake import config

    schema = {
        "rl": "RLConfig", "sft": "SFTConfig", "eval": "EvalConfig", "inference": "InferenceConfig",
        "trainer": "TrainerConfig", "orchestrator": "OrchestratorConfig", "env-server": "EnvServerConfig",
    }[name]  # fmt: skip
    cfg, files = config.parse_argv(getattr(config, schema), argv, prog=name)
    if name in ("rl", "sft", "eval"):
        from rlmake.launch import direct

        return direct.launch(name, cfg, [name, *argv], files)
    from rlmake.cli import standalone

    return getattr(standalone, name.replace("-", "_"))(cfg, [name, *argv], files)


@entry_point
def rl() -> int | None:
    return run_entry("rl", sys.argv[1:])


@entry_point
def sft() -> int | None:
    return run_entry("sft", sys.argv[1:])


@entry_point
def inference() -> int | None:
    return run_entry("inference", sys.argv[1:])


@entry_point
def trainer() -> int | None:
    return run_entry("trainer", sys.argv[1:])


@entry_point
def orchestrator() -> int | None:
    return run_entry("orchestrator", sys.argv[1:])


@entry_point
def env_server() -> int | None:
    return run_entry("env-server", sys.argv[1:])


@entry_point
def eval() -> int | None:
    return run_entry("eval", sys.argv[1:])


@entry_point
def dashboard() -> int | None:
    return run_entry("dashboard", sys.argv[1:])


@entry_point
def main() -> int | None:
    """`rlmake <verb> …`: the entry points, and the build's own verbs."""
    argv = sys.argv[1:]
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    verb, *rest = argv
    if verb in ENTRIES:
        return run_entry(verb, rest)
    if verb not in verbs.HOME:
        hint = nearest(verb, [*ENTRIES, *verbs.HOME])
        raise UserError(f"rlmake {verb}: no such verb{hint}; rlmake --help lists them")
    return verbs.load(verb)(rest)


def usage() -> str:
    """The verbs, one a line; those of the build say themselves what they do in the first line of their docstring."""
    lines = ["usage: rlmake <verb> …    (rlmake <verb> --help for its options)", "", "entry points:"]
    lines += [f"  {name:<12} {text}" for name, text in ENTRIES.items()]
    lines += ["", "build:"]
    for name in verbs.HOME:
        lines.append(f"  {name:<12} {(verbs.load(name).__doc__ or '').strip().partition(chr(10))[0]}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
