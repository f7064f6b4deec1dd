"""Reading `metrics.jsonl` back: rows of several processes and several attempts become one row per producer and step."""

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rlmake.core.errors import FULL, UserError
from rlmake.core.rundir import RunContext, file_monitor_dir
from rlmake.monitors.file import METRICS, RowFile

HEAD = ("step", "time", "producer", "attempt")
LAUNCHER = "launcher"


@dataclass
class Row:
    """All metrics of one producer at one step; `attempt` and `time` (seconds since the epoch) are the latest's."""

    step: int
    producer: str
    attempt: int
    time: float
    metrics: dict[str, float] = field(default_factory=dict)


def mark_attempt(ctx: RunContext, step: int, folder: Path | None = None) -> None:
    """Say in the metrics that this attempt continues behind `step` (0: from the start). The launcher's, before others.

    What earlier attempts logged behind it belongs to an abandoned future, and `read` leaves it out.
    """
    try:
        file = RowFile((folder or file_monitor_dir(ctx.run_dir)) / METRICS)
    except OSError as error:
        if error.errno in FULL:
            raise
        raise UserError(
            f"monitors.file.path: {error.filename}: {error.strerror}; expected a folder to write to"
        ) from None
    file.heal()
    file.append(
        {"step": step, "time": time.time(), "producer": LAUNCHER, "attempt": ctx.attempt, "attempt/start": step}
    )
    file.close()


def read(path: Path | str) -> list[Row]:
    """Rows by (step, producer) of a metrics file, a monitor's folder or a run directory; none when there is no file.

    Within a step the latest attempt wins, key by key. Rows of an earlier attempt behind the step from which a later
    one continued are left out. Rows without a step, and torn ones (a writer was killed), are skipped, and so are values
    that are no finite numbers.
    """
    raw = _load(_locate(Path(path)))
    starts = {row["attempt"]: row["step"] for row in raw if row["producer"] == LAUNCHER}
    merged: dict[tuple[int, str], Row] = {}
    for row in sorted(raw, key=lambda row: row["attempt"]):
        step, producer, attempt = row["step"], row["producer"], row["attempt"]
        if producer == LAUNCHER or any(later > attempt and step > start for later, start in starts.items()):
            continue
        entry = merged.setdefault((step, producer), Row(step, producer, attempt, row["time"]))
        entry.attempt, entry.time = attempt, row["time"]
        entry.metrics.update({key: value for key, value in row.items() if key not in HEAD})
    return [merged[key] for key in sorted(merged)]


def series(rows: Iterable[Row], key: str, producer: str | None = None) -> list[tuple[int, float]]:
    """`[(step, value)]` of one metric, in the order of steps."""
    return [(r.step, r.metrics[key]) for r in rows if key in r.metrics and producer in (None, r.producer)]


def _locate(path: Path) -> Path:
    if path.is_dir():
        direct = path / METRICS
        return direct if direct.exists() else file_monitor_dir(path) / METRICS
    return path


def _load(path: Path) -> list[dict]:
    rows = []
    if path.exists():
        for line in path.read_bytes().splitlines():
            try:
                row = {"attempt": 1, "producer": "", "time": 0.0} | json.loads(line)
            except (ValueError, TypeError, RecursionError):
                continue
            if _whole(row.get("step")) and _whole(row["attempt"]) and isinstance(row["producer"], str):
                rows.append({k: v for k, v in row.items() if k == "producer" or _number(v)} | {"time": _time(row)})
    return rows


def _whole(value: object) -> bool:
    return type(value) is int and abs(value) <= 1 << 53


def _number(value: object) -> bool:
    """A finite number that a float holds."""
    return type(value) in (int, float) and abs(value) < 1e308


def _time(row: dict) -> float:
    return row["time"] if _number(row["time"]) else 0.0
