"""The plan by which a packed row of documents is attended: documents of like length in one batched call.

T tokens of the row, B documents of one bucket, R query rows and N key rows that a document is padded to.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

TILE = 16
"""Every flat row has a multiple of this many tokens: fewer rows make a BLAS choose other kernels, with other bytes."""
SHORT, LONG = 192, 512
"""Key rows are padded in steps of 16 or 32 up to SHORT, to multiples of LONG above it. MKL splits a product's inner
dimension above 192, and the attention kernel works in blocks of 512 keys; within these steps a sum has one order."""


def up(n: int, multiple: int = TILE) -> int:
    """`n` rounded up to a multiple."""
    return -(-n // multiple) * multiple


def key_rows(length: int) -> int:
    """Key rows that a document of `length` tokens is padded to: a fixed rule, so bytes depend on nothing else."""
    if length <= 64:
        return up(max(length, 1), 16)
    return up(length, 32) if length <= SHORT else up(length, LONG)


def query_rows(length: int) -> int:
    """How many query rows a document of `length` tokens is padded to."""
    return key_rows(length) if length <= SHORT else up(length, 64)


@dataclass(frozen=True)
class Bucket:
    """B documents padded to one shape. Padding points at the document's own first token: finite where it is finite."""

    queries: torch.Tensor  # [B, R] indices into the row
    keys: torch.Tensor  # [B, N] indices into the row


@dataclass(frozen=True)
class Plan:
    """Where each document's tokens lie, and where each token's result lies in the buckets' results laid end to end."""

    lens: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    back: torch.Tensor  # [T] indices into the concatenated [B * R] query rows

    @classmethod
    def of(cls, lens: Sequence[int], device: torch.device | str = "cpu") -> "Plan":
        """The plan of a row of documents of these lengths, one after the other. `ValueError` on an empty one."""
        if not lens or min(lens) < 1:
            raise ValueError(f"documents need at least one token each: {list(lens)}")
        lengths = torch.tensor(list(lens))
        starts = lengths.cumsum(0) - lengths
        shapes: dict[tuple[int, int], list[int]] = {}
        for index, length in enumerate(lens):
            shapes.setdefault((query_rows(length), key_rows(length)), []).append(index)
        buckets, back, offset = [], torch.empty(int(lengths.sum()), dtype=torch.long), 0
        for (rows, keys), members in sorted(shapes.items()):
            start, length = starts[members][:, None], lengths[members][:, None]
            inside = torch.arange(max(rows, keys))[None] < length
            indices = start + torch.arange(max(rows, keys)) * inside
            queries, inside = indices[:, :rows], inside[:, :rows]
            back[queries[inside]] = torch.arange(offset, offset + queries.numel()).view_as(queries)[inside]
            offset += queries.numel()
            buckets.append(Bucket(queries.contiguous().to(device), indices[:, :keys].contiguous().to(device)))
        return cls(tuple(lens), tuple(buckets), back.to(device))


def causal_bias(rows: int, keys: int, repeats: int = 1) -> torch.Tensor:
    """[1, 1, repeats · rows, keys] fp32 bias: 0 where key ≤ query, −inf elsewhere, the same for every repeat."""
    allowed = torch.ones(rows, keys, dtype=torch.bool).tril()
    return torch.zeros(rows, keys).masked_fill_(~allowed, float("-inf")).repeat(repeats, 1)[None, None]
