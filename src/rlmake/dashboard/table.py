"""Episodes as columns: 100,000 of them take some 60 MB, and a question to all of them some milliseconds."""

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np

from rlmake.dashboard.histogram import histogram

SORTS = (
    "arrival", "duration", "reward", "advantage", "output_tokens", "input_tokens", "turns", "group", "step", "line"
)  # fmt: skip
SHOWN = ("reward", "cost", "duration", "input_tokens", "output_tokens", "turns", "branches", "nodes", "num_errors")
NUMBERS = ("reward", "advantage", "cost", "duration", "input_tokens", "output_tokens", "turns", "branches", "nodes")
TEXTS = ("kind", "env", "group", "task", "stop", "error", "keys")  # as numbers of `Table.texts`
FLAGS = ("ok", "truncated", "timeout", "effective", "superseded", "there")
PLACES = {
    name: place
    for place, name in enumerate(
        (*SHOWN, "arrival", "advantage", "step", "version", "attempt", "chunk", "offset", "length", "values", "note",
         *FLAGS, *TEXTS)
    )
}  # fmt: skip
WIDTH = len(PLACES)
VALUES = {*SHOWN, "arrival", "advantage", "step"}  # that a histogram and a sort may ask for
MOST = 1 << 53  # the largest whole number that float64 and a page hold exactly
Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
Number = Annotated[int, msgspec.Meta(ge=-MOST, le=MOST)]


class Moment(msgspec.Struct, frozen=True, gc=False):
    step: Number | None = None
    version: Number | None = None
    time: float = 0.0


class IndexRow(msgspec.Struct, gc=False):
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


class Note(msgspec.Struct, gc=False):
    """A row of an annotations' index."""

    chunk: Count
    offset: Count
    length: Count
    trace_id: str
    attempt: Number = 1
    info: dict[str, Any] = {}
    streams: list[str] = []


class Table:
    """Lines `first`, `first + 1`, … of an index. One thread writes; readers take `matrix` under the writer's lock."""

    def __init__(self, first: int = 0):
        self.first, self.count = first, 0  # count: lines that are rows
        self.ids: list[str] = []
        self.names: list[str] = []
        self.traces: list[tuple[str, ...]] = []
        self.texts: list[Any] = []
        self.numbers = array("d")  # WIDTH for each line
        self.values = array("d")  # rewards and metrics, from "values" on as many as "keys" has names
        self.notes: list[tuple[int, int, int, int, int]] = []  # the one before, number of producer, chunk, offset, …
        self.by_id: dict[str, int | tuple[int, ...]] = {}
        self.by_trace: dict[str, int | tuple[int, ...]] = {}
        self._codes: dict[Any, int] = {}
        self._early: dict[str, list[tuple[str, Note]]] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def code(self, text: Any) -> int:
        """A number for a text that repeats."""
        found = self._codes.get(text)
        if found is None:
            found = self._codes[text] = len(self.texts)
            self.texts.append(text)
        return found

    def known(self, text: Any) -> int:
        return self._codes.get(text, -1)

    def add(self, row: IndexRow | None) -> None:
        """The next line; None: one that could not be read, which keeps its number."""
        if row is None:
            self._append("", "", (), [math.nan] * (WIDTH - len(FLAGS) - len(TEXTS)) + [0.0] * (len(FLAGS) + len(TEXTS)))
            return
        code, at, step = self.code, len(self), row.dispatch.step
        values = [*row.rewards.values(), *row.metrics.values()]
        keys = (*(f"rewards/{k}" for k in row.rewards), *(f"metrics/{k}" for k in row.metrics))
        version = row.dispatch.version
        self._append(row.id, row.name, tuple(row.trace_ids), (
            _nan(row.reward), _nan(row.cost), row.duration, row.input_tokens, row.output_tokens, row.turns,
            row.branches, row.nodes, row.num_errors, row.arrival.time, math.nan, _nan(step), _nan(version),
            row.attempt, row.chunk, row.offset, row.length, len(self.values), -1,
            row.ok, row.truncated, row.timeout, False, False, True,
            code(row.kind), code(row.env), code(row.group), code(row.task), code(row.stop_condition), code(row.error),
            code(keys),
        ))  # fmt: skip
        self.values.extend(values)
        self.count += 1
        for before in lines_of(self.by_id, row.id):
            if self.get(before, "attempt") < row.attempt:  # of a future that was abandoned: a resume made it again
                self._set(before, "superseded", True)
        _put(self.by_id, row.id, at)
        for trace in row.trace_ids:
            _put(self.by_trace, trace, at)
            for producer, note in self._early.pop(trace, ()) if self._early else ():
                self.annotate(producer, note)

    def _append(self, identity: str, name: str, traces: tuple[str, ...], numbers: Sequence[float]) -> None:
        self.numbers.extend(numbers)
        self.ids.append(identity)
        self.names.append(name)
        self.traces.append(traces)

    def annotate(self, producer: str, note: Note) -> None:
        """A note belongs to the newest record of its trace that its attempt can have seen. Raises `ValueError`."""
        lines = [n for n in lines_of(self.by_trace, note.trace_id) if self.get(n, "attempt") <= note.attempt]
        if not lines:
            if len(self._early) < 100_000:
                self._early.setdefault(note.trace_id, []).append((producer, note))
            return
        at, info, ship = lines[-1], note.info, note.info.get("ship")
        step, advantage = ship.get("step") if isinstance(ship, dict) else None, info.get("advantage")
        if (step is not None and (type(step) is not int or abs(step) > MOST)) or not _plain(advantage):
            raise ValueError("an annotation with a step or an advantage that is none")
        if note.streams:
            self.notes.append((int(self.get(at, "note")), self.code(producer), note.chunk, note.offset, note.length))
            self._set(at, "note", len(self.notes) - 1)
        if isinstance(ship, dict):
            self._set(at, "effective", bool(info.get("effective", True)))
            if step is not None:
                self._set(at, "step", step)
        if advantage is not None:
            self._set(at, "advantage", advantage)

    def get(self, at: int, name: str) -> float:
        return self.numbers[at * WIDTH + PLACES[name]]

    def _set(self, at: int, name: str, value: float) -> None:
        self.numbers[at * WIDTH + PLACES[name]] = value

    def matrix(self) -> np.ndarray:
        """A copy of the numbers, `[lines, WIDTH]`."""
        return np.array(self.numbers, dtype=np.float64).reshape(-1, WIDTH)

    def row(self, at: int) -> "Row":
        return Row(self, at)

    def column(self, matrix: np.ndarray, key: str) -> np.ndarray:
        """A value of each line of `matrix`, NaN where there is none."""
        if key in VALUES:
            return matrix[:, PLACES[key]]
        if key == "line":
            return np.arange(len(matrix), dtype=np.float64) + self.first
        found, values = np.full(len(matrix), np.nan), np.array(self.values)
        codes = matrix[:, PLACES["keys"]]
        for code in np.unique(codes[matrix[:, PLACES["there"]] == 1]):
            if key in (names := self.texts[int(code)]):
                chosen = (codes == code) & (matrix[:, PLACES["there"]] == 1)
                found[chosen] = values[matrix[chosen, PLACES["values"]].astype(int) + names.index(key)]
        return found


