"""The parts of a data set as sequences of rows: local files, saved data sets, hub names.

JSON lines are read by position and parsed on demand, so that rows of mixed shapes stay as they were written (columnar
readers unify them); Parquet and Arrow are memory-mapped.
"""

import json
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlmake.core.errors import UserError, nearest
from rlmake.core.jsonio import canonical, hash_bytes, hash_file

SUFFIXES = (".jsonl", ".parquet", ".arrow")


@dataclass
class Part:
    """One subset and split: `label` for the metrics, rows by index, and a hash of what they are."""

    label: str
    rows: Sequence[dict[str, Any]]
    identity: str


class JsonLines(Sequence):
    """Rows of a `.jsonl` file; empty lines do not count."""

    def __init__(self, path: Path):
        self._path = path
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        starts, start = [], 0
        while start < len(self._data):
            end = self._data.find(b"\n", start)
            end = len(self._data) if end < 0 else end
            if self._data[start:end].strip():
                starts.append((start, end))
            start = end + 1
        self._spans = np.asarray(starts, dtype=np.int64).reshape(-1, 2)

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> dict[str, Any]:
        start, end = self._spans[index].tolist()
        try:
            row = json.loads(self._data[start:end])
        except ValueError as error:
            raise UserError(f"{self._path}: row {index} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise UserError(f"{self._path}: row {index} is not an object")
        return row


class Table(Sequence):
    """Rows of Parquet or Arrow files, through `datasets`."""

    def __init__(self, dataset: Any):
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._dataset[int(index)]


class Joined(Sequence):
    """Several files' rows, one after the other."""

    def __init__(self, parts: list[Sequence]):
        self._parts, self._ends = parts, np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        part = int(np.searchsorted(self._ends, index, side="right"))
        return self._parts[part][index - (int(self._ends[part - 1]) if part else 0)]


def open_parts(
    name: str, subsets: list[str] | None = None, splits: list[str] | None = None, revision: str | None = None
) -> list[Part]:
    """The parts in the order of the configuration; both lists are walked together. Default split `train`.

    `name`: a file, a folder, or a hub name. Raises `UserError` naming what is missing or empty.
    """
    count = len(subsets or splits or [None])
    pairs = list(zip(subsets or [None] * count, splits or ["train"] * count, strict=True))
    parts = []
    for subset, split in pairs:
        if Path(name).exists():
            rows, identity = _local(Path(name), subset, split)
        else:
            rows, identity = _hub(name, revision, subset, split)
        label = "/".join(text for text in (subset, split) if text)
        if not len(rows):
            raise UserError(f"data.name = '{name}' ({label}): the data set has no rows")
        parts.append(Part(label, rows, identity))
    return parts


def _local(path: Path, subset: str | None, split: str) -> tuple[Sequence, str]:
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise UserError(f"data.name: {path}: expected a file ending in {', '.join(SUFFIXES)}, or a folder of them")
        return _read([path])
    folder = path / subset if subset else path
    if not folder.is_dir():
        raise UserError(f"data.name: {folder}: no such subset{nearest(str(subset), _names(path))}")
    if (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file():
        return _saved(folder, split)
    for base in (folder, folder / "data"):
        patterns = (f"{split}*", f"{split}/*")
        files = sorted(file for pattern in patterns for file in base.glob(pattern) if _of_split(file, split))
        if files:
            return _read(files)
    found = sorted({f.stem for f in [*folder.glob("*.*"), *folder.glob("data/*.*")] if f.suffix in SUFFIXES})
    there = ", ".join(found) or "no data files"
    raise UserError(f"data.name: {folder} has no split '{split}'{nearest(split, found)} (found: {there})")


def _of_split(file: Path, split: str) -> bool:
    """`<split>.<suffix>`, `<split>-<anything>.<suffix>`, or a file in a folder named like the split."""
    named = file.stem == split or file.stem.startswith(f"{split}-") or file.parent.name == split
    return named and file.suffix in SUFFIXES and file.is_file()


def _names(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir() if entry.is_dir()] if folder.is_dir() else []


def _read(files: list[Path]) -> tuple[Sequence, str]:
    """Rows of the files, and a hash over their contents."""
    readers = [JsonLines(file) if file.suffix == ".jsonl" else _columnar(file) for file in files]
    identity = hash_bytes(canonical([hash_file(file) for file in files]))
    return (readers[0] if len(readers) == 1 else Joined(readers)), identity


def _columnar(file: Path) -> Table:
    import datasets

    try:
        if file.suffix == ".arrow":
            return Table(datasets.Dataset.from_file(str(file)))
        return Table(datasets.Dataset.from_parquet(str(file), keep_in_memory=False))
    except Exception as error:
        raise UserError(f"data.name: {file}: not readable: {error}") from None


def _saved(folder: Path, split: str) -> tuple[Sequence, str]:
    import datasets

    data = datasets.load_from_disk(str(folder))
    if isinstance(data, datasets.DatasetDict):
        if split not in data:
            raise UserError(
                f"data.name: {folder} has no split '{split}'{nearest(split, data)} (found: {', '.join(data)})"
            )
        data, folder = data[split], folder / split
    return Table(data), hash_bytes(canonical([hash_file(file) for file in sorted(folder.glob("*.arrow"))]))


def _hub(name: str, revision: str | None, subset: str | None, split: str) -> tuple[Sequence, str]:
    if name.startswith((".", "/")) or name.count("/") != 1:
        raise UserError(f"data.name: {name}: no such file or folder")
    import datasets

    try:
        data = datasets.load_dataset(name, subset, split=split, revision=revision)
    except Exception as error:
        raise UserError(f"data.name: {name}: neither a file here nor loadable from the hub: {error}") from None
    return Table(data), hash_bytes(canonical([name, subset, split, revision, len(data), data._fingerprint]))
