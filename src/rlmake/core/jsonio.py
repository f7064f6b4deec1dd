"""Canonical JSON, atomic files, content hashes."""

import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from rlmake.core.errors import UserError

_AS_IT_IS = frozenset({str, int, bool, type(None)})
_NESTED = (dict, list)


def _plain(value: Any) -> Any:
    """Numbers that are equal become equal text (`3.0` → `3`), tuples become lists, paths become text."""
    if type(value) in _AS_IT_IS:
        return value
    if isinstance(value, dict):
        return {str(key): item if type(item) in _AS_IT_IS else _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"canonical JSON holds no {value}")
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    if isinstance(value, str | int):  # of a class of its own
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"canonical JSON holds no {type(value).__name__}")


def read_record(path: Path | str, shape: type[msgspec.Struct], schema: int = 1) -> dict[str, Any]:
    """A record of ours that holds at least what `shape` says. Raises `UserError` naming file and key for one that is
    damaged or of another schema."""
    return checked(read_json(path), path, shape, schema)


def checked(record: Any, path: Path | str, shape: type[msgspec.Struct], schema: int = 1) -> dict[str, Any]:
    """As `read_record`, of what was read from `path`."""
    found = record.get("schema") if isinstance(record, dict) else None
    if found != schema:
        raise UserError(f"{path}: schema {found} is unknown, expected {schema}")
    try:
        msgspec.convert(record, shape)
    except msgspec.ValidationError as error:
        raise UserError(f"{path}: damaged: {error}") from None
    return record


def plain_copy(value: Any) -> Any:
    """A deep copy of nested dictionaries and lists; much faster than `copy.deepcopy`."""
    if isinstance(value, dict):
        return {key: plain_copy(item) if isinstance(item, _NESTED) else item for key, item in value.items()}
    if isinstance(value, list):
        return [plain_copy(item) if isinstance(item, _NESTED) else item for item in value]
    return value


def canonical(value: Any) -> bytes:
    """Canonical JSON bytes: sorted keys, UTF-8, no spaces, no NaN, one spelling per number."""
    return json.dumps(
        _plain(value), sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":")
    ).encode()


def fsync_dir(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_bytes(path: Path | str, data: bytes) -> None:
    """Write atomically: a temporary name in the same folder, fsync, rename, fsync of the folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    except OSError as error:
        error.filename = str(path)  # nobody knows the temporary name
        raise
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None
        raise
    fsync_dir(path.parent)


def write_json(path: Path | str, value: Any) -> None:
    """Write a record atomically, readable (indented) and with sorted keys."""
    text = json.dumps(_plain(value), sort_keys=True, ensure_ascii=False, allow_nan=False, indent=1)
    write_bytes(path, text.encode() + b"\n")


def read_json(path: Path | str) -> Any:
    """Read JSON; a missing, unreadable or broken file is a `UserError` that names it."""
    try:
        return json.loads(Path(path).read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not readable as JSON: {error}") from None


def hash_bytes(data: bytes) -> str:
    return blake3(data).hexdigest()


def hash_file(path: Path | str, mapped: bool = False, parallel: bool = False) -> str:
    """blake3 of a file's content, hex. `mapped` copies nothing, but ends the process where another cuts the file;
    `parallel` uses all cores."""
    hasher = blake3(max_threads=blake3.AUTO if parallel else 1)
    if mapped:
        return hasher.update_mmap(path).hexdigest()
    chunk = bytearray(8 << 20 if parallel else 1 << 20)
    with open(path, "rb", buffering=0) as file:
        while size := file.readinto(chunk):
            hasher.update(memoryview(chunk)[:size])
    return hasher.hexdigest()


def list_files(root: Path | str) -> list[dict[str, Any]]:
    """`[{path, size, blake3}]` of every regular file below `root`, sorted by path (relative, `/`)."""
    root = Path(root)
    return [
        {"path": path.relative_to(root).as_posix(), "size": path.stat().st_size, "blake3": hash_file(path)}
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.name.endswith(".tmp")
    ]


def content_hash(files: list[dict[str, Any]]) -> str:
    """One hash over `[{path, size, blake3}]`."""
    return hash_bytes(canonical(sorted(([f["path"], f["size"], f["blake3"]] for f in files), key=lambda row: row[0])))