class Row:
    """One episode of a table."""

    __slots__ = ("at", "table")

    def __init__(self, table: Table, at: int):
        self.table, self.at = table, at

    def __getattr__(self, name: str) -> Any:
        value = self.table.get(self.at, name) if name in PLACES else None
        if value is None:
            raise AttributeError(name)
        if name in FLAGS:
            return bool(value)
        if name in TEXTS:
            return self.table.texts[int(value)]
        return _whole(None if math.isnan(value) else value)

    @property
    def line(self) -> int:
        return self.table.first + self.at

    @property
    def id(self) -> str:
        return self.table.ids[self.at]

    @property
    def name(self) -> str:
        return self.table.names[self.at]

    @property
    def trace_ids(self) -> tuple[str, ...]:
        return self.table.traces[self.at]

    @property
    def notes(self) -> list[tuple[str, int, int, int]]:
        """`(producer, chunk, offset, length)` of its annotations with values per token, oldest first."""
        found, at = [], int(self.table.get(self.at, "note"))
        while at >= 0:
            at, producer, *place = self.table.notes[at]
            found.append((self.table.texts[producer], *place))
        return found[::-1]

    def to_json(self) -> dict[str, Any]:
        names = (*SHOWN, "attempt", "kind", "env", "group", "task", "error", "ok", "truncated", "timeout", "step",
                 "version", "arrival", "advantage", "effective", "superseded")  # fmt: skip
        return {name: getattr(self, name) for name in names} | {
            "line": self.line, "id": self.id, "name": self.name, "stop_condition": self.stop,
            "traces": len(self.trace_ids),
        }  # fmt: skip


@dataclass(frozen=True)
class Query:
    """What the table is asked for. `step`, `kind`, `subset` address a cohort; what a resume made again is in none."""

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
        place = row.at * WIDTH
        numbers = np.array(row.table.numbers[place : place + WIDTH])[None]
        return bool(len(self.chosen(row.table, numbers, row.at)))

    def chosen(self, table: Table, matrix: np.ndarray, first: int = 0) -> np.ndarray:
        """The lines of `matrix` (whose first one is line `first` of `table`) that are asked for, ascending."""
        of = lambda name: matrix[:, PLACES[name]]  # noqa: E731
        keep = of("there") == 1
        for name in ("kind", "env", "group"):
            if (wanted := getattr(self, name)) is not None:
                keep &= of(name) == table.known(wanted)
        if self.step is not None:
            keep &= of("step") == self.step
        if self.subset == "effective":
            keep &= of("effective") == 1
        if self.subset == "effective" or self.step is not None:
            keep &= of("superseded") == 0
        if self.errors_only:
            keep &= of("ok") == 0
        for name, low, high in (("arrival", self.start, self.end), ("reward", self.low, self.high)):
            if low is not None:
                keep &= of(name) >= low
            if high is not None:
                keep &= of(name) <= high
        found = np.flatnonzero(keep)
        return self._saying(table, matrix, found, first) if self.text else found

    def _saying(self, table: Table, matrix: np.ndarray, lines: np.ndarray, first: int) -> np.ndarray:
        """Of the lines those whose name, id, task, error or ending holds the text."""
        hits = np.array(
            [bool(text) and isinstance(text, str) and self.text in text for text in table.texts], dtype=bool
        )
        places = [PLACES[name] for name in ("task", "error", "stop")]
        said = hits[matrix[lines][:, places].astype(int)].any(1) if len(hits) else np.zeros(len(lines), bool)
        ids, names, text = table.ids, table.names, self.text
        said |= np.array([text in names[n] or text in ids[n] for n in (lines + first).tolist()], dtype=bool)
        return lines[said]


