"""The producer's side of a trace stream: everything is handed to one thread, so that neither an event loop nor a
training step waits for the disk."""

import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
from loguru import logger

from rlmake.core.jsonio import write_json
from rlmake.monitors.traces import layout, records
from rlmake.monitors.traces.chunks import Chunks, to_line
from rlmake.monitors.traces.disk import DiskGuard
from rlmake.monitors.traces.live import Live
from rlmake.monitors.traces.records import Arrival, Work

FLUSH_SECONDS = 0.5
MOST_WAITING = 4096  # episodes and annotations; a disk that can't keep up costs records, never training
CLOSE_SECONDS = 120.0


class TraceStream:
    """Of one producer of one attempt. No method blocks or raises; what is lost is counted in `lost` and warned of once.

    `root`: the folder `traces`. `config`: `chunk_bytes`, `compress`, `float_decimals`.
    """

    def __init__(self, root: Path, producer: str, run_id: str, attempt: int, config: Any):
        self.root, self.producer, self.run_id, self.attempt, self.config = root, producer, run_id, attempt, config
        root.mkdir(parents=True, exist_ok=True)
        self.lost = self.non_finite = 0
        self._guard, self._live = DiskGuard(root), Live(root)
        self._chunks: dict[str, Chunks] = {}
        self._waiting: deque[tuple[str, tuple]] = deque()
        self._warned: set[str] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def started(self, work: Work) -> None:
        """An episode was dispatched."""
        self._put("started", work)

    def delta(self, work: Work, delta: bytes) -> None:
        """A verifiers delta of an episode in flight (`serve.delta`), in msgpack as it came."""
        self._put("delta", work, delta, time.time())

    def dropped(self, work: Work) -> None:
        """An episode was cancelled: it will not arrive."""
        self._put("dropped", work)

    def arrived(self, arrival: Arrival) -> None:
        self._put("arrived", arrival)

    def annotate(self, row: dict[str, Any]) -> None:
        """`row` is that of `records.annotation`."""
        self._put("annotate", row)

    def planned(self, counts: dict[str, int]) -> None:
        """How many episodes each environment is to give (an evaluation)."""
        self._put("planned", counts)

    def close(self, finished: bool = False) -> None:
        """Write what waits. `finished`: nothing more will ever come, so the last chunk is sealed too."""
        self._stop.set()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.warning(f"the disk of {self.root} does not answer: {len(self._waiting)} records are not written")
            return
        for chunks in self._chunks.values():
            if finished:
                chunks.seal_last()
            chunks.close()
        self._live.clear()
        if self.lost:
            logger.warning(f"{self.lost} records of traces were not written to {self.root}")

    def _put(self, what: str, *args: Any) -> None:
        if len(self._waiting) >= MOST_WAITING:
            self._lose("the disk can't keep up with the episodes")
        else:
            self._waiting.append((what, args))

    def _run(self) -> None:
        stopping = False
        while not stopping:
            stopping = self._stop.wait(FLUSH_SECONDS)
            while self._waiting:
                what, args = self._waiting.popleft()
                try:
                    getattr(self, f"_{what}")(*args)
                except Exception as error:  # a monitor never stops a run
                    self._lose(f"{type(error).__name__}: {error}")
            try:
                self._live.flush(self._guard.ok())
            except Exception as error:
                self._lose(f"live traces: {type(error).__name__}: {error}", 0)

    def _lose(self, why: str, count: int = 1) -> None:
        self.lost += count
        if why not in self._warned and len(self._warned) < 20:
            self._warned.add(why)
            logger.warning(f"traces in {self.root}: {why}")

    def _started(self, work: Work) -> None:
        self._live.started(work)

    def _delta(self, work: Work, delta: bytes, now: float) -> None:
        self._live.delta(work, delta, now)

    def _dropped(self, work: Work) -> None:
        self._live.ended(work)

    def _arrived(self, arrival: Arrival) -> None:
        self._live.ended(arrival.work)
        if not self._guard.ok():
            self.lost += 1
            return
        row = records.record(arrival, self.run_id, self.attempt, self.config.float_decimals)
        bad = records.count_non_finite(row)
        if bad and not self.non_finite:
            logger.warning(f"episode {arrival.work.name}: {bad} numbers are not finite, they are null in its trace")
        self.non_finite += bad
        chunks = self._of("stream", layout.stream(self.root), layout.index(self.root))
        chunks.append(to_line(row), records.index_row(row) | {"non_finite": bad})

    def _annotate(self, row: dict[str, Any]) -> None:
        if not self._guard.ok():
            self.lost += 1
            return
        row = _rounded(row, self.config.float_decimals)
        self.non_finite += records.count_non_finite(row)
        folder, index = layout.annotations(self.root, self.producer), layout.annotation_index(self.root, self.producer)
        self._of("annotations", folder, index).append(to_line(row), records.annotation_index_row(row))

    def _planned(self, counts: dict[str, int]) -> None:
        write_json(layout.plan(self.root), counts)

    def _of(self, name: str, folder: Path, index: Path) -> Chunks:
        if name not in self._chunks:
            self._chunks[name] = Chunks(folder, index, self.config.chunk_bytes, self.config.compress)
        return self._chunks[name]


def _rounded(row: dict[str, Any], decimals: int | None) -> dict[str, Any]:
    """The row with its numbers per token (lists or arrays) as rounded lists; the row itself stays."""
    if "branches" not in row:
        return row

    def stream(key: str, values: Any) -> Any:
        if key in ("index", "spans"):
            return values
        array = np.asarray(values)
        if array.dtype.kind != "f":
            return array.astype(int).tolist()
        array = array.astype(np.float64)
        return (array if decimals is None else array.round(decimals)).tolist()

    return {**row, "branches": [{key: stream(key, v) for key, v in branch.items()} for branch in row["branches"]]}
