"""Document-causal attention of the ordinary mode: a packed row in which no token sees another document.

On a GPU in bf16 or fp16 it is torch's variable-length flash attention, elsewhere one causal SDPA call per bucket of
documents of like length. `exact` is its deterministic fp32 sister; both take the same row.

T tokens of a flat row, H query heads, G key-value heads, D head width.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

from rlmake.core.errors import UserError
from rlmake.models.packing import Plan

NAME = "rlmake_packed"


@dataclass(frozen=True)
class Row:
    """What the attention needs to know of a packed row; `plan` or the prefix sums are made when they are first used."""

    lens: tuple[int, ...]
    device: torch.device
    made: dict = field(default_factory=dict)

    @property
    def plan(self) -> Plan:
        if "plan" not in self.made:
            self.made["plan"] = Plan.of(self.lens, self.device)
        return self.made["plan"]

    @property
    def offsets(self) -> torch.Tensor:
        """int32 [documents + 1]: where each document starts, and the end of the last."""
        if "offsets" not in self.made:
            sums = torch.tensor([0, *self.lens]).cumsum(0)
            self.made["offsets"] = sums.to(self.device, torch.int32)
        return self.made["offsets"]


def attend(module: nn.Module, query, key, value, attention_mask, scaling=None, context=None, **kwargs):
    """transformers' attention function: query [1, H, T, D], key and value [1, G, T, D] → ([1, T, H, D], None)."""
    if context is None:
        raise ValueError(f"the attention {NAME} needs the row's documents: call it through models.packed")
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None or kwargs.get("sliding_window"):
        raise UserError(f"packed attention knows no soft caps, sinks or sliding windows ({type(module).__name__})")
    flash = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    step = _varlen if flash else _bucketed
    return step(query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), scaling, context)[
        None
    ], None


def _bucketed(query, key, value, scaling: float, row: Row) -> torch.Tensor:
    """query [T, H, D], key and value [T, G, D] → [T, H, D]."""
    outputs = []
    for bucket in row.plan.buckets:
        indices = bucket.queries  # keys behind the queries would only be masked away
        q, k, v = (tensor[indices].transpose(1, 2) for tensor in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        outputs.append(out.transpose(1, 2).reshape(indices.numel(), *query.shape[1:]))
    return torch.cat(outputs)[row.plan.back]


def _varlen(query, key, value, scaling: float, row: Row) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    options = {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
    if "enable_gqa" in known:
        options["enable_gqa"] = True
    elif key.shape[1] != query.shape[1]:
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
    longest = max(row.lens)
    return varlen_attn(query, key, value, row.offsets, row.offsets, longest, longest, scale=scaling, **options)


AttentionInterface.register(NAME, attend)


def packed_forward(
    model: nn.Module, input_ids: torch.Tensor, position_ids: torch.Tensor, lens: Sequence[int]
) -> torch.Tensor:
    """Hidden states [T, hidden] of a packed row: input_ids and position_ids [1, T], document lengths that sum to T.

    Under FSDP call it inside the forward of the root module, since it uses the backbone and not the head.
    """
    if sum(lens) != input_ids.shape[1]:
        raise ValueError(f"document lengths sum to {sum(lens)}, the row has {input_ids.shape[1]} tokens")
    row = Row(tuple(lens), input_ids.device)
    backbone = getattr(model, model.base_model_prefix)
    output = backbone(input_ids=input_ids, position_ids=position_ids, use_cache=False, context=row)
    return output.last_hidden_state[0]
