"""The monitors by name, and the fan-out to those that are configured."""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from loguru import logger

from rlmake.core.errors import UserError
from rlmake.core.rundir import RunContext
from rlmake.monitors.base import Monitor
from rlmake.monitors.console import ConsoleMonitor
from rlmake.monitors.file import FileMonitor, TraceFiles
from rlmake.monitors.prime import PrimeMonitor
from rlmake.monitors.traces import Recorder, TraceStream
from rlmake.monitors.wandb_run import WandbMonitor

# name in the configuration's `monitors` table -> factory(its table, producer, context)
MONITORS: dict[str, Callable[[Any, str, RunContext], Monitor]] = {
    "file": FileMonitor,
    "wandb": WandbMonitor,
    "prime": PrimeMonitor,
}
ON_OTHER_RANKS: dict[str, Callable[[Any, str, RunContext], Monitor]] = {"file": TraceFiles}


class Monitors:
    """Every configured monitor of one producer, and the console line.

    `rows` False: metrics are another rank's business, this one only annotates traces.
    """

    def __init__(self, monitors: Mapping[str, Monitor], producer: str, attempt: int, rows: bool = True):
        self._monitors, self._rows = dict(monitors), rows
        self._producer, self._attempt = producer, attempt
        self._warned: set[tuple[str, str]] = set()
        self.dropped = 0  # values that were left out so far, not finite or no numbers

    def log(self, step: int | None, metrics: Mapping[str, Any]) -> None:
        """Log the metrics of `step` (None: of no step). Non-finite values are left out and counted."""
        if not self._rows:
            return
        row: dict[str, Any] = {}
        for key, value in metrics.items():
            try:
                number = int(value) if isinstance(value, int) else float(value)
                finite = math.isfinite(number)
            except OverflowError:  # a whole number of more than 308 digits
                self._warn("value", key, f"{key} is beyond every float at step {step}: left out of the metrics")
                continue
            except (TypeError, ValueError):
                self._warn("value", key, f"{key} is {value!r} at step {step}, no number: left out of the metrics")
                continue
            if finite:
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

    def recorder(self, run_id: str) -> Recorder:
        """Takes episodes and annotations, for every monitor that wants them. Ask once: it may start a thread."""
        found = [self._guarded(name, monitor) for name, monitor in self._monitors.items()]
        return Recorder([stream for stream in found if stream is not None], run_id, self._attempt)

    def _guarded(self, name: str, monitor: Monitor) -> TraceStream | None:
        try:
            return monitor.traces
        except OSError as error:
            self._warn(name, "traces", f"monitor {name} can't write traces: {error}")
            return None

    def close(self, finished: bool = False) -> None:
        """Flush and close all; a failure only warns. `finished`: nothing more will come from this producer."""
        for name, monitor in self._monitors.items():
            try:
                monitor.close(finished)
            except Exception as error:
                self._warn(name, "close", f"monitor {name} failed to close: {error}")

    def _warn(self, where: str, what: str, message: str) -> None:
        """Once for each kind of failure, or a broken disk would fill the log."""
        if (where, what) not in self._warned:
            self._warned.add((where, what))
            logger.warning(message)


def setup(config: Any, producer: str, ctx: RunContext, rank: int = 0, last: int | None = None) -> Monitors:
    """The monitors of the `monitors` table `config` for one producer ("trainer", "orch", "eval").

    `last` is the run's last step, None for an endless one: the console says what is left.
    Only rank 0 logs metrics. Other ranks annotate traces, as the producer `<producer>.<rank>`, and need no condition.
    Raises `UserError` naming the monitor when one can't start.
    """
    monitors: dict[str, Monitor] = {}
    for name, factory in (ON_OTHER_RANKS if rank else MONITORS).items():
        if (table := getattr(config, name, None)) is None:
            continue
        try:
            monitors[name] = factory(table, f"{producer}.{rank}" if rank else producer, ctx)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"monitors.{name}: can't start: {error}") from error
    if rank == 0:
        monitors["console"] = ConsoleMonitor(producer, last)
    return Monitors(monitors, producer, ctx.attempt, rows=rank == 0)
