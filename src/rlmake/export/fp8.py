"""Blockwise FP8, the layout of DeepSeek-V3 releases: e4m3 weights, one fp32 scale per block of 128 × 128 (of 64 × 64
where a model's widths are multiples of 64 only, or no engine could serve it).

For a block with largest magnitude `amax`: `s = max(amax / 448, 1e-12)`, `q = e4m3(clamp(w / s, ±448))`. The scale is
stored as `<name>_scale_inv` and is multiplied to dequantise (https://arxiv.org/abs/2412.19437, section 3.3).
"""

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from loguru import logger

from rlmake.core.errors import UserError
from rlmake.export import assets, bf16, experts
from rlmake.export.sources import DirectorySource, Spec
from rlmake.export.staging import staged
from rlmake.export.writer import MAX_SHARD, PIECE, Make, Rule, _kernels, checked, require_finite, same, write_model

E4M3_MAX, MIN_SCALE, BLOCK = 448.0, 1e-12, 128
SMALL_BLOCK = 64
TILE = 1024  # columns that torch quantises at a time
# A weight whose name contains one of these stays as it is.
KEPT = (
    "norm", "embed", "lm_head", "shared_expert_gate", "in_proj_a", "in_proj_b", "eh_proj", "weights_proj", "visual.",
    "router",
)  # fmt: skip
# Engines put these in front of another weight, in one matrix: a block must not lie across the seam.
MERGED = (".q_proj.weight", ".k_proj.weight", ".gate_proj.weight")
LARGE = 2**20  # elements from which a stacked tensor that stays unquantised is worth a warning


def is_quantized(name: str, spec: Spec) -> bool:
    """Weights of linear layers, stacked experts among them: not norms, embeddings, the head, routers and gates, nor a
    vision tower."""
    return (
        ((name.endswith(".weight") and len(spec.shape) == 2) or experts.is_stacked(name, spec))
        and spec.dtype.is_floating_point
        and spec.dtype.itemsize > 1
        and not name.endswith(".gate.weight")
        and not any(part in name for part in KEPT)
    )


def block_of(tensors: dict[str, Spec]) -> int:
    """The edge of a model's blocks: 128, or 64 where only that divides the widths that engines need divided.

    Those are the columns of every quantised weight (an input is quantised in groups as wide as a block) and the rows of
    all but the last of the weights that engines merge. Where neither divides them: 128, and vLLM refuses the model.
    """
    sizes = [spec.shape[-1] for name, spec in tensors.items() if is_quantized(name, spec)]
    sizes += [spec.shape[-2] for name, spec in tensors.items() if is_quantized(name, spec) and name.endswith(MERGED)]
    return next((block for block in (BLOCK, SMALL_BLOCK) if all(size % block == 0 for size in sizes)), BLOCK)