def ordered(table: Table, matrix: np.ndarray, lines: np.ndarray, sort: str, order: str) -> np.ndarray:
    """`lines` by a value; those without one at the end. Arrivals are in the order of the stream."""
    down = order == "desc"
    if sort in ("line", "arrival") or sort not in SORTS:
        return lines[::-1] if down else lines
    if sort == "group":
        codes, place = np.unique(matrix[lines, PLACES["group"]].astype(int), return_inverse=True)
        names = [table.texts[code] for code in codes]
        rank = np.empty(len(names))
        rank[sorted(range(len(names)), key=names.__getitem__)] = np.arange(len(names))
        values = rank[place]
    else:
        values = table.column(matrix, sort)[lines]
    known = ~np.isnan(values)
    by = np.argsort(-values[known] if down else values[known], kind="stable")
    return np.concatenate([lines[known][by], lines[~known]])


def facets(table: Table, matrix: np.ndarray) -> dict[str, Any]:
    """Environments, kinds and cohorts (step, kind: how many, how many effective) there are."""
    there = matrix[(matrix[:, PLACES["there"]] == 1) & (matrix[:, PLACES["superseded"]] == 0)]
    if not len(there):
        return {"envs": [], "kinds": [], "cohorts": []}
    texts = lambda name: sorted({t for c in np.unique(there[:, PLACES[name]]) if (t := table.texts[int(c)])})  # noqa: E731
    step = np.nan_to_num(there[:, PLACES["step"]], nan=-1.0)
    steps, at = np.unique(step, return_inverse=True)
    pairs, place = np.unique(there[:, PLACES["kind"]] * len(steps) + at, return_inverse=True)
    reward = there[:, PLACES["reward"]]
    known = ~np.isnan(reward)
    count = lambda weights: np.bincount(place, weights, minlength=len(pairs))  # noqa: E731
    effective, rewarded = count(there[:, PLACES["effective"]]), count(known)
    total, kinds, at = count(np.where(known, reward, 0)), pairs // len(steps), steps[pairs.astype(int) % len(steps)]
    columns = zip(kinds, at, count(None), effective, total, rewarded, strict=True)
    cohorts = [
        {"kind": table.texts[int(kind)], "step": int(step), "all": int(n), "effective": int(e),
         "reward": float(total / k) if k else None}
        for kind, step, n, e, total, k in columns
    ]  # fmt: skip
    return {
        "envs": texts("env"),
        "kinds": texts("kind"),
        "cohorts": sorted(cohorts, key=lambda one: (one["kind"], one["step"])),
    }


def series(table: Table, matrix: np.ndarray, lines: np.ndarray) -> dict[str, list[Any]]:
    """Columns of the lines: numbers, rewards/* and metrics/* (NaN, which is null in JSON, where missing)."""
    codes = matrix[lines, PLACES["keys"]]
    keys = dict.fromkeys(key for code in dict.fromkeys(codes.tolist()) for key in table.texts[int(code)])
    found: dict[str, list[Any]] = {name: table.column(matrix, name)[lines].tolist() for name in (*NUMBERS, *keys)}
    step = matrix[lines, PLACES["step"]].tolist()
    return found | {
        "line": (lines + table.first).tolist(),
        "step": [None if math.isnan(one) else int(one) for one in step],
        "arrival": matrix[lines, PLACES["arrival"]].tolist(),
    }


def bins(table: Table, matrix: np.ndarray, lines: np.ndarray, key: str, bars: int) -> dict[str, Any]:
    values = table.column(matrix, key)[lines]
    return histogram(values[np.isfinite(values)], bars)


def lines_of(index: dict[str, int | tuple[int, ...]], key: str) -> tuple[int, ...]:
    found = index.get(key, ())
    return found if isinstance(found, tuple) else (found,)


def _put(index: dict[str, int | tuple[int, ...]], key: str, line: int) -> None:
    index[key] = (*lines_of(index, key), line) if key in index else line


def _plain(value: Any) -> bool:
    """A number that float64 holds, or nothing."""
    return value is None or (type(value) in (int, float) and abs(value) < 1e308)


def _nan(value: float | None) -> float:
    return math.nan if value is None else value


def _whole(value: float | None) -> float | int | None:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def shown(rows: Iterable[Row]) -> list[dict[str, Any]]:
    return [row.to_json() for row in rows]
