"""Writing the policy's weights, or its adapter, as safetensors for the engines."""

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import torch
from blake3 import blake3
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlmake.models import layout, lora
from rlmake.transport.collective import Plan, buckets, plan_of

SHARD_BYTES = 128 << 20  # page-locked memory is taken in powers of two
WRITERS = 8  # files in memory at a time
Content = tuple[list[memoryview], Callable[[], None]]


def write_weights(
    named: list[tuple[str, nn.Parameter]],
    folder: Path | None,
    dtype: torch.dtype,
    seconds: dict[str, float] | None = None,
) -> dict[str, str]:
    """Gather every parameter and, where `folder` is not None, write it there as `dtype`; every rank calls it.

    Files `model-<k>.safetensors` of 128 MiB at most (or one tensor); a tied head is not written. Each is written from
    memory, and hashed there, while the next ones are gathered. Returns the hashes; `seconds` gets what the parts
    took: `gather`, `finish` (what is left to do then), and of the threads together `copy`, `write` and `hash`.
    """
    if folder is None:
        for _, p in named:
            whole(p, dtype)
        return {}
    seconds = {} if seconds is None else seconds
    seconds |= dict.fromkeys(("gather", "finish", "copy", "write", "hash"), 0.0)
    begun, files, parameters = time.perf_counter(), {}, iter(named)
    with ThreadPoolExecutor(WRITERS) as pool:
        for number, bucket in enumerate(buckets(plan_of(named), dtype.itemsize, SHARD_BYTES), 1):
            if len(busy := [file for file in files.values() if not file.done()]) >= WRITERS:
                wait(busy, return_when=FIRST_COMPLETED)
            name = f"model-{number:05d}.safetensors"
            files[name] = pool.submit(_write, folder / name, *_content(bucket, parameters, dtype))
        gathered = time.perf_counter()
    hashes = {}
    for name, file in files.items():
        hashes[name], parts = file.result()
        for part, took in parts.items():
            seconds[part] += took
    seconds |= {"gather": gathered - begun, "finish": time.perf_counter() - gathered}
    return hashes


def _content(bucket: Plan, parameters: Iterator[tuple[str, nn.Parameter]], dtype: torch.dtype) -> Content:
    """What a safetensors file holds, part by part, and what must have returned before it is read.

    Takes the parameters of `bucket`, which come next. From a GPU they are being copied into page-locked memory; in host
    memory they stay where they are.
    """
    head, _ = layout.header({entry["name"]: (dtype, entry["shape"]) for entry in bucket})
    sizes = [math.prod(entry["shape"]) * dtype.itemsize for entry in bucket]
    parts, image, at = [memoryview(head)], None, 0
    for size in sizes:
        value = whole(next(parameters)[1], dtype)
        if _elsewhere(value):
            if image is None:
                image = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=value.is_cuda)
                parts.append(_bytes(image))
            image[at : at + size].view(dtype).view(value.shape).copy_(value, non_blocking=True)
        else:
            parts.append(_bytes(value))
        at += size
    if value.is_cuda:
        return parts, torch.cuda.current_stream(value.device).record_event().synchronize
    return parts, lambda: None


def _elsewhere(tensor: Tensor) -> bool:
    return tensor.is_cuda


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def _write(path: Path, parts: list[memoryview], ready: Callable[[], None]) -> tuple[str, dict[str, float]]:
    """In a thread: the file, from memory. Its hash, and the seconds of the parts."""
    marks = [time.perf_counter()]
    ready()
    marks.append(time.perf_counter())
    with open(path, "wb", buffering=0) as file:
        for part in parts:
            at = 0
            while at < len(part):
                at += file.write(part[at:])
    marks.append(time.perf_counter())
    hasher = blake3(max_threads=blake3.AUTO)
    for part in parts:
        hasher.update(part)
    marks.append(time.perf_counter())
    return hasher.hexdigest(), {part: marks[at + 1] - marks[at] for at, part in enumerate(("copy", "write", "hash"))}


def write_adapter(
    named: list[tuple[str, nn.Parameter]], adapter: lora.Adapter, folder: Path | None, dtype: torch.dtype
) -> None:
    """Gather the adapter's parameters and, where `folder` is not None, write it there in PEFT's layout, as `dtype`."""
    tensors = {f"{lora.FILE_PREFIX}{name}": whole(p, dtype).cpu().contiguous() for name, p in named}
    if folder is not None:
        save_file(tensors, folder / lora.WEIGHTS, metadata={"format": "pt"})
        lora.write_config(adapter, folder)


def whole(p: nn.Parameter, dtype: torch.dtype) -> Tensor:
    """A parameter as `dtype`, gathered from its ranks."""
    value = p.detach().to(dtype)
    if not isinstance(value, DTensor):
        return value
    return value.to(value.device_mesh.device_type).full_tensor()  # with fsdp_cpu_offload it is in host memory
