"""The global gradient norm over all shards, and clipping to it."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlmake.trainer.world import World


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a distributed tensor, or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def clip(parameters: Iterable[nn.Parameter], max_norm: float | None, world: World) -> float:
    """Scale all gradients by min(1, max_norm / ‖g‖₂) and return ‖g‖₂ before that; NaN or inf is returned, not applied.

    Each shard's square is summed in float64 and over the ranks that hold different shards.
    """
    grads = [local(p.grad) for p in parameters if p.grad is not None]
    norms = torch.stack(torch._foreach_norm(grads)).double() if grads else torch.zeros(1, dtype=torch.float64)
    norm = math.sqrt(total) if (total := world.sum_over_shards(norms.square().sum()).item()) >= 0 else math.nan
    if max_norm is not None and math.isfinite(norm) and norm > max_norm:
        torch._foreach_mul_(grads, max_norm / norm)
    return norm
