"""A blockwise FP8 release becomes bf16: `w = q · s` in fp32, rounded once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rlmake.core.errors import UserError
from rlmake.export import assets
from rlmake.export.fp8 import BLOCK
from rlmake.export.sources import DirectorySource, Spec
from rlmake.export.staging import staged
from rlmake.export.writer import PIECE, checked, write_model

SCALE = "_scale_inv"


def dequantize_block(q: torch.Tensor, scale: torch.Tensor, block: tuple[int, int] = (BLOCK, BLOCK)) -> torch.Tensor:
    """e4m3 `q` [..., rows, cols] and scales [..., ⌈rows/b0⌉, ⌈cols/b1⌉] → bf16 [..., rows, cols]."""
    if q.dim() > 2:
        return torch.stack([dequantize_block(*pair, block) for pair in zip(q, scale, strict=True)])
    (rows, cols), (high, wide) = q.shape, block
    table = torch.arange(256, dtype=torch.uint8).view(q.dtype).float()  # looked up three times faster than converted
    out = torch.empty(rows, cols, dtype=torch.bfloat16)
    for i in range(0, rows, high):  # one row of blocks at a time stays in the processor's cache
        codes = q[i : i + high].view(torch.uint8).reshape(-1).int()
        factors = scale[i // high].float().repeat_interleave(wide)[:cols]
        out[i : i + high] = table.index_select(0, codes).view(-1, cols).mul_(factors)
    return out


def export(source: Path, out: Path | None = None) -> dict[str, Any]:
    """Write the bf16 directory (default `<source>-BF16`), shard by shard under the same names. Returns facts."""
    out = out or source.with_name(f"{source.name}-BF16")
    model = DirectorySource(source)
    block = _block(model, source)
    quantized = {name for name, spec in model.tensors.items() if _is_fp8(spec)}
    if not quantized:
        raise UserError(f"{source}: holds no FP8 weight")
    for name in sorted(quantized):
        _check_scale(model, name, block, source)

    def rule(name: str, spec: Spec) -> dict[str, Spec]:
        if name.endswith(SCALE):
            return {}
        return {name: Spec(torch.bfloat16, spec.shape) if name in quantized else spec}

    def make(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        if name not in quantized:
            yield from checked(name, tensor)
            return
        scale = model.load([name + SCALE])[name + SCALE]  # it may lie in another shard
        high = max(1, PIECE // max(1, block[0] * tensor.shape[-1]))  # rows of blocks
        for matrix, factors in zip(*(stack[None].flatten(0, -3) for stack in (tensor, scale)), strict=True):
            for q, s in zip(matrix.split(high * block[0]), factors.split(high), strict=True):
                yield from checked(name, dequantize_block(q, s, block))

    outputs = {name: rule(name, spec) for name, spec in model.tensors.items()}
    shards = {file: [name for name in names if outputs[name]] for file, names in model.shards.items()}
    with staged(out) as temporary:
        facts = write_model(temporary, model, shards, outputs, make)
        assets.copy_all(source, temporary)
        assets.write_config(temporary, _plain(model.config))
    return {"format": "bf16", **facts}


def _block(model: DirectorySource, source: Path) -> tuple[int, int]:
    """The block size that config.json states, in its top or its text table; 128 × 128 when it states none."""
    for table in (model.config, model.config.get("text_config") or {}):
        settings = table.get("quantization_config") or {}
        if settings.get("scale_fmt") == "ue8m0":
            raise UserError(f"{source}: scales of type ue8m0 are not supported")
        if (size := settings.get("weight_block_size")) is not None:
            if not isinstance(size, list) or len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
                raise UserError(
                    f"{source / 'config.json'}: weight_block_size is {size}, expected two positive integers"
                )
            return size[0], size[1]
    return BLOCK, BLOCK


def _is_fp8(spec: Spec) -> bool:
    return spec.dtype.is_floating_point and spec.dtype.itemsize == 1


def _check_scale(model: DirectorySource, name: str, block: tuple[int, int], source: Path) -> None:
    spec, scale = model.tensors[name], model.tensors.get(name + SCALE)
    if scale is None:
        raise UserError(f"{source}: {name} has no {name + SCALE} beside it")
    if len(spec.shape) < 2:
        raise UserError(f"{source}: {name} {list(spec.shape)} is FP8, but no matrix: it has no blocks")
    *stack, rows, cols = spec.shape
    expected = (*stack, -(-rows // block[0]), -(-cols // block[1]))
    if scale.shape != expected:
        raise UserError(f"{source}: {name + SCALE} has shape {list(scale.shape)}, expected {list(expected)}")


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration without `quantization_config`, wherever it stands."""
    return {
        key: _plain(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key != "quantization_config"
    }
