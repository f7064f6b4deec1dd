"""Reading a trace stream while it is written: whole lines only, whatever a killed writer has left."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from rlmake.monitors.traces import layout, seal

BLOCK = 1 << 20
LONGEST_LINE = 32 << 20  # bytes; a longer one is no row, and is not kept in memory


class Torn(ValueError):
    """A line that is not there as a whole: cut off by a kill, or damaged."""


@dataclass
class Tail:
    """Follows a growing JSON-lines file from `offset` (bytes); a file that shrank is read from its start again."""

    path: Path
    offset: int = 0
    torn: int = 0  # lines that were no JSON objects

    def rows(self, limit: int | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
        """`(offset of the line, row)` of the new whole lines, at most about `limit` bytes of them."""
        try:
            file = open(self.path, "rb")  # noqa: SIM115  closed below
        except OSError:
            return
        with file:
            if file.seek(0, 2) < self.offset:
                self.offset = 0
            file.seek(start := self.offset)
            for lines, _ in blocks(file, BLOCK):
                for line, size in lines:
                    place, self.offset = self.offset, self.offset + size
                    if line is not None and (row := row_of(line)) is not None:
                        yield place, row
                    elif line is None or line.strip():
                        self.torn += 1
                if limit is not None and self.offset - start >= limit:
                    return


def blocks(file: BinaryIO, size: int) -> Iterator[tuple[list[tuple[bytes | None, int]], int]]:
    """`([(line, its bytes with the end)], bytes read so far)` a block at a time, from where `file` stands; None in the
    place of a line that is too long to be one."""
    parts: list[bytes] = []  # of a line that has no end yet: joined once, or a long one would cost its square
    kept = dropped = 0
    while block := file.read(size):
        *lines, rest = block.split(b"\n")
        if lines and (parts or dropped):
            lines[0] = b"".join([*parts, lines[0]])
            parts, kept = [], 0
        found: list[tuple[bytes | None, int]] = [(line, len(line) + 1) for line in lines]
        if found and dropped:
            found[0], dropped = (None, found[0][1] + dropped), 0
        parts.append(rest)
        kept += len(rest)
        if kept > LONGEST_LINE:
            parts, kept, dropped = [], 0, dropped + kept
        yield found, file.tell()


def row_of(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def line_at(folder: Path, chunk: int, offset: int, length: int | None = None) -> bytes:
    """One line of a chunk, without its end. Raises `Torn` when it is not there as a whole.

    `length` (bytes) spares looking for the end.
    """
    path = folder / layout.chunk_name(chunk)
    try:
        data = _plain(path, offset, length)
    except FileNotFoundError:  # sealed meanwhile
        data = _sealed(path.with_name(path.name + ".zst"), offset, length)
    if length is None:
        if b"\n" not in data:
            raise Torn(f"chunk {chunk}: the line at {offset} has no end")
        return data[: data.index(b"\n")]
    if len(data) < length:
        raise Torn(f"chunk {chunk}: {len(data)} of {length} bytes at {offset}")
    return data[:length]


def record_at(folder: Path, chunk: int, offset: int, length: int | None = None) -> dict[str, Any]:
    """The record in a line of a chunk. Raises `Torn`."""
    row = row_of(line_at(folder, chunk, offset, length))
    if row is None:
        raise Torn(f"chunk {chunk}: the line at {offset} is no record")
    return row


def _plain(path: Path, offset: int, length: int | None) -> bytes:
    with open(path, "rb") as file:
        file.seek(offset)
        return file.readline() if length is None else file.read(length)


def _sealed(path: Path, offset: int, length: int | None) -> bytes:
    data = b""
    try:
        for piece in seal.pieces(path, offset):
            data += piece
            if len(data) >= length if length is not None else b"\n" in piece:
                break
    except (OSError, ValueError, seal.zstandard.ZstdError) as error:
        raise Torn(f"{path.name}: {error}") from None
    return data
