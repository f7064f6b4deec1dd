"""The table of episodes of a run: columns made from `stream.index.jsonl` as it grows, with what annotations add."""

import math
import threading
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from rlmake.dashboard import confine
from rlmake.dashboard.confine import NotThere
from rlmake.dashboard.follow import Follower
from rlmake.dashboard.histogram import histogram
from rlmake.monitors.traces import layout

MAX_LIMIT = 512
SORTS = (
    "arrival",
    "duration",
    "reward",
    "advantage",
    "output_tokens",
    "input_tokens",
    "turns",
    "group",
    "step",
    "line",
)
NUMBERS = ("reward", "advantage", "cost", "duration", "input_tokens", "output_tokens", "turns", "branches", "nodes")


MOST = 1 << 53  # the largest whole number that float64 and a page hold exactly
Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
Number = Annotated[int, msgspec.Meta(ge=-MOST, le=MOST)]


class Moment(msgspec.Struct, frozen=True):
    step: Number | None = None
    version: Number | None = None
    time: float = 0.0


class IndexRow(msgspec.Struct):
    """A row of the index; what a damaged or foreign one lacks has a default."""

    chunk: Count
    offset: Count
    length: Count
    id: str = ""
    attempt: Number = 1
    kind: str = "train"
    env: str | None = None
    group: str = ""
    name: str = ""
    task: str | None = None
    task_index: Number = 0
    sample: Number = 0
    trace_ids: list[str] = []
    live_ids: list[str] = []
    ok: bool = True
    num_errors: Number = 0
    error: str | None = None
    reward: float | None = None
    rewards: dict[str, float] = {}
    metrics: dict[str, float] = {}
    input_tokens: Number = 0
    output_tokens: Number = 0
    turns: Number = 0
    branches: Number = 1
    nodes: Number = 0
    stop_condition: str | None = None
    truncated: bool = False
    timeout: bool = False
    cost: float | None = None
    dispatch: Moment = Moment()
    arrival: Moment = Moment()
    duration: float = 0.0


class Note(msgspec.Struct):
    """A row of an annotations' index."""

    chunk: Count
    offset: Count
    length: Count
    trace_id: str
    attempt: Number = 1
    info: dict[str, Any] = {}
    streams: list[str] = []


class Row:
    """One episode as the table has it. Strings that repeat are shared."""

    __slots__ = (
        "advantage", "arrival", "attempt", "chunk", "effective", "env", "error", "flags", "group", "id", "kind",
        "length", "line", "name", "notes", "numbers", "offset", "rewards", "ship", "stop", "task", "trace_ids",
        "version",
    )  # fmt: skip

    def __init__(self, line: int, row: IndexRow, share: dict[Any, Any]):
        self.line, self.chunk, self.offset, self.length = line, row.chunk, row.offset, row.length
        self.id, self.name, self.attempt = row.id, row.name, row.attempt
        self.kind, self.env = share.setdefault(row.kind, row.kind), share.setdefault(row.env, row.env)
        self.group, self.task = share.setdefault(row.group, row.group), share.setdefault(row.task, row.task)
        self.stop = share.setdefault(row.stop_condition, row.stop_condition)
        self.error = share.setdefault(row.error, row.error)
        self.flags = row.ok | row.truncated << 1 | row.timeout << 2
        self.trace_ids = tuple(row.trace_ids)
        self.arrival, self.version = row.arrival.time, row.dispatch.version
        self.ship: int | None = row.dispatch.step
        self.advantage: float | None = None
        self.effective = False
        names = ("duration", "input_tokens", "output_tokens", "turns", "branches", "nodes", "num_errors")
        self.numbers = array("d", [_nan(row.reward), _nan(row.cost), *(getattr(row, name) for name in names)])
        values = {
            **{f"rewards/{k}": v for k, v in row.rewards.items()},
            **{f"metrics/{k}": v for k, v in row.metrics.items()},
        }
        keys = share.setdefault(tuple(values), tuple(values))
        self.rewards = (keys, array("d", values.values()))
        self.notes: list[tuple[str, int, int, int]] = []

    @property
    def ok(self) -> bool:
        return bool(self.flags & 1)

    def value(self, key: str) -> Any:
        if key in PLACES:
            value = self.numbers[PLACES[key]]
            return None if math.isnan(value) else value
        if key in ("arrival", "advantage", "group", "line"):
            return getattr(self, key)
        if key == "step":
            return self.ship
        keys, values = self.rewards
        return values[keys.index(key)] if key in keys else None

    def to_json(self) -> dict[str, Any]:
        found = {name: _whole(self.value(name)) for name in PLACES}
        return found | {
            "line": self.line, "id": self.id, "name": self.name, "attempt": self.attempt, "kind": self.kind,
            "env": self.env, "group": self.group, "task": self.task, "stop_condition": self.stop, "error": self.error,
            "ok": self.ok, "truncated": bool(self.flags & 2), "timeout": bool(self.flags & 4), "step": self.ship,
            "version": self.version, "arrival": self.arrival, "advantage": self.advantage,
            "effective": self.effective, "traces": len(self.trace_ids),
        }  # fmt: skip


