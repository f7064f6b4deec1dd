"""Streaming safetensors: sizes are known before the first byte, so tensors go to their place as they come.

Groups of tensors are loaded and converted by a few threads, each operation by one of them (large tensors split over
threads cost more in waiting than they gain), while others are written, and the disk is told at once what to write back.
"""

import ctypes
import json
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rlmake.core.errors import UserError
from rlmake.core.jsonio import write_json
from rlmake.export.sources import INDEX, SINGLE, TYPES, Source, Spec

MAX_SHARD = 5 * 10**9  # bytes
GROUP = 64 * 2**20  # bytes of source tensors loaded at a time, at least one tensor
WORKERS = min(4, os.cpu_count() or 1)  # threads that load and convert; as many groups and one more are in memory
START_WRITING = 2  # SYNC_FILE_RANGE_WRITE of <linux/fs.h>
NAMES = {dtype: name for name, dtype in TYPES.items()}

# One source tensor's outputs: `rule(name, spec) -> {name: spec}` before, `make(name, tensor) -> {name: tensor}` then.
Rule = Callable[[str, Spec], dict[str, Spec]]
Make = Callable[[str, torch.Tensor], dict[str, torch.Tensor]]


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
    weight_map: dict[str, str] = {}
    total = parameters = 0
    with _workers() as pool:
        for file, names in shards.items():
            specs = {out: spec for name in names for out, spec in outputs[name].items()}
            if not specs:
                continue
            write_shard(folder / file, specs, _made(pool, source, names, make))
            weight_map |= dict.fromkeys(specs, file)
            total += sum(spec.nbytes for spec in specs.values())
            parameters += sum(spec.numel for out, spec in specs.items() if not out.endswith("_scale_inv"))
    files = sorted(set(weight_map.values()))
    if index and files != [SINGLE]:
        ordered = {name: weight_map[name] for name in sorted(weight_map)}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": ordered})
    return {"tensors": len(weight_map), "parameters": parameters, "bytes": total, "shards": files}


def write_shard(path: Path, specs: dict[str, Spec], tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """One safetensors file. Wider types come first, so that every tensor is aligned to its own type."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    places = {}
    for name, spec in sorted(specs.items(), key=lambda item: (-item[1].dtype.itemsize, natural(item[0]))):
        header[name] = {
            "dtype": NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        places[name] = offset
        offset += spec.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        start = file.tell()
        for name, tensor in tensors:
            if Spec(tensor.dtype, tuple(tensor.shape)) != specs[name]:
                raise ValueError(f"{name}: {tensor.dtype} {tuple(tensor.shape)}, expected {specs[name]}")
            place = start + places.pop(name)
            file.seek(place)
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            if specs[name].nbytes >= 2**20:
                file.flush()
                _start_writing(file.fileno(), place, specs[name].nbytes)
        if places:
            raise ValueError(f"{path}: {len(places)} tensors were never written, {min(places)} among them")
        file.flush()
        os.fsync(file.fileno())


def groups(source: Source, names: Sequence[str], size: int = GROUP) -> Iterator[list[str]]:
    """Names cut into groups of about `size` bytes, at least one tensor each."""
    group: list[str] = []
    held = 0
    for name in names:
        nbytes = source.tensors[name].nbytes
        if group and held + nbytes > size:
            yield group
            group, held = [], 0
        group.append(name)
        held += nbytes
    if group:
        yield group


@contextmanager
def _workers() -> Iterator[ThreadPoolExecutor]:
    """The threads that load and convert, in each of which torch uses that thread alone."""
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(WORKERS, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            yield pool
        finally:
            torch.set_num_threads(threads)


def _made(
    pool: ThreadPoolExecutor, source: Source, names: Sequence[str], make: Make
) -> Iterator[tuple[str, torch.Tensor]]:
    """Load, check and convert group by group, in order; while one is written the next are on their way."""

    def load(group: list[str]) -> list[tuple[str, torch.Tensor]]:
        loaded = source.load(group)
        return [item for name in group for item in make(name, loaded.pop(name)).items()]

    pending = deque()
    try:
        for group in groups(source, names):
            pending.append(pool.submit(load, group))
            if len(pending) > WORKERS:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()


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


def checked(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    require_finite(name, tensor)
    return {name: tensor}
