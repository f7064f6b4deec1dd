"""Attempts: every launch into a run directory gets a number, and folders for its configuration and logs.

configs/attempt_<n>/command.txt, <entry>.toml, resolved/*.json      configs/latest -> attempt_<n>
logs/attempt_<n>/…                                                 logs/latest -> attempt_<n>
"""

import fcntl
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmake.core.errors import UserError
from rlmake.core.jsonio import write_bytes, write_json
from rlmake.core.rundir import ATTEMPT_CONFIGS, ATTEMPT_LOGS, numbered


@dataclass(frozen=True)
class Attempt:
    """One launch: its number (from 1) and its two folders, absolute."""

    number: int
    config_dir: Path
    log_dir: Path

    @property
    def resolved(self) -> Path:
        return self.config_dir / "resolved"

    def write_resolved(self, name: str, config: dict[str, Any]) -> Path:
        """Write `resolved/<name>.json`, what a process of the run reads."""
        path = self.resolved / f"{name}.json"
        write_json(path, config)
        return path


def allocate(run_dir: Path) -> Attempt:
    """The next attempt of a run directory: 1 + the highest number among configs/ and logs/; `latest` moves to it.

    A launcher inside a launch (a SLURM job's second entry) inherits the attempt by PRL_ATTEMPT_CONFIG_DIR and
    PRL_ATTEMPT_LOG_DIR, which only make sense together.
    """
    inherited = [os.environ.get(ATTEMPT_CONFIGS), os.environ.get(ATTEMPT_LOGS)]
    if any(inherited):
        return _inherit(*inherited)
    run_dir = run_dir.resolve()
    configs, logs = run_dir / "configs", run_dir / "logs"
    number = 1 + max([0, *numbered(configs, "attempt"), *numbered(logs, "attempt")])
    while True:
        attempt = Attempt(number, configs / f"attempt_{number}", logs / f"attempt_{number}")
        try:
            attempt.config_dir.mkdir(parents=True)
            break
        except FileExistsError:  # another launch took the number in this moment
            number += 1
    attempt.log_dir.mkdir(parents=True, exist_ok=True)
    for folder in (configs, logs):
        point_latest(folder, f"attempt_{number}")
    return attempt


def join(run_dir: Path, name: str) -> Attempt:
    """The attempt of a component that is started by hand: the newest one, unless that has its `name` already.

    So the components of a run that are started one by one share an attempt, in whatever order, and starting them all
    again makes the next one. `name` is that of its resolved configuration.
    """
    if os.environ.get(ATTEMPT_CONFIGS) or os.environ.get(ATTEMPT_LOGS):
        return allocate(run_dir)
    (run_dir / "configs").mkdir(parents=True, exist_ok=True)
    with open(run_dir / "configs" / ".join", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = list(numbered(run_dir.resolve() / "configs", "attempt").items())
        if found and not (found[-1][1] / "resolved" / f"{name}.json").exists():
            number, configs = found[-1]
            attempt = Attempt(number, configs, run_dir.resolve() / "logs" / configs.name)
            attempt.log_dir.mkdir(parents=True, exist_ok=True)
        else:
            attempt = allocate(run_dir)
        write_json(attempt.resolved / f"{name}.json", {})  # taken
        return attempt


def _inherit(configs: str | None, logs: str | None) -> Attempt:
    if not (configs and logs):
        raise UserError(f"{ATTEMPT_CONFIGS} and {ATTEMPT_LOGS} must be set together")
    prefix, _, number = Path(configs).name.partition("_")
    if prefix != "attempt" or not number.isdigit() or Path(logs).name != Path(configs).name:
        raise UserError(f"{ATTEMPT_CONFIGS}={configs}, {ATTEMPT_LOGS}={logs}: expected both to end in one attempt_<n>")
    attempt = Attempt(int(number), Path(configs).resolve(), Path(logs).resolve())
    for folder in (attempt.config_dir, attempt.log_dir):
        folder.mkdir(parents=True, exist_ok=True)
    return attempt


def point_latest(folder: Path, target: str) -> None:
    """Make `folder/latest` a relative link to `target`, replaced atomically."""
    temporary = folder / f".latest.{os.getpid()}"
    temporary.unlink(missing_ok=True)
    os.symlink(target, temporary)
    os.replace(temporary, folder / "latest")


def record(attempt: Attempt, entry: str, argv: Sequence[str], files: Sequence[Path]) -> None:
    """Write `command.txt`, which a shell can run again, and the input files verbatim as `<entry>.toml`.

    `argv` is the whole command. Several files are put one behind the other, each below a comment with its path.
    """
    commands = attempt.config_dir / "command.txt"
    before = commands.read_bytes() if commands.exists() else b""  # components that are started one by one: a line each
    shown = ["env", *argv] if argv[:1] == ["eval"] else argv  # `eval` alone is a word of the shell
    write_bytes(commands, before + (shlex.join(shown) + "\n").encode())
    if files:
        parts = [f"# @ {path}\n".encode() + Path(path).read_bytes() for path in files]
        suffix = Path(files[0]).suffix if len(files) == 1 else ".toml"
        data = Path(files[0]).read_bytes() if len(files) == 1 else b"\n".join(parts)
        write_bytes(attempt.config_dir / f"{entry}{suffix}", data)
