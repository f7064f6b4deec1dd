"""Writing the policy's weights as safetensors under their Hugging Face names, for the engines."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

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
        value = p.detach().to(dtype)
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        if folder is None:
            continue
        if sum(tensor.nbytes for tensor in shard.values()) + whole.nbytes > SHARD_BYTES:
            flush()
        shard[name] = whole.cpu().contiguous()
    flush()
