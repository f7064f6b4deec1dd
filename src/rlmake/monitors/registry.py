"""The monitors by name, and the fan-out to those that are configured."""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from loguru import logger

from rlmake.core.errors import UserError
from rlmake.core.rundir import RunContext
from rlmake.monitors.console import ConsoleMonitor
from rlmake.monitors.file import FileMonitor


class Monitor(Protocol):
    """Takes rows `{"step", "time", "producer", "attempt", <metric>: float, …}`; values are finite."""

    def log(self, row: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


# name in the configuration's `monitors` table -> factory(its table, producer, context)
MONITORS: dict[str, Callable[[Any, str, RunContext], Monitor]] = {"file": FileMonitor}


class Monitors:
    """Every configured monitor of one producer, and the console line."""

    def __init__(self, monitors: Mapping[str, Monitor], producer: str, attempt: int):
        self._monitors = dict(monitors)
        self._producer, self._attempt = producer, attempt
        self._warned: set[tuple[str, str]] = set()
        self.dropped = 0  # values that were left out so far, not finite or no numbers

    def log(self, step: int | None, metrics: Mapping[str, Any]) -> None:
        """Log the metrics of `step` (None: of no step). Non-finite values are left out and counted."""
        row: dict[str, Any] = {}
        for key, value in metrics.items():
            try:
                number = int(value) if isinstance(value, int) else float(value)
            except (TypeError, ValueError):
                self._warn("value", key, f"{key} is {value!r} at step {step}, no number: left out of the metrics")
                continue
            if math.isfinite(number):
                row[key] = number
            else:
                self._warn("value", key, f"{key} is {number} at step {step}: left out of the metrics")
        if lost := len(metrics) - len(row):
            self.dropped += lost
            row["monitors/non_finite"] = lost
        head = {"step": step, "time": time.time(), "producer": self._producer, "attempt": self._attempt}
        for name, monitor in self._monitors.items():
            try:
                monitor.log(head | row)
            except Exception as error:  # the training goes on whatever a monitor does
                self._warn(name, type(error).__name__, f"monitor {name} failed at step {step}: {error}")

    def close(self) -> None:
        """Flush and close all; a failure only warns."""
        for name, monitor in self._monitors.items():
            try:
                monitor.close()
            except Exception as error:
                self._warn(name, "close", f"monitor {name} failed to close: {error}")

    def _warn(self, where: str, what: str, message: str) -> None:
        """Once for each kind of failure, or a broken disk would fill the log."""
        if (where, what) not in self._warned:
            self._warned.add((where, what))
            logger.warning(message)


def setup(config: Any, producer: str, ctx: RunContext, rank: int = 0) -> Monitors:
    """The monitors of the `monitors` table `config` for one producer ("trainer", "orch", "eval").

    Only rank 0 logs; other ranks get an empty set, so that callers need no condition.
    Raises `UserError` naming the monitor when one can't start.
    """
    monitors: dict[str, Monitor] = {}
    if rank == 0:
        for name, factory in MONITORS.items():
            if (table := getattr(config, name, None)) is None:
                continue
            try:
                monitors[name] = factory(table, producer, ctx)
            except UserError:
                raise
            except Exception as error:
                raise UserError(f"monitors.{name}: can't start: {error}") from error
        monitors["console"] = ConsoleMonitor(producer)
    return Monitors(monitors, producer, ctx.attempt)
