"""Stacked experts: transformers trains all experts of a layer as one 3-D tensor, releases hold each by itself.

    ….mlp.experts.gate_up_proj [E, 2I, H]  →  ….mlp.experts.<e>.gate_proj.weight [I, H], …up_proj.weight [I, H]
    ….mlp.experts.down_proj    [E, H, I]   →  ….mlp.experts.<e>.down_proj.weight [H, I]

Servers and transformers read the layout of releases; in FP8 each expert then has blocks of its own.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch

from rlmake.export.sources import Spec
from rlmake.export.writer import Make, Rule

# Families whose gate and up projection lie one after the other (others interleave or transpose them).
FAMILIES = ("qwen2_moe", "qwen3_moe")
STACKED = re.compile(r"(?P<stem>.+\.experts)\.(?P<part>gate_up_proj|down_proj)")


def is_stacked(name: str, spec: Spec) -> bool:
    """Whether a tensor holds the experts of a layer, whatever the family."""
    return len(spec.shape) == 3 and ".experts." in name and name.removesuffix(".weight").endswith("_proj")


def names(name: str, spec: Spec, config: dict[str, Any]) -> dict[str, Spec]:
    """`{name: spec}` of what a tensor of a checkpoint is called outside: itself, or each expert's matrices."""
    match = STACKED.fullmatch(name)
    if config.get("model_type") not in FAMILIES or match is None or len(spec.shape) != 3:
        return {name: spec}
    count, rows, cols = spec.shape
    parts = ("gate_proj", "up_proj") if match["part"] == "gate_up_proj" else ("down_proj",)
    shape = (rows // len(parts), cols)
    return {
        f"{match['stem']}.{expert}.{part}.weight": Spec(spec.dtype, shape) for expert in range(count) for part in parts
    }


def apart(config: dict[str, Any], rule: Rule, make: Make) -> tuple[Rule, Make]:
    """The same rule and conversion, applied to each expert's matrices by themselves."""

    def split_rule(name: str, spec: Spec) -> dict[str, Spec]:
        return {out: s for piece, part in names(name, spec, config).items() for out, s in rule(piece, part).items()}

    def split_make(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        parts = list(names(name, Spec(tensor.dtype, tuple(tensor.shape)), config))
        if parts == [name]:
            yield from make(name, tensor)
            return
        matrices = tensor.reshape(len(parts), -1, tensor.shape[-1])  # rows of gate, then of up, expert by expert
        for part, matrix in zip(parts, matrices, strict=True):
            yield from make(part, matrix)

    return split_rule, split_make
