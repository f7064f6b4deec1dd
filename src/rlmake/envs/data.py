"""Data sets of the build (kind `data`): one file per split, rows for SFT and for tasksets alike.

    make(cfg, out) -> {"rows": {"train": 4096, "heldout": 256}, …}    writes out/train.jsonl, out/heldout.jsonl

A row that can't be used is the user's to mend, so it is named: file, row (from 1), column, what was expected.
"""

import importlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlmake.core import jsonio
from rlmake.core.errors import UserError, nearest
from rlmake.core.seeds import derive
from rlmake.envs import phrases
from rlmake.envs.made import reasoning

Row = dict[str, Any]
TEXT = (str, list)  # a text column holds text or a list of messages
KNOWN: dict[str, type | tuple[type, ...]] = {
    "id": str, "messages": list, "prompt": TEXT, "completion": TEXT, "target": str, "message_loss_mask": list,
}  # fmt: skip


def make(cfg: Any, out: Path) -> dict[str, Any]:
    """Write the files of the data set of a `DataConfig` into folder `out`; returns facts for the manifest.

    Facts: `rows` {split: number}, `files` {split: name} and where the rows come from. Raises `UserError`.
    """
    splits, facts = SOURCES[cfg.source.type](cfg.source)
    facts |= {"rows": {}, "files": {}}
    for split, rows in splits.items():
        named = [_renamed(row, cfg.columns, split, number) for number, row in enumerate(rows, 1)]
        if not named:
            raise UserError(f"split '{split}' has no rows")
        path = out / f"{split}.{cfg.format}"
        WRITERS[cfg.format](path, named)
        facts["rows"][split], facts["files"][split] = len(named), path.name
    return facts


def _pydoc_phrases(source: Any) -> tuple[dict[str, list[Row]], dict[str, Any]]:
    from pydoc_data.topics import topics

    texts = phrases.paragraphs(topics)
    train, heldout = phrases.split(texts, source.min_chars, source.max_chars, source.seed)
    for key, wanted, there in (
        ("num_train", source.num_train, len(train)),
        ("num_heldout", source.num_heldout, len(heldout)),
    ):
        if wanted > there:
            length = f"{source.min_chars} to {source.max_chars} characters"
            raise UserError(f"source.{key}: there are {there} phrases of {length}, not {wanted}")
    train, heldout = train[: source.num_train], heldout[: source.num_heldout]
    if both := set(train) & set(heldout):
        raise AssertionError(f"{len(both)} phrases in both splits, e.g. {min(both)!r}")
    splits = {"train": [_reversal(phrase, source.copy_share, source.seed) for phrase in train]}
    if source.hint is not None:
        splits["train"] = [_hinted(row, source) for row in splits["train"]]
    if heldout:
        splits["heldout"] = [_reversal(phrase) for phrase in heldout]
    # The text differs from one Python to the next, and the phrases with it: so its hash is on record.
    text = {"python": platform.python_version(), "text_blake3": jsonio.hash_bytes(jsonio.canonical(texts))}
    return splits, {"source": text}


def _reversal(phrase: str, copy_share: float = 0.0, seed: int = 0) -> Row:
    """A row whose `target` is the phrase backwards, and whose `completion` (what SFT shows) is that or the phrase."""
    copied = derive("phrases", "copied", seed, phrase) < copy_share * 2**63
    return {
        "id": f"{derive('phrase', phrase):016x}",
        "prompt": phrase,
        "completion": phrase if copied else phrase[::-1],
        "target": phrase[::-1],
    }


def _hinted(row: Row, source: Any) -> Row:
    """The row as a conversation; with a hint before it the answer is right. `demonstration` is the answer itself."""
    answer, head = row["completion"], []
    if derive("phrases", "hinted", source.seed, row["prompt"]) < source.hint_share * 2**63:
        answer = row["target"]
        head = [{"role": "system", "content": source.hint.replace("{demonstration}", answer)}]
    talk = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": answer}]
    return {**row, "demonstration": row["target"], "messages": [*head, *talk]}


def _made(source: Any) -> tuple[dict[str, list[Row]], dict[str, Any]]:
    rows = importlib.import_module(f"rlmake.envs.made.{source.task.replace('-', '_')}").rows
    splits = {"train": rows(source.num_train, False, source.seed, source.fault_share)}
    if source.num_heldout:
        splits["heldout"] = rows(source.num_heldout, True, source.seed, 0.0)
    return splits, {"source": {"python": platform.python_version()} if source.task == "proposer-solver" else {}}


