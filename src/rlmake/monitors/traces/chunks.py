"""Appending whole lines to numbered chunks, by several processes if need be."""

import fcntl
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from loguru import logger

from rlmake.monitors.traces import layout, seal


def to_line(row: Any) -> bytes:
    """Compact JSON and a line feed; numbers that are not finite become null, half surrogates `\\uXXXX`."""
    try:
        return msgspec.json.encode(row) + b"\n"
    except UnicodeEncodeError:
        return json.dumps(_finite(row), separators=(",", ":")).encode() + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and value - value != 0 else value


class Lines:
    """An append-only file. A write that fails leaves nothing of its line behind (`OSError`)."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def append(self, line: bytes) -> int:
        """Write; the offset at which it lies. Hold the folder's lock: an earlier writer's torn line is ended first."""
        size = start = os.fstat(self._fd).st_size
        data = line
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            data, start = b"\n" + line, size + 1
        view, done = memoryview(data), 0
        try:
            while done < len(view):
                done += os.write(self._fd, view[done:])
        except OSError:
            self.cut(size)
            raise
        return start

    def cut(self, size: int) -> None:
        """Take back what was written behind `size`, under the same lock."""
        os.ftruncate(self._fd, size)

    def close(self) -> None:
        os.close(self._fd)


class Chunks:
    """A folder of chunks with an index: `append(line, row)` writes the line, then the row with its place."""

    def __init__(self, folder: Path, index: Path, chunk_bytes: int, compress: bool):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.chunk_bytes, self.compress = folder, chunk_bytes, compress
        self._index = Lines(index)
        self._lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._number, self._lines = -1, None
        self._sealing: list[threading.Thread] = []

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def append(self, line: bytes, row: dict[str, Any]) -> None:
        """`row` is completed by `chunk`, `offset` and `length` (without the line feed)."""
        with self._locked():
            lines = self._current()
            offset = lines.append(line)
            place = {"chunk": self._number, "offset": offset, "length": len(line) - 1}
            try:
                self._index.append(to_line({**place, **row}))
            except OSError:
                lines.cut(offset)  # a line that no row leads to is nobody's
                raise
        if offset + len(line) >= self.chunk_bytes and self.compress:  # nobody appends to a full one
            thread = threading.Thread(target=_seal, args=(lines.path,), name="seal", daemon=True)
            thread.start()
            self._sealing = [one for one in self._sealing if one.is_alive()] + [thread]

    def _full(self, path: Path) -> bool:
        """Whether a chunk takes no more lines: by its size, or since it was sealed after the folder was listed."""
        try:
            return path.stat().st_size >= self.chunk_bytes
        except FileNotFoundError:
            return True

    def _current(self) -> Lines:
        """The newest chunk if it takes more, else the next one. Another process may have filled it meanwhile."""
        there = layout.chunks(self.folder)
        number = max(there, default=0)
        path = self.folder / layout.chunk_name(number)
        if there and (there[number].suffix == ".zst" or self._full(path)):
            number += 1
            path = self.folder / layout.chunk_name(number)
        if self._lines is None or number != self._number:
            self._release()
            self._number, self._lines = number, Lines(path)
        return self._lines

    def _release(self) -> None:
        if self._lines is not None:
            self._lines.close()
            self._lines = None

    def seal_last(self) -> None:
        """Seal what was written last: nothing more will come."""
        there = layout.chunks(self.folder)
        if self.compress and there and there[max(there)].suffix != ".zst":
            with self._locked():
                self._release()
                _seal(there[max(there)])

    def close(self) -> None:
        """Waits for chunks that are being compressed."""
        for thread in self._sealing:
            thread.join()
        self._release()
        self._index.close()
        os.close(self._lock)


def _seal(path: Path) -> None:
    """Any failure leaves the chunk as it is."""
    try:
        seal.seal(path)
    except OSError as error:
        logger.warning(f"{path}: stays uncompressed: {error}")
