"""Rows of a taskset: JSON objects, one a line."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


def read(path: Path, expected: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """`(file: row N, row)` of every row. `ValueError` for a line that is no object, saying what was `expected`."""
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{path}: row {number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where}: expected {expected}: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"{where}: expected {expected}, not {type(row).__name__}")
            yield where, row


def tasks(
    path: Path, data: Any, expected: str, fields: Sequence[str], optional: Sequence[str] = (), **common: Any
) -> Iterator[Any]:
    """A `data` (a subclass of verifiers' TaskData) of each row: its `fields`, `optional` ones, and what is `common`.

    Columns beyond these, as a data set for SFT has them, are left alone.
    """
    for where, row in read(path, expected):
        try:
            given = {name: row[name] for name in (*fields, *(name for name in optional if name in row))}
            yield data(**given, **common)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{where}: expected {expected}: {error}") from error
