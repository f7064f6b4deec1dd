"""Streaming safetensors: sizes are known before the first byte, so tensors go to their place as they come.

A few threads each load a group of tensors, convert it piece by piece and write every piece while it is in the
processor's cache (an operation split over threads costs more in waiting than it gains; new memory is dearer than the
arithmetic). The disk is told at once what to write back.
"""

import ctypes
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from rlmake.core.errors import UserError
from rlmake.core.jsonio import write_json
from rlmake.export.sources import INDEX, SINGLE, Source, Spec
from rlmake.models import layout

try:
    from rlmake.export import _kernels
except ImportError:  # no compiler when rlmake was installed
    _kernels = None

MAX_SHARD = 5 * 10**9  # bytes
GROUP = 64 * 2**20  # bytes of source tensors loaded at a time, at least one tensor
PIECE = 2**19  # elements converted and written at a time
WRITE_BACK = 2**23  # bytes of a tensor that the disk is told of at a time
WORKERS = min(4, os.cpu_count() or 1)  # threads, each with a group in memory (where it is not mapped) and a piece
START_WRITING = 2  # SYNC_FILE_RANGE_WRITE of <linux/fs.h>

# One source tensor's outputs: `rule(name, spec) -> {name: spec}` before; then `make(name, tensor)` yields pieces
# (name, piece) of them, each output's elements in order.
Rule = Callable[[str, Spec], dict[str, Spec]]
Make = Callable[[str, torch.Tensor], Iterator[tuple[str, torch.Tensor]]]