PLACES = {
    name: number
    for number, name in enumerate(
        ("reward", "cost", "duration", "input_tokens", "output_tokens", "turns", "branches", "nodes", "num_errors")
    )
}


def _plain(value: Any) -> bool:
    """A number that float64 holds, or nothing."""
    return value is None or (type(value) in (int, float) and abs(value) < 1e308)


def _nan(value: float | None) -> float:
    return math.nan if value is None else value


def _whole(value: float | None) -> float | int | None:
    return int(value) if isinstance(value, float) and value.is_integer() else value


@dataclass(frozen=True)
class Query:
    """What the table is asked for. `step`, `kind` and `subset` address a cohort."""

    step: int | None = None
    kind: str | None = None
    subset: str = "all"
    env: str | None = None
    group: str | None = None
    text: str = ""
    errors_only: bool = False
    start: float | None = None
    end: float | None = None
    low: float | None = None  # of the reward
    high: float | None = None

    def takes(self, row: Row) -> bool:
        equal = ((self.kind, row.kind), (self.step, row.ship), (self.env, row.env), (self.group, row.group))
        if any(wanted is not None and wanted != there for wanted, there in equal):
            return False
        if (self.subset == "effective" and not row.effective) or (self.errors_only and row.ok):
            return False
        if not _within(row.arrival, self.start, self.end) or not _within(row.value("reward"), self.low, self.high):
            return False
        texts = (row.name, row.id, row.task, row.error, row.stop)
        return not self.text or any(self.text in text for text in texts if text)


def _within(value: float | None, low: float | None, high: float | None) -> bool:
    if low is None and high is None:
        return True
    return value is not None and (low is None or value >= low) and (high is None or value <= high)


