"""The table of episodes of a run, made from `stream.index.jsonl` as it grows, with what annotations add.

Reading a long index takes seconds, which nobody waits for: until it is through, the newest episodes are read from the
end of the file, and any one of them at the place of its line.
"""

import mmap
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlmake.dashboard import confine, table
from rlmake.dashboard.confine import NotThere
from rlmake.dashboard.follow import HEAD_START_SECONDS, LONG, Follower, head_start
from rlmake.dashboard.table import IndexRow, Note, Query, Row, Table
from rlmake.monitors.traces import layout
from rlmake.monitors.traces.read import Torn

MAX_LIMIT = 512
DEEPEST = 2000  # lines from the end that are read before the rest is
NOTES_BYTES = 2 << 20  # of the end of an annotations' index, for those lines


class Episodes:
    """The episodes of one run, followed. Ask `refresh` first."""

    def __init__(self, root: Path, roots: Sequence[Path] = ()):
        self.root, self.roots = root, roots or (root.resolve(),)
        self.table = Table()
        self._end = 0  # of the index's lines that are in the table
        self.version = 0  # grows with every change that a reader could see
        self.used = time.monotonic()
        self._matrix: tuple[int, np.ndarray] = (-1, np.empty((0, table.WIDTH)))
        self._facets: tuple[int, dict[str, Any]] | None = None
        self._follow = {layout.index(root): Follower(layout.index(root), IndexRow, self.roots)}
        self._lock, self._starting = threading.Lock(), threading.Lock()
        self._thread: threading.Thread | None = None
        self._resting = False  # whether the thread lets others go first

    def refresh(self, wait: float = 0.5) -> bool:
        """Take in what is new, in the background; wait at most `wait` seconds. Whether all is taken in."""
        self.used = time.monotonic()
        with self._starting:  # requests come side by side: one reader at a time
            thread = self._thread
            if thread is None or not thread.is_alive():
                if not self._behind():
                    return True
                self._resting = self._new_bytes() > LONG
                thread = self._thread = threading.Thread(target=self._read, name="episodes", daemon=True)
                thread.start()
        if not self._resting or wait > HEAD_START_SECONDS:
            thread.join(wait)
        return not thread.is_alive()

    @property
    def progress(self) -> float:
        sizes = [(f.seen, f.size()) for f in list(self._follow.values())]
        total = sum(size for _, size in sizes)
        return min(1.0, sum(seen for seen, _ in sizes) / total) if total else 1.0

    @property
    def torn(self) -> int:
        """Rows of the index and of annotations that could not be taken in."""
        return sum(follower.torn for follower in list(self._follow.values()))

    @property
    def fault(self) -> str | None:
        """Why there is no table, where a stream lies there without an index that can be read."""
        index, stream = layout.index(self.root), layout.stream(self.root)
        if words := confine.fault(index, self.roots):
            return words
        if confine.size(index, self.roots):
            return None
        try:
            chunks = [c for c in layout.chunks(confine.target(stream, self.roots)).values() if c.stat().st_size]
        except FileNotFoundError:
            return None
        except OSError as error:
            return f"{stream.name}: {error.strerror}"
        return f"{index.name} is missing: {len(chunks)} chunks of episodes lie there without it" if chunks else None

    def _files(self) -> list[tuple[str, Path]]:
        found = [("", layout.index(self.root))]
        try:
            for path in sorted(confine.target(self.root / "annotations", self.roots).iterdir()):
                if path.name.endswith(".index.jsonl"):
                    found.append((path.name.removesuffix(".index.jsonl"), path))
        except OSError:
            pass
        return found

    def _follower(self, producer: str, path: Path) -> Follower:
        if path not in self._follow:
            self._follow[path] = Follower(path, Note if producer else IndexRow, self.roots)
        return self._follow[path]

    def _behind(self) -> bool:
        return any((f := self._follower(*file)).size() != f.seen or f.anew() for file in self._files())

    def _new_bytes(self) -> int:
        return sum((f := self._follower(*file)).size() - f.offset for file in self._files())

    def _read(self) -> None:
        head_start(self._new_bytes())
        self._resting = False
        for producer, path in self._files():
            follower = self._follower(producer, path)
            if follower.anew():  # the run was made again under its name
                with self._lock:
                    self.table, self._follow, self._end = Table(), {}, 0
                    self.version += 1
                return self._read()
            for batch in follower.batches():
                with self._lock:
                    for row in batch:
                        follower.lost += not _taken(self.table, producer, row)
                    self._end = self._end if producer else follower.offset
                    self.version += 1
                time.sleep(0)

    def line(self, number: int) -> Row:
        """Raises `NotThere` beyond the last line, `Torn` for one that is no row."""
        known = self.table
        if 0 <= number < len(known):
            row = known.row(number)
        else:
            ahead = self._ahead(number, 1) if number >= 0 else Table()
            if not len(ahead):
                raise NotThere(f"episode line {number}")
            row = ahead.row(0)
            for trace in row.trace_ids:
                for producer, note in self._notes_of(trace):
                    _taken(ahead, producer, note)
        if not row.there:
            raise Torn(f"line {number} of the index is no episode")
        return row

    def _ahead(self, first: int, count: int) -> Table:
        """Lines that are not taken in yet, from the file; `first` below 0 counts from the end."""
        follower = self._follow.get(layout.index(self.root))
        if follower is None:
            return Table()
        with self._lock:
            known, start = len(self.table), self._end
        try:
            _, at, lines = follower.part(start, first if first < 0 else max(first - known, 0), count)
        except OSError:
            return Table()
        found = Table(known + at)
        for line in lines:
            found.add(follower.decoded(line))
        return found

    def _notes_of(self, trace: str) -> Iterator[tuple[str, Note]]:
        """Rows of annotations' indexes that hold the id of a trace: searched for as bytes."""
        for producer, path in self._files()[1:]:
            follower = self._follower(producer, path)
            try:
                with confine.opened(path, self.roots) as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
                    at = data.find(wanted := trace.encode())
                    while at >= 0:
                        start, stop = data.rfind(b"\n", 0, at) + 1, data.find(b"\n", at)
                        if stop < 0:
                            break
                        note = follower.decoded(data[start:stop])
                        if note is not None and note.trace_id == trace:
                            yield producer, note
                        at = data.find(wanted, stop)
            except (OSError, ValueError):  # not there, or empty
                continue

    def newest(self, offset: int, limit: int) -> dict[str, Any] | None:
        """A page of the newest episodes while the index is still being read; None where that is not possible."""
        if offset + limit > DEEPEST:
            return None
        tail = self._ahead(-offset - limit, offset + limit)
        if len(tail) < offset + limit:
            return None  # what is not taken in is less than a page
        for producer, path in self._files()[1:]:
            for note in _last_notes(self._follower(producer, path)):
                if note.trace_id in tail.by_trace:
                    _taken(tail, producer, note)
        rows = [row for at in reversed(range(limit)) if (row := tail.row(at)).there]
        return {"total": tail.first + len(tail), "offset": offset, "episodes": table.shown(rows)}

    def _numbers(self) -> tuple[Table, np.ndarray]:
        with self._lock:
            if self._matrix[0] != self.version:
                self._matrix = (self.version, self.table.matrix())
            return self.table, self._matrix[1]

    def page(self, query: Query, sort: str, order: str, offset: int, limit: int) -> dict[str, Any]:
        known, matrix = self._numbers()
        lines = table.ordered(known, matrix, query.chosen(known, matrix), sort, order)
        rows = [known.row(int(at)) for at in lines[offset : offset + limit]]
        return {"total": len(lines), "offset": offset, "episodes": table.shown(rows)}

    def facets(self) -> dict[str, Any]:
        """Environments, kinds and cohorts (step, kind: how many, how many effective) there are."""
        version = self.version
        if self._facets is None or self._facets[0] != version:
            self._facets = (version, table.facets(*self._numbers()))
        return self._facets[1]

    def series(self, query: Query, after: int = 0) -> dict[str, Any]:
        """Columns of the chosen rows from line `after` on."""
        known, matrix = self._numbers()
        lines = query.chosen(known, matrix)
        lines = lines[lines >= after]
        return {"count": len(lines), "after": after, "series": table.series(known, matrix, lines)}

    def histogram(self, query: Query, key: str, bars: int) -> dict[str, Any]:
        """How many rows lie in each of `bars` bins of rounded width over the values of `key`."""
        known, matrix = self._numbers()
        return table.bins(known, matrix, query.chosen(known, matrix), key, bars)

    def named(self, name: str, query: Query) -> list[Row]:
        """The chosen rows that have this id, this name, or a trace of this id."""
        known = self.table
        lines = table.lines_of(known.by_id, name) or table.lines_of(known.by_trace, name)
        lines = lines or tuple(at for at, own in enumerate(known.names) if own == name)
        return [row for at in lines if query.takes(row := known.row(at))]


def _taken(into: Table, producer: str, row: IndexRow | Note | None) -> bool:
    """Whether a row could be taken in; one that is none was counted where it was read."""
    try:
        if not producer:
            into.add(row)
        elif row is not None:
            into.annotate(producer, row)
    except (ValueError, TypeError, OverflowError):  # a value that no table can hold
        if not producer:
            into.add(None)
        return False
    return True


def _last_notes(follower: Follower) -> list[Note]:
    """The last rows of an annotations' index."""
    try:
        with confine.opened(follower.path, follower.roots) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - NOTES_BYTES))
            lines = file.read(NOTES_BYTES).split(b"\n")
    except OSError:
        return []
    return [note for line in lines if (note := follower.decoded(line)) is not None]
