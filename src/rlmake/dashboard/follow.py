"""Following a growing file of JSON lines, decoded into typed rows."""

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from rlmake.dashboard import confine
from rlmake.monitors.traces import read

READ_BYTES = 1 << 20
HEAD_BYTES = 512
LONG, HEAD_START_SECONDS = 8 << 20, 1.0
STILL_SECONDS = 10.0  # a line without an end in a file that did not move for so long is a torn one


class Follower:
    """Whole lines of a growing file, decoded into `kind`."""

    def __init__(self, path: Path, kind: type, roots: Sequence[Path]):
        self.path, self.roots = path, roots
        self.offset, self.seen, self.lost = 0, 0, 0  # behind the last whole line, read, lines that were no rows
        self.head = b""  # what the file begins with
        self._decode = msgspec.json.Decoder(kind, strict=False).decode

    def size(self) -> int:
        return confine.size(self.path, self.roots)

    def anew(self) -> bool:
        """Whether another file lies here than the one that was read."""
        return self.size() < self.offset or not begins(self.path, self.roots, self.head)

    @property
    def torn(self) -> int:
        """Lines that are no rows, with a last one that has no end and gets none."""
        return self.lost + (self.seen > self.offset and still(self.path, self.seen))

    def batches(self) -> Iterable[list[Any]]:
        """What is new, a block at a time; None for a line that is no row, so that lines keep their numbers."""
        try:
            file = confine.opened(self.path, self.roots)
        except OSError:
            return
        with file:
            file.seek(self.offset)
            self.seen = self.offset
            for lines, seen in read.blocks(file, READ_BYTES):
                batch = []
                for line, size in lines:
                    self.offset += size
                    batch.append(row := None if line is None else self.decoded(line))
                    self.lost += row is None and (line is None or bool(line.strip()))
                self.seen = seen
                self.head = self.head or head(file, self.offset)
                yield batch

    def decoded(self, line: bytes) -> Any:
        """A row, or None."""
        try:
            return self._decode(line)
        except (msgspec.DecodeError, ValueError, RecursionError):
            return None

    def part(self, start: int, first: int, count: int) -> tuple[int, int, list[bytes]]:
        """`(whole lines from byte `start` on, number of the first one given, at most `count` of them from `first` on)`;
        `first` below 0 counts from the end. Lines are counted, not decoded. Raises `OSError`."""
        with confine.opened(self.path, self.roots) as file:
            file.seek(start)
            marks, total = [(start, 0)], 0
            while block := file.read(READ_BYTES):
                total += block.count(b"\n")
                marks.append((file.tell(), total))
            at = first if first >= 0 else max(0, total + first)
            place, before = next((mark for mark in reversed(marks) if mark[1] < at), marks[0])
            file.seek(place)
            for _ in range(min(at, total) - before):
                file.readline()
            return total, at, [file.readline(read.LONGEST_LINE) for _ in range(min(count, total - at))]


def head(file: BinaryIO, whole: int) -> bytes:
    """What a file begins with, of its first `whole` bytes: a file that only grows keeps it."""
    return os.pread(file.fileno(), min(HEAD_BYTES, whole), 0)


def begins(path: Path, roots: Sequence[Path], with_bytes: bytes) -> bool:
    """Whether a file begins so; a run that was removed and made again under its name does not."""
    if not with_bytes:
        return True
    try:
        with confine.opened(path, roots) as file:
            return file.read(len(with_bytes)) == with_bytes
    except OSError:
        return False


def head_start(size: int) -> None:
    """Let the page that began the reading of a long file have its first answers before that takes the processor."""
    if size > LONG:
        time.sleep(HEAD_START_SECONDS)


def still(path: Path, size: int) -> bool:
    """Whether a file has this size and has not been written to for a while."""
    try:
        state = path.stat()
    except OSError:
        return False
    return state.st_size == size and time.time() - state.st_mtime > STILL_SECONDS
