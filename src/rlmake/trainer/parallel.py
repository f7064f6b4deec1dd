"""How a model is spread over the ranks and made fast, from outside, block by block: recomputation → compile →
offloading of what is kept → FSDP2.

On GPUs that each hold a whole copy nothing is sharded (`masters`): FSDP's copies, hooks and a sum of gradients for each
micro-batch would cost there and bring nothing.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from rlmake.trainer.activations import Offloading
from rlmake.trainer.families import Plan
from rlmake.trainer.masters import Masters
from rlmake.trainer.policy import SHAPES
from rlmake.trainer.recompute import recompute
from rlmake.trainer.world import World

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def parallelise(root: nn.Module, plan: Plan, model: nn.Module, config: Any, world: World) -> Masters | None:
    """Apply `config` (`trainer.model`) to `root`, which holds `model`; the masters where its weights are only copies.

    Gradients are summed over ranks, not averaged.
    """
    blocks = plan.blocks(model)
    mode = config.ac and config.ac.mode
    if mode == "selective":
        recompute(root, blocks, config.ac)
    whole = world.unsharded and not config.fsdp_cpu_offload
    masters = _masters(root, config, world) if whole else None
    if config.compile is not None:
        # Blocks share their code: each length of rows counts, with and without gradients; beyond the limit torch would
        # silently stop compiling.
        torch._dynamo.config.recompile_limit = 4 * SHAPES
        for block in blocks:
            block.compile(fullgraph=config.compile.fullgraph, dynamic=False)
    if mode == "full":
        recompute(root, blocks, config.ac)
    if config.ac_offloading is not None:
        Offloading(config.ac_offloading, world.device).apply(blocks)
    if not whole:
        _shard(root, blocks, config, world)
    return masters


def _masters(root: nn.Module, config: Any, world: World) -> Masters:
    copies = world.mesh["dp_replicate"].get_group()
    return Masters(root.to(world.device), DTYPES[config.compute_dtype], DTYPES[config.reduce_dtype], copies)


def _shard(root: nn.Module, blocks: list[nn.Module], config: Any, world: World) -> None:
    """Each block is a unit of its own; embedding, last norm and head belong to the root."""
    compute, reduce = DTYPES[config.compute_dtype], DTYPES[config.reduce_dtype]
    pinned = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
    offload = pinned if config.fsdp_cpu_offload else OffloadPolicy()
    options = {
        "mesh": world.mesh if world.mesh["dp_replicate"].size() > 1 else world.mesh["dp_shard"],
        "offload_policy": offload,
    }
    reshard = config.reshard_after_forward and world.mesh["dp_shard"].size() > 1
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)
    for block in blocks:
        fully_shard(block, mp_policy=policy, reshard_after_forward=reshard, **options)
    # The root's own inputs are ids and temperatures: temperatures must not be rounded to the compute type.
    root_policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False)
    fully_shard(root, mp_policy=root_policy, reshard_after_forward=False, **options)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # Neither call is recursive. The loss is divided by its global count, so a plain sum is the gradient.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def flops_per_token(plan: Plan, config: Any, mean_context: float) -> float:
    """FLOPs of forward and backward of one token: `6·P + 12·Σ heads·head_dim·context` (spec 3.6), no recomputation.

    `mean_context`: mean length of the documents; causality is not counted as a saving, as is the convention.
    """
    return 6.0 * plan.active_parameters(config) + 12.0 * plan.attention_width(config) * mean_context


PEAKS = (
    ("GB200", 2.5e15), ("GB300", 2.5e15), ("B200", 2.25e15), ("B300", 2.25e15), ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12), ("H100", 989e12), ("H200", 989e12), ("MI300X", 1307.4e12), ("MI325X", 1307.4e12),
    ("A100", 312e12),
)  # fmt: skip


def peak_flops(device: torch.device) -> float | None:
    """bf16 peak of the device in FLOP/s (makers' data sheets), 312e12 for an unknown GPU; None on a CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS if part in name), 312e12)
