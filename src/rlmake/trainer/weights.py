"""Writing the policy's weights, or its adapter, as safetensors for the engines."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlmake.models import lora

SHARD_BYTES = 4 << 30


def write_weights(named: list[tuple[str, nn.Parameter]], folder: Path | None, dtype: torch.dtype) -> None:
    """Gather every parameter and, where `folder` is not None, write it there as `dtype`; every rank calls it.

    Files `model-<k>.safetensors` of at most 4 GiB (or one tensor); a tied head is not written.
    """
    shard: dict[str, Tensor] = {}
    count = 0

    def flush() -> None:
        nonlocal count
        if folder is not None and shard:
            count += 1
            save_file(shard, folder / f"model-{count:05d}.safetensors", metadata={"format": "pt"})
        shard.clear()

    for name, p in named:
        value = whole(p, dtype)
        if folder is None:
            continue
        if sum(tensor.nbytes for tensor in shard.values()) + value.nbytes > SHARD_BYTES:
            flush()
        shard[name] = value.cpu().contiguous()
    flush()


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
