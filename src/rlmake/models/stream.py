"""Tensors of safetensors files on their way to a device: read ahead by several threads, through page-locked memory
where the device is a GPU. The files were checked before: whoever calls this knows that they are whole."""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from rlmake.core.errors import UserError
from rlmake.models.layout import Entry, entries

PIECE = 128 << 20  # of tensors that come to the device together
CHUNK = 16 << 20  # that a thread reads at a time
READERS = 8
AHEAD = 2 * READERS  # chunks read or being read


class Piece(NamedTuple):
    """Bytes `start … stop` of a file: tensors that follow one another there."""

    path: Path
    start: int
    stop: int
    tensors: list[Entry]


def tensors(paths: Sequence[str | Path], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """`(name, tensor)` of all files in their order, each a view of its piece's memory on `device`.

    Raises `UserError` for a file that is not readable as safetensors, or shorter than it says.
    """
    todo = [piece for path in paths for piece in pieces(Path(path))]
    chunks = (
        (piece.path, at, min(CHUNK, piece.stop - at)) for piece in todo for at in range(piece.start, piece.stop, CHUNK)
    )
    pinned = device.type == "cuda"
    with ThreadPoolExecutor(READERS) as pool:
        ahead: deque[Future[Tensor]] = deque()

        def more() -> None:
            if (chunk := next(chunks, None)) is not None:
                memory = torch.empty(chunk[2], dtype=torch.uint8, device="cpu", pin_memory=pinned)
                ahead.append(pool.submit(_read, *chunk, memory))

        try:
            for _ in range(AHEAD):
                more()
            for piece in todo:
                flat = torch.empty(piece.stop - piece.start, dtype=torch.uint8, device=device)
                for target in flat.split(CHUNK) if len(flat) else ():
                    target.copy_(ahead.popleft().result())  # has ended when this returns: the chunk's memory is free
                    more()
                for name, dtype, shape, start, stop in piece.tensors:
                    part = flat[start - piece.start : stop - piece.start]
                    if part.storage_offset() % dtype.itemsize:
                        part = part.clone()
                    yield name, part.view(dtype).view(shape)
        finally:
            for future in ahead:
                future.cancel()


def mapped(paths: Sequence[str | Path]) -> Iterator[tuple[str, Tensor]]:
    """`(name, tensor)` of all files, in host memory, read where they are touched."""
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                yield name, file.get_tensor(name)


def pieces(path: Path, limit: int = PIECE) -> Iterator[Piece]:
    """The tensors of a file, in its order, by pieces of at most `limit` bytes; a larger one stands alone."""
    held: list[Entry] = []
    for entry in entries(path):
        if held and entry.stop - held[0].start > limit:
            yield Piece(path, held[0].start, held[-1].stop, held)
            held = []
        held.append(entry)
    if held:
        yield Piece(path, held[0].start, held[-1].stop, held)


def _read(path: Path, start: int, size: int, into: Tensor) -> Tensor:
    """In a thread: `size` bytes of a file from `start` on."""
    view, at = memoryview(into.numpy()), 0
    with open(path, "rb", buffering=0) as file:
        while at < size:
            if not (got := os.preadv(file.fileno(), [view[at:]], start + at)):
                raise UserError(f"{path}: ends before byte {start + size}")
            at += got
    return into
