"""Weights & Biases: all processes of a run write one run there, the one with the run's id.

One process alone (SFT, an evaluation) uses the ordinary mode, which may be offline, and goes on with the same run after
a resume. Several processes use the SDK's shared mode: the *primary* creates the run, the others join it, and the
*finisher*, the last to live, sets its end. Every metric is drawn over its own `step`, so no step is ever refused for
being older than another process's.
"""

import importlib.metadata
import json
import os
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loguru import logger

from rlmake.core.errors import UserError
from rlmake.core.jsonio import read_json
from rlmake.core.rundir import RunContext
from rlmake.monitors.base import Monitor

NEEDED = (0, 19, 9)  # the first SDK with the shared mode
TRIES_TO_JOIN, TRIES_TO_CREATE, PAUSE = 30, 5, 10.0  # the pause is in seconds
FINISH_SECONDS = 300.0  # a run does not wait longer for a service that has gone; `wandb sync` sends the rest
BY_TIME = ("inference/", "system/")  # rows of no step


@dataclass(frozen=True)
class Role:
    """What one process is to the run. `shared`: others write it too."""

    shared: bool
    primary: bool
    finisher: bool


def role(producer: str, resolved: Path) -> Role:
    """The role of `producer`, told by the configurations beside its own in `configs/attempt_<n>/resolved`.

    In RL the orchestrator creates the run and ends it; in SFT with evaluation the trainer creates it and the evaluation
    ends it; any other process is alone.
    """
    there = {path.stem for path in resolved.glob("*.json")} if resolved.is_dir() else set()
    if {"orchestrator", "trainer"} <= there:
        return Role(True, producer == "orch", producer == "orch")
    if "sft" in there and there & {"orchestrator", "eval"}:
        return Role(True, producer == "trainer", producer != "trainer")
    return Role(False, True, True)


class WandbMonitor(Monitor):
    """Rows to the run `ctx.run_id` of the project. Raises `UserError` when it can't be opened."""

    def __init__(self, config: Any, producer: str, ctx: RunContext):
        self._wandb = _sdk()
        self._role = role(producer, ctx.config_dir / "resolved")
        if self._role.shared and config.offline:
            raise UserError("monitors.wandb.offline: true does not work, several processes write this run")
        self._run = self._open(config, producer, ctx)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        for prefix in BY_TIME:
            self._run.define_metric(f"{prefix}*", step_metric="_timestamp")
        if self._role.primary and not config.offline:
            self._show(ctx)

    def _open(self, config: Any, producer: str, ctx: RunContext) -> Any:
        _command(ctx.config_dir)
        settings = {"console": "off", "silent": True, "root_dir": str(_folder(ctx))}
        if "finish_timeout" in self._wandb.Settings.model_fields:  # newer than NEEDED
            settings["finish_timeout"] = FINISH_SECONDS
        given: dict[str, Any] = {"id": ctx.run_id, "project": config.project, "entity": config.entity}
        if self._role.shared:
            settings |= {"mode": "shared", "x_label": producer, "x_primary": self._role.primary}
            settings |= {"x_update_finish_state": self._role.finisher, "x_disable_stats": not self._role.primary}
        else:
            settings |= {"mode": "offline" if config.offline else "online"}
            given["resume"] = None if config.offline else "allow"
        if self._role.primary:
            given |= {"name": config.name or ctx.run_name, "group": config.group, "tags": config.tags or None}
            given["config"] = _configuration(ctx)
        tries = TRIES_TO_CREATE if self._role.primary else TRIES_TO_JOIN
        for left in reversed(range(tries)):
            try:
                return self._wandb.init(settings=self._wandb.Settings(**settings), **given)
            except self._wandb.errors.UsageError as error:  # no key, a wrong name: it will not mend itself
                raise UserError(f"monitors.wandb: {_line(error)}; wandb login, or WANDB_API_KEY") from None
            except self._wandb.errors.Error as error:
                if not left:
                    raise UserError(f"monitors.wandb: can't open the run after {tries} tries: {_line(error)}") from None
                what = "create" if self._role.primary else "join"
                self._wandb.teardown()  # its service still holds the id of the run that it could not open
                logger.warning(f"monitors.wandb: can't {what} the run yet ({_line(error)}); {left} tries left")
                time.sleep(PAUSE)
        raise AssertionError("unreachable")

    def _show(self, ctx: RunContext) -> None:
        """The saved view; that it can't be made is no reason to stop a training."""
        from rlmake.monitors import wandb_view

        try:
            wandb_view.ensure(self._run.entity, self._run.project, _configuration(ctx))
        except Exception as error:  # whatever the service answers
            logger.warning(f"monitors.wandb: no overview was made: {_line(error)}")

    def log(self, row: dict[str, Any]) -> None:
        values = {key: value for key, value in row.items() if key not in ("time", "producer") and value is not None}
        self._run.log(values)

    def close(self, finished: bool = False) -> None:
        """Send what is left. Only the finisher's own word, that all is done, ends the run as finished."""
        self._run.finish(exit_code=0 if finished or not self._role.finisher else 1)


def _sdk() -> Any:
    try:
        import wandb
    except ImportError:
        raise UserError("monitors.wandb: the package is missing: pip install 'rlmake[wandb]'") from None
    version = importlib.metadata.version("wandb")
    if tuple(int(part) for part in version.split(".")[:3] if part.isdigit()) < NEEDED:
        raise UserError(f"monitors.wandb: wandb {version} has no shared mode; 0.19.9 or newer is needed")
    return wandb


def _command(config_dir: Path) -> None:
    """The run's page shows the launcher's command, not that of the process that writes."""
    path = config_dir / "command.txt"
    if path.is_file() and (words := shlex.split(path.read_text())):
        os.environ.setdefault("WANDB_PROGRAM", words[0])
        os.environ.setdefault("WANDB_ARGS", json.dumps(words[1:]))


def _folder(ctx: RunContext) -> Path:
    folder = ctx.run_dir / "monitors" / "wandb"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _configuration(ctx: RunContext) -> dict[str, Any]:
    """The resolved configuration of the launch: by component where there are several."""
    resolved = ctx.config_dir / "resolved"
    found = {path.stem: read_json(path) for path in sorted(resolved.glob("*.json"))} if resolved.is_dir() else {}
    if ctx.fingerprint:
        found["fingerprint"] = ctx.fingerprint
    return found


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