class Episodes:
    """The episodes of one run, followed. Ask `refresh` first."""

    def __init__(self, root: Path, roots: Sequence[Path] = ()):
        self.root, self.roots = root, roots or (root.resolve(),)
        self.rows: list[Row] = []
        self.by_id: dict[str, list[int]] = {}
        self.by_trace: dict[str, list[int]] = {}
        self.version = 0  # grows with every change that a reader could see
        self.used = time.monotonic()
        self._share: dict[Any, Any] = {}
        self._facets: tuple[int, dict[str, Any]] | None = None
        self._follow = {layout.index(root): Follower(layout.index(root), IndexRow, self.roots)}
        self._early: dict[str, list[tuple[str, Note]]] = {}
        self._lock, self._starting = threading.Lock(), threading.Lock()
        self._thread: threading.Thread | None = None

    def refresh(self, wait: float = 0.5) -> bool:
        """Take in what is new, in the background; wait at most `wait` seconds. Whether all is taken in."""
        self.used = time.monotonic()
        with self._starting:  # requests come side by side: one reader at a time
            thread = self._thread
            if thread is None or not thread.is_alive():
                if not self._behind():
                    return True
                thread = self._thread = threading.Thread(target=self._read, name="episodes", daemon=True)
                thread.start()
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
        return any((f := self._follower(*file)).size() != f.seen for file in self._files())

    def _read(self) -> None:
        for producer, path in self._files():
            follower = self._follower(producer, path)
            if follower.size() < follower.offset:  # the run was made anew
                with self._lock:
                    self.rows, self.by_id, self.by_trace, self._early = [], {}, {}, {}
                    self._follow = {}
                    self.version += 1
                return self._read()
            for batch in follower.batches():
                with self._lock:
                    for row in batch:
                        try:
                            self._note(producer, row) if producer else self._add(row)
                        except (ValueError, TypeError, OverflowError):  # a value that no table can hold
                            follower.lost += 1
                    self.version += 1
                time.sleep(0)

    def _add(self, row: IndexRow) -> None:
        made = Row(len(self.rows), row, self._share)
        self.rows.append(made)
        self.by_id.setdefault(made.id, []).append(made.line)
        for trace in made.trace_ids:
            self.by_trace.setdefault(trace, []).append(made.line)
            for producer, note in self._early.pop(trace, ()):
                self._note(producer, note)

    def _note(self, producer: str, note: Note) -> None:
        """An annotation belongs to the newest record of its trace that its attempt can have seen."""
        lines = [n for n in self.by_trace.get(note.trace_id, ()) if self.rows[n].attempt <= note.attempt]
        if not lines:
            if len(self._early) < 100_000:
                self._early.setdefault(note.trace_id, []).append((producer, note))
            return
        row, info = self.rows[lines[-1]], note.info
        step = info["ship"].get("step") if isinstance(info.get("ship"), dict) else None
        if (step is not None and (type(step) is not int or abs(step) > MOST)) or not _plain(info.get("advantage")):
            raise ValueError("an annotation with a step or an advantage that is none")
        if note.streams:
            row.notes.append((self._share.setdefault(producer, producer), note.chunk, note.offset, note.length))
        if isinstance(info.get("ship"), dict):
            row.effective = bool(info.get("effective", True))
            row.ship = step if step is not None else row.ship
        if info.get("advantage") is not None:
            row.advantage = info["advantage"]

    def line(self, number: int) -> Row:
        if not 0 <= number < len(self.rows):
            raise NotThere(f"episode line {number}")
        return self.rows[number]

    def chosen(self, query: Query) -> list[Row]:
        with self._lock:
            rows = self.rows[:]
        return rows if query == Query() else [row for row in rows if query.takes(row)]

    def page(self, query: Query, sort: str, order: str, offset: int, limit: int) -> dict[str, Any]:
        rows = self.chosen(query)
        if sort not in ("line", "arrival") or sort not in SORTS:
            key = sort if sort in SORTS else "line"
            have = [(row.value(key), row) for row in rows]
            known = sorted((pair for pair in have if pair[0] is not None), key=lambda p: p[0], reverse=order == "desc")
            rows = [row for _, row in known] + [row for value, row in have if value is None]
        elif order == "desc":
            rows = rows[::-1]
        return {
            "total": len(rows),
            "offset": offset,
            "episodes": [row.to_json() for row in rows[offset : offset + limit]],
        }

    def facets(self) -> dict[str, Any]:
        """Environments, kinds and cohorts (step, kind: how many, how many effective) there are."""
        if self._facets is not None and self._facets[0] == self.version:
            return self._facets[1]
        with self._lock:
            rows, version = self.rows[:], self.version
        cohorts: dict[tuple[str, int], list[float]] = {}
        for row in rows:
            entry = cohorts.setdefault((row.kind, -1 if row.ship is None else row.ship), [0, 0, 0.0, 0])
            entry[0] += 1
            entry[1] += row.effective
            if (reward := row.value("reward")) is not None:
                entry[2] += reward
                entry[3] += 1
        found = {
            "envs": sorted({row.env for row in rows if row.env}),
            "kinds": sorted({row.kind for row in rows}),
            "cohorts": [
                {"kind": kind, "step": step, "all": n, "effective": e, "reward": total / k if k else None}
                for (kind, step), (n, e, total, k) in sorted(cohorts.items())
            ],
        }
        self._facets = (version, found)
        return found

    def series(self, query: Query, after: int = 0) -> dict[str, Any]:
        """Columns of the chosen rows from line `after` on: numbers, rewards/* and metrics/* (None where missing)."""
        rows = [row for row in self.chosen(query) if row.line >= after]
        keys = list(dict.fromkeys(key for row in rows for key in row.rewards[0]))
        names = [*NUMBERS, *keys]
        columns = {name: [row.value(name) if name != "advantage" else row.advantage for row in rows] for name in names}
        columns |= {
            "line": [row.line for row in rows],
            "step": [row.ship for row in rows],
            "arrival": [row.arrival for row in rows],
        }
        return {"count": len(rows), "after": after, "series": columns}

    def histogram(self, query: Query, key: str, bars: int) -> dict[str, Any]:
        """How many rows lie in each of `bars` bins of rounded width over the values of `key`."""
        values = [v for row in self.chosen(query) if isinstance(v := row.value(key), int | float) and math.isfinite(v)]
        return histogram(values, bars)
