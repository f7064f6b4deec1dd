"""Columns of a `metrics.jsonl`, made once and then only of what is new.

A row of 2,000 numbers is 80 kB of JSON, so 10,000 of them are not read while somebody waits. A thread turns them into
columns; until it is through, a chart is drawn from rows picked evenly over the file.
"""

import itertools
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rlmake.dashboard import confine
from rlmake.dashboard.follow import begins, head, head_start, still
from rlmake.monitors.rows import HEAD, LAUNCHER
from rlmake.monitors.traces import read

BLOCK_ROWS = 256
SAMPLE_PLACES, READ_FOR_SAMPLE = (40, 200), 16 << 20  # fewer places where rows are long: it is waited for
READ_BYTES = 4 << 20
NUMBERS = {int, float}
MOST_SHAPES = 256  # sets of names that rows of nothing but numbers are known by
MOST = 1 << 53  # the largest whole number that float64 and a page hold exactly
SAMPLE_BYTES = 128 << 20  # read at most for a sample
LONGEST_LINE = 2 << 20  # in a sample
PAUSE_SECONDS = 0.002  # between blocks of reading: the page's requests go first

_DECODE = msgspec.json.Decoder(dict[str, Any]).decode


class Group:
    """Rows with one set of keys, from one producer: steps, times and attempts, and a matrix in blocks."""

    def __init__(self, keys: tuple[str, ...]):
        self.keys = {key: number for number, key in enumerate(keys)}
        self.heads: list[tuple[int, float, int, int]] = []  # step, time, attempt, order in the file
        self.blocks: list[np.ndarray] = []

    def add(self, head: tuple[int, float, int, int], values: np.ndarray) -> None:
        place = len(self.heads) % BLOCK_ROWS
        if place == 0:
            self.blocks.append(np.empty((BLOCK_ROWS, len(self.keys))))  # float64: counts have more than seven digits
        self.blocks[-1][place] = values
        self.heads.append(head)

    def column(self, key: str, count: int) -> np.ndarray:
        number = self.keys[key]
        return np.concatenate([block[:, number] for block in self.blocks])[:count] if self.blocks else np.empty(0)


class Columns:
    """Rows taken in so far. Safe for one writer and several readers."""

    def __init__(self) -> None:
        self.groups: dict[tuple[str, tuple[str, ...]], Group] = {}
        self.producers: dict[str, set[str]] = {}  # key -> producers
        self.starts: dict[int, int] = {}  # attempt -> the step behind which it went on
        self.rows, self.started = 0, time.monotonic_ns()
        self.lock = threading.Lock()
        self._numbers: dict[tuple[str, ...], tuple[str, ...]] = {}  # names of a row -> those that are metrics
        self._keys: list[str] = []

    def take(self, row: dict[str, Any]) -> None:
        """One row of the file; what is no number is left out. Raises `ValueError`, `OverflowError` for a number that no
        chart can hold."""
        step, producer, attempt = row.get("step"), row.get("producer", ""), row.get("attempt", 1)
        if not isinstance(step, int) or isinstance(step, bool) or not isinstance(producer, str):
            return
        attempt = attempt if isinstance(attempt, int) else 1
        moment = row.get("time")
        head = (step, float(moment) if isinstance(moment, int | float) else 0.0, attempt)
        if max(abs(step), abs(attempt)) > MOST:
            raise ValueError("a step beyond what a float holds")
        names = tuple(row)
        keys = self._numbers.get(names)
        values = list(map(row.get, keys)) if keys is not None else []
        if keys is None or not NUMBERS.issuperset(map(type, values)):
            keys = tuple(k for k, v in row.items() if type(v) in NUMBERS and k not in HEAD)
            values = list(map(row.get, keys))
            if len(keys) == len(names) - sum(name in HEAD for name in names) and len(self._numbers) < MOST_SHAPES:
                self._numbers[names] = keys
        numbers = np.array(values, dtype=np.float64)
        with self.lock:
            self.rows += 1
            if producer == LAUNCHER:
                self.starts[attempt] = step
                return
            if not keys:
                return
            group = self.groups.get((producer, keys))
            if group is None:
                group = self.groups[producer, keys] = Group(keys)
                for key in keys:
                    self.producers.setdefault(key, set()).add(producer)
            group.add((*head, self.rows), numbers)

    def keys(self) -> list[str]:
        """Sorted; the same list until there are new ones. It is not to be changed."""
        with self.lock:
            if len(self._keys) != len(self.producers):
                self._keys = sorted(self.producers)
            return self._keys

    def series(self, key: str) -> dict[str, np.ndarray]:
        """`{step, time, value, attempt}` in the order of steps; the latest attempt wins, abandoned futures are gone."""
        with self.lock:
            parts = [(g.heads[:], g) for g in self.groups.values() if key in g.keys]
            starts = dict(self.starts)
            columns = [group.column(key, len(heads)) for heads, group in parts]
        if not parts:
            return {name: np.empty(0) for name in ("step", "time", "value", "attempt")}
        heads = np.array([head for own, _ in parts for head in own], dtype=np.float64)
        values = np.concatenate(columns)
        step, moment, attempt, order = heads.T
        keep = np.ones(len(step), bool)
        for later, start in starts.items():
            keep &= ~((attempt < later) & (step > start))
        sort = np.lexsort((order, attempt, step))
        sort = sort[keep[sort]]
        last = np.ones(len(sort), bool)
        if len(sort):
            last[:-1] = step[sort][1:] != step[sort][:-1]
        chosen = sort[last]
        return {"step": step[chosen], "time": moment[chosen], "value": values[chosen], "attempt": attempt[chosen]}


