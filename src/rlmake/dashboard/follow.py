"""Following a growing file of JSON lines, decoded into typed rows."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

READ_BYTES = 1 << 20


class Follower:
    """Whole lines of a growing file, decoded into `kind`."""

    def __init__(self, path: Path, kind: type):
        self.path, self.offset, self.torn = path, 0, 0
        self._decode = msgspec.json.Decoder(kind, strict=False).decode

    def size(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def batches(self) -> Iterable[list[Any]]:
        try:
            file = open(self.path, "rb")  # noqa: SIM115  closed below
        except OSError:
            return
        with file:
            file.seek(self.offset)
            rest = b""
            while block := file.read(READ_BYTES):
                *lines, rest = (rest + block).split(b"\n")
                batch = []
                for line in lines:
                    self.offset += len(line) + 1
                    try:
                        batch.append(self._decode(line))
                    except (msgspec.DecodeError, RecursionError):
                        self.torn += bool(line.strip())
                yield batch