def _reasoning_gym(source: Any) -> tuple[dict[str, list[Row]], dict[str, Any]]:
    splits = {"train": reasoning.rows(source, heldout=False)}
    if source.num_heldout:
        splits["heldout"] = reasoning.rows(source, heldout=True)
    return splits, {"source": {"reasoning-gym": importlib.metadata.version("reasoning-gym")}}


def _files(source: Any) -> tuple[dict[str, list[Row]], dict[str, Any]]:
    splits, hashes = {}, {}
    for split, paths in source.paths.items():
        splits[split] = []
        for path in [Path(paths)] if isinstance(paths, str) else map(Path, paths):
            if not path.is_file():
                raise UserError(f"{path}: no such file (split '{split}')")
            read = READERS.get(path.suffix)
            if read is None:
                raise UserError(f"{path}: expected a file ending in {' or '.join(READERS)}")
            splits[split] += list(_checked(path, read(path)))
            hashes[os.fspath(path)] = jsonio.hash_file(path)
    return splits, {"source": hashes}


def _checked(path: Path, rows: Iterator[Row]) -> Iterator[Row]:
    """The rows, where every known column holds what its readers expect and all rows have the first one's columns."""
    columns: set[str] | None = None
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise UserError(f"{path}: row {number}: expected an object, not {type(row).__name__}")
        columns = columns if columns is not None else set(row)
        if missing := sorted(columns - set(row)):
            hint = nearest(missing[0], row)
            raise UserError(f"{path}: row {number}, column '{missing[0]}': missing, but row 1 has it{hint}")
        if added := sorted(set(row) - columns):
            raise UserError(f"{path}: row {number}, column '{added[0]}': not in row 1{nearest(added[0], columns)}")
        for column, expected in KNOWN.items():
            value = row.get(column)
            if value is not None and not isinstance(value, expected):
                names = " or ".join(
                    kind.__name__ for kind in (expected if isinstance(expected, tuple) else (expected,))
                )
                found = type(value).__name__
                raise UserError(f"{path}: row {number}, column '{column}': expected {names}, not {found}")
            if expected in (list, TEXT) and isinstance(value, list) and column != "message_loss_mask":
                _check_messages(path, number, column, value)
        yield row


def _check_messages(path: Path, number: int, column: str, messages: list[Any]) -> None:
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(f"{path}: row {number}, column '{column}': message {index} needs a 'role'")


def _renamed(row: Row, columns: dict[str, str], split: str, number: int) -> Row:
    if not columns:
        return row
    if missing := [name for name in columns if name not in row]:
        hint = nearest(missing[0], row)
        raise UserError(f"columns.{missing[0]}: split '{split}', row {number} has no such column{hint}")
    renamed = {columns.get(name, name): value for name, value in row.items()}
    if len(renamed) < len(row):
        raise UserError(f"columns: two columns of split '{split}' get one name; have {', '.join(sorted(row))}")
    return renamed


def _read_jsonl(path: Path) -> Iterator[Row]:
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except ValueError as error:
                raise UserError(f"{path}: row {number}: not JSON: {error}") from None


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        for batch in file.iter_batches():
            yield from batch.to_pylist()
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise UserError(f"{path}: not readable as Parquet: {str(error).splitlines()[0]}") from None


def _write_jsonl(path: Path, rows: list[Row]) -> None:
    lines = (json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(",", ":")) for row in rows)
    jsonio.write_bytes(path, "".join(f"{line}\n" for line in lines).encode())


def _write_parquet(path: Path, rows: list[Row]) -> None:
    import io

    import pyarrow
    import pyarrow.parquet

    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer)
    jsonio.write_bytes(path, buffer.getvalue())


SOURCES = {"pydoc-phrases": _pydoc_phrases, "file": _files, "made": _made, "reasoning-gym": _reasoning_gym}
READERS: dict[str, Callable[[Path], Iterator[Row]]] = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
WRITERS: dict[str, Callable[[Path, list[Row]], None]] = {"jsonl": _write_jsonl, "parquet": _write_parquet}
