"""Writing the policy's weights, or its adapter, as safetensors for the engines."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlmake.models import lora
from rlmake.transport import WeightSender, broadcast

SHARD_BYTES = 4 << 30


class Sender:
    """Offers a training's weights, or its adapter, to whoever serves them; every rank has one and calls it."""

    def __init__(self, training: Any):
        self.training = training
        self._handshake = WeightSender(training.ctx.run_dir, training.ctx) if training.world.master else None

    def send(self) -> None:
        """Broadcast `v{training.step}` and wait until the receiver has accepted it."""
        training, adapter = self.training, self.training.facts["lora"]
        dtype = torch.float32 if training.policy.exact else torch.bfloat16
        named = training.policy.named()

        def write(folder: Path | None) -> None:
            if adapter is None:
                write_weights(named, folder, dtype)
            else:
                write_adapter(named, lora.Adapter(**adapter), folder, dtype)

        broadcast(
            self._handshake,
            training.step,
            write,
            training.world.on_master,
            timeout=training.config.weight_broadcast.timeout,
            kind="full" if adapter is None else "adapter",
        )


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
        whole = _whole(p, dtype)
        if folder is None:
            continue
        if sum(tensor.nbytes for tensor in shard.values()) + whole.nbytes > SHARD_BYTES:
            flush()
        shard[name] = whole.cpu().contiguous()
    flush()


def write_adapter(
    named: list[tuple[str, nn.Parameter]], adapter: lora.Adapter, folder: Path | None, dtype: torch.dtype
) -> None:
    """Gather the adapter's parameters and, where `folder` is not None, write it there in PEFT's layout, as `dtype`."""
    tensors = {f"{lora.FILE_PREFIX}{name}": _whole(p, dtype).cpu().contiguous() for name, p in named}
    if folder is not None:
        save_file(tensors, folder / lora.WEIGHTS, metadata={"format": "pt"})
        lora.write_config(adapter, folder)


def _whole(p: nn.Parameter, dtype: torch.dtype) -> Tensor:
    value = p.detach().to(dtype)
    return value.full_tensor() if isinstance(value, DTensor) else value