def quantize_block(weight: torch.Tensor, block: int = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """`weight` [rows, cols] → e4m3 [rows, cols] and fp32 scales [⌈rows/block⌉, ⌈cols/block⌉]. Edges count as zeros.

    It is rounded to bf16 beforehand. NaN or infinity in it shows in the scales.

    Of a stack [experts, rows, cols] each matrix has blocks of its own, and the results are stacked.
    """
    if weight.dim() == 3:
        parts = [quantize_block(matrix, block) for matrix in weight]
        return torch.stack([q for q, _ in parts]), torch.stack([scale for _, scale in parts])
    if _kernels is None:
        return quantize_torch(weight, block)
    if weight.dtype not in (torch.float32, torch.bfloat16) or weight.stride(1) != 1:
        weight = weight.to(torch.bfloat16).contiguous()
    q, scale = _empty(weight, block)
    _kernels.quantize(
        weight.data_ptr(), weight.itemsize, weight.stride(0), *weight.shape, block, q.data_ptr(), scale.data_ptr()
    )
    return q, scale


def _empty(weight: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    grid = [-(-size // block) for size in weight.shape]
    return torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(grid)


def quantize_torch(weight: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_block` of one matrix where its C is not there, and what that is tested against: the same bytes."""
    (rows, cols), (q, scale) = weight.shape, _empty(weight, block)
    width = min(scale.shape[1], max(1, TILE // block)) * block
    # A few blocks at a time stay in the processor's cache. Magnitudes are compared as integers: their order is the
    # same, NaN above infinity, and they are half as wide.
    rounded, panel = torch.zeros(block, width, dtype=torch.bfloat16), torch.empty(block, width)
    bits = rounded.view(torch.int16)
    magnitudes = torch.empty_like(bits)
    for top, left in product(range(0, rows, block), range(0, cols, width or 1)):
        place = slice(top, top + block), slice(left, left + width)
        part = weight[place]
        if part.shape != rounded.shape:
            rounded.zero_()
        inside = slice(part.shape[0]), slice(part.shape[1])
        rounded[inside] = part
        largest = torch.bitwise_and(bits, 0x7FFF, out=magnitudes).amax(0).view(-1, block).amax(1).view(torch.bfloat16)
        factors = (largest.float() / E4M3_MAX).clamp_(min=MIN_SCALE)
        # At most 448 and half a last place, which becomes 448.
        torch.div(rounded.view(block, -1, block), factors[:, None], out=panel.view(block, -1, block))
        q[place] = panel[inside]
        scale[top // block, left // block : (left + width) // block] = factors[: -(-part.shape[1] // block)]
    return q, scale


def rules(edge: Callable[[], int], rule: Rule, make: Make) -> tuple[Rule, Make]:
    """Quantise, and apply the given `rule` and `make` to what stays: types and shapes beforehand, and then the tensors.

    `edge` of the blocks is asked when the first tensor comes.
    """

    def fp8_rule(name: str, spec: Spec) -> dict[str, Spec]:
        if not is_quantized(name, spec):
            return rule(name, spec)
        grid = (*spec.shape[:-2], *(-(-size // edge()) for size in spec.shape[-2:]))
        return {name: Spec(torch.float8_e4m3fn, spec.shape), f"{name}_scale_inv": Spec(torch.float32, grid)}

    def fp8_make(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        if not is_quantized(name, Spec(tensor.dtype, tuple(tensor.shape))):
            yield from make(name, tensor)
            return
        block = edge()
        rows = max(1, PIECE // max(1, block * tensor.shape[-1])) * block  # whole rows of blocks
        scales = []
        for part in (part for matrix in tensor[None].flatten(0, -3) for part in matrix.split(rows)):
            q, scale = quantize_block(part, block)
            scales.append(scale)
            yield name, q
        scale = torch.cat(scales)
        require_finite(name, scale)
        yield f"{name}_scale_inv", scale

    return fp8_rule, fp8_make


def settings(tensors: dict[str, Spec], block: int, where: Path) -> dict[str, Any]:
    """The `quantization_config` of config.json; raises `UserError` when nothing would be quantised."""
    if any(spec.dtype.itemsize == 1 and spec.dtype.is_floating_point for spec in tensors.values()):
        raise UserError(f"{where}: is FP8 already")
    quantized = [name for name, spec in tensors.items() if is_quantized(name, spec)]
    if not quantized:
        raise UserError(f"{where}: holds no weight that FP8 applies to")
    for name, spec in tensors.items():
        if len(spec.shape) > 2 and spec.numel >= LARGE and not is_quantized(name, spec):
            logger.warning(f"{name} {list(spec.shape)} has more than two axes and stays bf16")
    kept = {name for name, spec in tensors.items() if name.endswith(".weight") and len(spec.shape) == 2}
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [block, block],
        "modules_to_not_convert": sorted(name.removesuffix(".weight") for name in kept - set(quantized)),
    }


def quantize(source: Path, out: Path | None = None, *, block: int | None = None) -> dict[str, Any]:
    """A bf16 directory becomes an FP8 one (default `<source>-FP8`), shard by shard under the same names.

    `block`: the edge of its blocks, by default as `block_of` says.
    """
    out = out or source.with_name(f"{source.name}-FP8")
    model = DirectorySource(source)
    if "quantization_config" in model.config:
        raise UserError(f"{source}: is quantised already ({model.config['quantization_config'].get('quant_method')})")
    edge = block or block_of(model.tensors)
    table = settings(model.tensors, edge, source)
    rule, make = rules(lambda: edge, same, checked)
    outputs = {name: rule(name, spec) for name, spec in model.tensors.items()}
    with staged(out) as temporary:
        facts = write_model(temporary, model, model.shards, outputs, make)
        assets.copy_all(source, temporary)
        assets.write_config(temporary, model.config, quantization_config=table)
    return {"format": "fp8", **facts}


def export(
    checkpoint: Path, out: Path, *, block: int | None = None, max_shard: int = MAX_SHARD, trust: bool = False
) -> dict[str, Any]:
    """A checkpoint becomes an FP8 directory with no bf16 copy on disk.

    Weights are rounded to bf16 before they are quantised, so the result is the same as by way of a bf16 export.
    """
    edge = block or BLOCK
    rule, make = rules(lambda: edge, bf16.rule, bf16.make)

    def changes(tensors: dict[str, Spec]) -> dict[str, Any]:
        nonlocal edge
        edge = block or block_of(tensors)
        return {"quantization_config": settings(tensors, edge, checkpoint)}

    return bf16.export_with(checkpoint, out, "fp8", rule, make, max_shard, trust, changes)
