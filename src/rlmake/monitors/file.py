"""The file monitor: rows appended to `<run>/monitors/file/metrics.jsonl`, by several processes at once."""

import json
import os
from pathlib import Path
from typing import Any

from rlmake.core.rundir import RunContext, file_monitor_dir

METRICS = "metrics.jsonl"


class RowFile:
    """A JSON-lines file that several processes append to: `O_APPEND` and one `write` per row keep rows whole."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def heal(self) -> None:
        """End a row that a killed writer left torn. Only while no other process writes."""
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")

    def append(self, row: dict[str, Any]) -> None:
        data = json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        written = os.write(self._fd, data)
        if written != len(data):
            raise OSError(f"wrote {written} of {len(data)} bytes: disk full?")

    def close(self) -> None:
        os.close(self._fd)


class FileMonitor:
    """Metrics rows as JSON lines, below `config.path` (default: the run's monitors/file)."""

    def __init__(self, config: Any, producer: str, ctx: RunContext):
        self._rows = RowFile(folder(config, ctx.run_dir) / METRICS)

    def log(self, row: dict[str, Any]) -> None:
        self._rows.append(row)

    def close(self) -> None:
        self._rows.close()


def folder(config: Any, run_dir: Path) -> Path:
    """The monitor's folder; a relative `path` counts from the run directory."""
    path = getattr(config, "path", None)
    return run_dir / path if path else file_monitor_dir(run_dir)
