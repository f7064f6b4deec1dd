"""Rows of a taskset: JSON objects, one a line. Nothing here loads verifiers: plans and launchers look at the first."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Columns:
    """What a taskset reads of each row. Columns beyond these, as a data set for SFT has them, are left alone."""

    expected: str
    needed: tuple[str, ...]
    optional: tuple[str, ...] = ("id",)

    def of(self, where: str, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row's columns. `ValueError` that names those it has where one is missing."""
        if any(name not in row for name in self.needed):
            raise ValueError(f"{where}: expected {self.expected}; it has {', '.join(map(repr, row)) or 'nothing'}")
        return {name: row[name] for name in (*self.needed, *self.optional) if name in row}


COLUMNS = {
    "reverse-text": Columns(
        "an object with text in 'prompt' and 'target'", ("prompt", "target"), ("id", "demonstration")
    ),
    "alphabet-sort": Columns("an object with lists of names in 'turns'", ("turns",)),
    "phone-book": Columns("an object with text in 'prompt' and 'name'", ("prompt", "name")),
}


def read(path: Path, expected: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """`(file: row N, row)` of every row. `ValueError` for a line that is no object, saying what was `expected`."""
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            yield (where := f"{path}: row {number}"), parsed(where, line, expected)


def parsed(where: str, line: str, expected: str) -> dict[str, Any]:
    """A line as a row. `ValueError` for one that is no object, saying what was `expected`."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: expected {expected}: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected {expected}, not {type(row).__name__}")
    return row


def tasks(path: Path, data: Any, taskset: str, **common: Any) -> Iterator[Any]:
    """A `data` (a subclass of verifiers' TaskData) of each row: the taskset's columns, and what is `common`."""
    columns = COLUMNS[taskset]
    for where, row in read(path, columns.expected):
        given = columns.of(where, row)
        try:
            yield data(**given, **common)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{where}: expected {columns.expected}: {error}") from error


def fault_of_first(taskset: Mapping[str, Any]) -> str | None:
    """What is wrong with the first row of an environment's `taskset` table, where its columns are known here."""
    columns, path = COLUMNS.get(taskset["id"]), taskset.get("path")
    if columns is None:
        return None
    if not isinstance(path, str):
        return f"expected the path of a file with {columns.expected} a line, not {json.dumps(path, default=str)}"
    try:
        for where, row in read(Path(path), columns.expected):
            columns.of(where, row)
            return None
    except ValueError as error:
        return str(error)
    except OSError as error:
        return f"{path}: {error.strerror}"
    return f"{path}: no row; expected {columns.expected} a line"
