"""Following a growing file of JSON lines, decoded into typed rows."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rlmake.dashboard import confine

READ_BYTES = 1 << 20
STILL_SECONDS = 10.0  # a line without an end in a file that did not move for so long is a torn one


class Follower:
    """Whole lines of a growing file, decoded into `kind`."""

    def __init__(self, path: Path, kind: type, roots: Sequence[Path]):
        self.path, self.roots = path, roots
        self.offset, self.seen, self.lost = 0, 0, 0  # behind the last whole line, read, lines that were no rows
        self._decode = msgspec.json.Decoder(kind, strict=False).decode

    def size(self) -> int:
        return confine.size(self.path, self.roots)

    @property
    def torn(self) -> int:
        """Lines that are no rows, with a last one that has no end and gets none."""
        return self.lost + (self.seen > self.offset and still(self.path, self.seen))

    def batches(self) -> Iterable[list[Any]]:
        try:
            file = confine.opened(self.path, self.roots)
        except OSError:
            return
        with file:
            file.seek(self.offset)
            self.seen, rest = self.offset, b""
            while block := file.read(READ_BYTES):
                *lines, rest = (rest + block).split(b"\n")
                batch = []
                for line in lines:
                    self.offset += len(line) + 1
                    try:
                        batch.append(self._decode(line))
                    except (msgspec.DecodeError, ValueError, RecursionError):
                        self.lost += bool(line.strip())
                self.seen = self.offset + len(rest)
                yield batch


def still(path: Path, size: int) -> bool:
    """Whether a file has this size and has not been written to for a while."""
    try:
        state = path.stat()
    except OSError:
        return False
    return state.st_size == size and time.time() - state.st_mtime > STILL_SECONDS
