"""Context parallelism, Ulysses (https://arxiv.org/abs/2309.14509): the ranks of a group share one row of tokens.

Each rank has an equal, contiguous piece of the row. Before attention the pieces are exchanged so that every rank has
the whole row for a part of the heads, behind it they are exchanged back; nothing else of the model notices.
T tokens of the row, S ranks of the group, H heads.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from rlmake.models.packing import up
from rlmake.trainer.batch import PackedRow


class _Exchange(torch.autograd.Function):
    """all-to-all of S equal parts along the first axis; its gradient goes the same way."""

    @staticmethod
    def forward(ctx, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _all_to_all(grad, ctx.group), None


def _all_to_all(parts: Tensor, group: Any) -> Tensor:
    parts = parts.contiguous()
    found = torch.empty_like(parts)
    dist.all_to_all_single(found, parts, group=group)
    return found


@dataclass(frozen=True)
class Ulysses:
    """The group of ranks that share a row."""

    group: Any
    rank: int
    size: int

    @torch.compiler.disable
    def to_heads(self, x: Tensor) -> Tensor:
        """[T/S, H, D] → [T, H/S, D]; heads are repeated first where S does not divide them."""
        repeats = self.size // math.gcd(x.shape[1], self.size)
        x = x.repeat_interleave(repeats, 1) if repeats > 1 else x
        tokens, heads, width = x.shape
        parts = x.view(tokens, self.size, heads // self.size, width).transpose(0, 1)
        return _Exchange.apply(parts, self.group).reshape(self.size * tokens, heads // self.size, width)

    @torch.compiler.disable
    def to_tokens(self, x: Tensor) -> Tensor:
        """[T, H/S, D] → [T/S, H, D]."""
        tokens, heads, width = x.shape
        parts = x.reshape(self.size, tokens // self.size, heads, width)
        return _Exchange.apply(parts, self.group).transpose(0, 1).reshape(-1, self.size * heads, width)

    def piece(self, row: PackedRow, multiple: int = 1) -> tuple[PackedRow, Tensor]:
        """This rank's piece of a row padded to a multiple of S, and which of its scored tokens [N] lie in it.

        `lens` stay those of the whole row, padding included in the last document.
        """
        length = up(len(row.input_ids), math.lcm(self.size, multiple))
        padding = length - len(row.input_ids)
        ids, positions = F.pad(row.input_ids, (0, padding)), F.pad(row.position_ids, (0, padding))
        first, count = self.rank * (length // self.size), length // self.size
        inside = (row.at >= first) & (row.at < first + count)
        chosen = inside.nonzero()[:, 0] if inside.any() else torch.zeros(1, dtype=torch.int64)
        piece = PackedRow(
            input_ids=ids[first : first + count],
            position_ids=positions[first : first + count],
            lens=[*row.lens[:-1], row.lens[-1] + padding],
            at=(row.at[chosen] - first).clamp(0, count - 1),
            targets=row.targets[chosen],
            temperatures=None if row.temperatures is None else row.temperatures[chosen],
            empty=row.empty or not bool(inside.any()),
        )
        return piece, chosen
