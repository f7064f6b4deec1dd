"""The file monitor: rows in `<run>/monitors/file/metrics.jsonl` and episodes in `…/traces`, by several processes."""

import json
import os
from pathlib import Path
from typing import Any

from rlmake.core.rundir import RunContext, file_monitor_dir
from rlmake.monitors.base import Monitor
from rlmake.monitors.traces import TraceStream, layout

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
        if (written := os.write(self._fd, data)) != len(data):
            end = os.lseek(self._fd, 0, os.SEEK_CUR)
            if os.fstat(self._fd).st_size == end:  # taken back, or the next row of any process would go with it
                os.ftruncate(self._fd, end - written)
            raise OSError(f"wrote {written} of {len(data)} bytes: disk full?")

    def close(self) -> None:
        os.close(self._fd)


class TraceFiles(Monitor):
    """The trace stream below `config.path` (default: the run's monitors/file): all that ranks other than 0 write.

    Its thread and files begin with the first `recorder`: a producer without episodes has none.
    """

    def __init__(self, config: Any, producer: str, ctx: RunContext):
        self._config, self._producer, self._ctx = config, producer, ctx
        self._folder = folder(config, ctx.run_dir)
        self._traces: TraceStream | None = None

    def log(self, row: dict[str, Any]) -> None:
        pass

    @property
    def traces(self) -> TraceStream:
        if self._traces is None:
            root, ctx = self._folder / layout.FOLDER, self._ctx
            self._traces = TraceStream(root, self._producer, ctx.run_id, ctx.attempt, self._config)
        return self._traces

    def close(self, finished: bool = False) -> None:
        if self._traces is not None:
            self._traces.close(finished)


class FileMonitor(TraceFiles):
    """Metrics rows as JSON lines, beside the trace stream."""

    def __init__(self, config: Any, producer: str, ctx: RunContext):
        super().__init__(config, producer, ctx)
        self._rows = RowFile(self._folder / METRICS)

    def log(self, row: dict[str, Any]) -> None:
        self._rows.append(row)

    def close(self, finished: bool = False) -> None:
        self._rows.close()
        super().close(finished)


def folder(config: Any, run_dir: Path) -> Path:
    """The monitor's folder; a relative `path` counts from the run directory."""
    path = getattr(config, "path", None)
    return run_dir / path if path else file_monitor_dir(run_dir)