class Metrics:
    """The metrics file of one run, followed. `refresh` starts reading what is new; answers never wait for long."""

    def __init__(self, path: Path, roots: Sequence[Path] = ()):
        self.path, self.roots = path, roots or (path.parent.resolve(),)
        self.columns = Columns()
        self.offset, self.seen, self.lost = 0, 0, 0  # behind the last whole line, read, lines that were no rows
        self.used = time.monotonic()
        self._head = b""  # what the file begins with
        self._thread: threading.Thread | None = None
        self._sampled: tuple[int, Columns] | None = None
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        return confine.size(self.path, self.roots)

    @property
    def progress(self) -> float:
        size = self.size
        return min(1.0, self.seen / size) if size else 1.0

    @property
    def long(self) -> bool:
        """Whether reading what is new takes longer than a page would wait."""
        return self.size - self.seen > 4 * READ_BYTES

    @property
    def torn(self) -> int:
        """Lines that are no rows, with a last one that has no end and gets none."""
        return self.lost + (self.seen > self.offset and still(self.path, self.seen))

    def refresh(self, wait: float = 0.0) -> None:
        """Read what is new in the background, and wait at most so long for it."""
        self.used = time.monotonic()
        with self._lock:
            size = self.size
            if size < self.offset or not begins(self.path, self.roots, self._head):  # made anew
                self.columns, self.offset, self.seen, self.lost, self._sampled = Columns(), 0, 0, 0, None
                self._head = b""
            elif size < self.seen:  # a torn end was cut off
                self.seen = self.offset
            if self.seen == 0 and size > 4 * READ_BYTES and self._sampled is None:
                self._sampled = (size, self._sample(size))  # before the reading, which would slow it
            if size > self.seen and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(target=self._follow, name="metrics", daemon=True)
                self._thread.start()
            thread = self._thread
        if thread is not None and wait:
            thread.join(wait)

    def _sample(self, size: int) -> Columns:
        try:
            return sample(self.path, size, self.roots)
        except OSError:  # taken away meanwhile
            return Columns()

    def best(self) -> tuple[Columns, bool]:
        """The columns to draw from, and whether they are all rows: picked ones while the file is being read."""
        if self.progress >= 0.999 or self.size < 4 * READ_BYTES:
            self._sampled = None if self.progress >= 0.999 else self._sampled
            return self.columns, self.progress >= 0.999
        size = self.size
        if self._sampled is None or size > 1.2 * self._sampled[0]:
            self._sampled = (size, self._sample(size))
        return self._sampled[1], False

    def _follow(self) -> None:
        columns = self.columns
        try:
            with confine.opened(self.path, self.roots) as file:
                file.seek(self.offset)
                head_start(self.size - self.offset)
                for lines, seen in read.blocks(file, READ_BYTES):
                    for line, size in lines:
                        if columns is not self.columns:
                            return
                        self.lost += line is None or not _take(columns, line)
                        self.offset += size
                        self.seen = max(self.seen, self.offset)
                    if columns is not self.columns:
                        return
                    self.seen = seen
                    self._head = self._head or head(file, self.offset)
                    time.sleep(PAUSE_SECONDS)
        except OSError:
            return


def _take(columns: Columns, line: bytes) -> bool:
    if not line.strip():
        return True
    try:
        columns.take(_DECODE(line))
    except (msgspec.DecodeError, ValueError, OverflowError, RecursionError):
        return False
    return True


def sample(path: Path, size: int, roots: Sequence[Path] = ()) -> Columns:
    """Rows picked evenly over a file of `size` bytes: at each place the next whole lines, and the very last ones.
    Lines longer than `LONGEST_LINE` are left out. Raises `OSError`."""
    columns, left = Columns(), SAMPLE_BYTES

    def line() -> bytes:
        nonlocal left
        found = file.readline(LONGEST_LINE)
        left -= len(found)
        return found

    with confine.opened(path, roots or (path.parent.resolve(),)) as file:
        first = line()
        _take(columns, first)
        places = min(max(READ_FOR_SAMPLE // (3 * len(first) + 1), SAMPLE_PLACES[0]), SAMPLE_PLACES[1])
        step = max(1, (size - len(first)) // places)
        for place in range(len(first), size, step):
            if left <= 0:
                break
            file.seek(place)
            line()
            for _ in range(2):  # orchestrator and trainer take turns
                _take(columns, line())
    return columns


def thin(series: dict[str, np.ndarray], points: int) -> dict[str, np.ndarray]:
    """At most about `points` of a series, with the smallest and the largest value of every stretch kept."""
    count = len(series["value"])
    if count <= points:
        return series
    edges = np.linspace(0, count, points // 2 + 1).astype(int)
    kept = set()
    for start, stop in itertools.pairwise(edges):
        part = series["value"][start:stop]
        kept |= {start + int(part.argmin()), start + int(part.argmax())}
    kept |= {0, count - 1}
    chosen = np.array(sorted(kept))
    return {name: values[chosen] for name, values in series.items()}