def natural(name: str) -> list[Any]:
    """Sort key that puts layer 2 before layer 10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def plan_shards(outputs: dict[str, dict[str, Spec]], max_shard: int = MAX_SHARD) -> dict[str, list[str]]:
    """`{file: [source tensor]}`: filled in natural order up to `max_shard` bytes; a larger tensor has its own file."""
    bins: list[list[str]] = []
    room = 0
    for name in sorted(outputs, key=natural):
        size = sum(spec.nbytes for spec in outputs[name].values())
        if not bins or size > room:
            bins.append([])
            room = max_shard
        bins[-1].append(name)
        room -= size
    if len(bins) == 1:
        return {SINGLE: bins[0]}
    return {f"model-{n:05d}-of-{len(bins):05d}.safetensors": names for n, names in enumerate(bins, 1)}


def write_model(
    folder: Path,
    source: Source,
    shards: dict[str, list[str]],
    outputs: dict[str, dict[str, Spec]],
    make: Make,
    index: bool = True,
) -> dict[str, Any]:
    """Write every shard, then (with `index`) the index where there is more than one.

    Returns `{tensors, parameters, bytes, shards}`. `shards` holds names of source tensors, `outputs` says what becomes
    of each.
    """
    for name, spec in (item for named in outputs.values() for item in named.items()):
        if spec.dtype not in layout.NAMES:
            raise UserError(f"tensor {name} is of type {str(spec.dtype)[6:]}, expected {', '.join(layout.TYPES)}")
    weight_map: dict[str, str] = {}
    total = parameters = 0
    under_way: deque[tuple[Shard, list[Future]]] = deque()
    with ExitStack() as opened, _workers() as pool:
        for file, names in shards.items():
            specs = {out: spec for name in names for out, spec in outputs[name].items()}
            if not specs:
                continue
            shard = opened.enter_context(closing(Shard(folder / file, specs)))
            under_way.append(
                (shard, [pool.submit(_convert, source, group, make, shard) for group in groups(source, names)])
            )
            if len(under_way) > 1:  # one is synced while the next is converted
                _finish(*under_way.popleft())
            weight_map |= dict.fromkeys(specs, file)
            total += sum(spec.nbytes for spec in specs.values())
            parameters += sum(spec.numel for out, spec in specs.items() if not out.endswith("_scale_inv"))
        while under_way:
            _finish(*under_way.popleft())
    files = sorted(set(weight_map.values()))
    if index and files != [SINGLE]:
        ordered = {name: weight_map[name] for name in sorted(weight_map)}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": ordered})
    return {"tensors": len(weight_map), "parameters": parameters, "bytes": total, "shards": files}


class Shard:
    """One safetensors file, whose tensors several threads write, each tensor by one of them, piece after piece.

    Wider types come first, so that every tensor is aligned to its own type.
    """

    def __init__(self, path: Path, specs: dict[str, Spec]):
        self.path, self._specs = path, specs
        ordered = sorted(specs.items(), key=lambda item: (-item[1].dtype.itemsize, natural(item[0])))
        head, self._places = layout.header({name: (spec.dtype, spec.shape) for name, spec in ordered})
        self._written = dict.fromkeys(specs, 0)
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 (`close` does)
        self.close = self._file.close
        self._put(0, head)

    def write(self, name: str, piece: torch.Tensor) -> None:
        """The next elements of a tensor."""
        spec, done = self._specs[name], self._written[name]
        if piece.dtype != spec.dtype or done + piece.nbytes > spec.nbytes:
            raise ValueError(f"{name}: {piece.dtype} {tuple(piece.shape)} behind {done} bytes, expected {spec}")
        self._put(self._places[name] + done, piece.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        end = self._written[name] = done + piece.nbytes
        if spec.nbytes >= 2**20 and (end == spec.nbytes or end // WRITE_BACK > done // WRITE_BACK):
            begun = done // WRITE_BACK * WRITE_BACK
            _start_writing(self._file.fileno(), self._places[name] + begun, end - begun)

    def finish(self) -> None:
        """Sync and close the file; `ValueError` for a tensor that is not whole."""
        if short := [name for name, spec in self._specs.items() if self._written[name] != spec.nbytes]:
            raise ValueError(f"{self.path}: {len(short)} tensors are not whole, {min(short)} among them")
        os.fsync(self._file.fileno())
        self.close()

    def _put(self, place: int, data: Any) -> None:
        data = memoryview(data)
        while data:
            count = os.pwrite(self._file.fileno(), data, place)
            data, place = data[count:], place + count


def _convert(source: Source, group: list[str], make: Make, shard: Shard) -> None:
    """Load, check, convert and write a few tensors."""
    loaded = source.load(group)
    for name in group:
        for out, piece in make(name, loaded.pop(name)):
            shard.write(out, piece)


def _finish(shard: Shard, parts: list[Future]) -> None:
    for part in parts:
        part.result()
    shard.finish()


def groups(source: Source, names: Sequence[str]) -> Iterator[list[str]]:
    """Names cut into groups of about GROUP bytes, at least one tensor each."""
    group: list[str] = []
    held = 0
    for name in names:
        nbytes = source.tensors[name].nbytes
        if group and held + nbytes > GROUP:
            yield group
            group, held = [], 0
        group.append(name)
        held += nbytes
    if group:
        yield group


@contextmanager
def _workers() -> Iterator[ThreadPoolExecutor]:
    """The threads that convert, in each of which torch uses that thread alone."""
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(WORKERS, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            yield pool
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(threads)


def _start_writing(descriptor: int, offset: int, size: int) -> None:
    """Ask the kernel to begin to write these bytes back, so that the sync at the end finds little to do."""
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux only; a file system without it says no
    if call is not None:
        call(ctypes.c_int(descriptor), ctypes.c_int64(offset), ctypes.c_int64(size), ctypes.c_uint(START_WRITING))


def require_finite(name: str, tensor: torch.Tensor) -> None:
    """A model with NaN or infinity in it is never written: raises `UserError` naming the tensor."""
    if not tensor.is_floating_point() or tensor.dtype.itemsize == 1 or tensor.numel() == 0:
        return
    # Extremes propagate NaN, and are twenty times faster than `isfinite` over a bf16 tensor on a CPU.
    if not all(bool(torch.isfinite(extreme)) for extreme in tensor.aminmax()):
        raise UserError(f"tensor {name} holds NaN or infinite values; nothing was written")


def same(name: str, spec: Spec) -> dict[str, Spec]:
    """The rule of tensors that stay as they are."""
    return {name: spec}


def checked(name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor's elements, rounded to `dtype` where they are of a floating-point type, none of them NaN or infinite."""
    for piece in tensor.reshape(-1).split(PIECE):
        if _kernels and (tensor.dtype, dtype) == (torch.float32, torch.bfloat16):
            source, piece = piece, torch.empty(len(piece), dtype=dtype)
            if not _kernels.round_to_bf16(source.data_ptr(), len(piece), piece.data_ptr()):
                require_finite(name, piece)
        else:
            piece = piece.to(dtype) if tensor.is_floating_point() else piece
            require_finite(name, piece)
        yield name, piece
