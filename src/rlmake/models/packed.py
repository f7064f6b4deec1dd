"""Document-causal attention of the ordinary mode: a packed row in which no token sees another document.

On a GPU in bf16 or fp16 it is the operator of `varlen`, elsewhere one causal SDPA call per bucket of documents of like
length. `exact` is its deterministic fp32 sister; both take the same row.

T tokens of a flat row, H query heads, G key-value heads, D head width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from rlmake.core.errors import UserError
from rlmake.models import varlen
from rlmake.models.packing import Plan

NAME = "rlmake_packed"
DOCUMENTS = 1024


@dataclass(frozen=True)
class Row:
    """What the attention needs to know of a packed row.

    `exchange`, for rows of which every rank has a piece: `(to_heads, to_tokens)`, see `trainer.context`.
    """

    lens: Tensor | None  # int64 [up(documents, 1024)], on the CPU: lengths, then zeros
    offsets: Tensor | None  # int32, one more, on a GPU: where each document starts, then the end of the last
    plan: Plan | None  # how documents are batched elsewhere
    exchange: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] | None = None

    @classmethod
    def of(cls, lens: Sequence[int], device: torch.device, dtype: torch.dtype, exchange=None) -> "Row":
        """`dtype`: of queries, keys and values."""
        if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
            return cls(None, None, Plan.of(lens, device), exchange)
        # Of one size for (nearly) all rows: a compiled block is compiled again for each size that it meets.
        padded = torch.tensor([*lens, *[0] * (-len(lens) % DOCUMENTS)])
        offsets = F.pad(padded.cumsum(0), (1, 0)).to(torch.int32)
        return cls(padded, offsets.pin_memory().to(device, non_blocking=True), None, exchange)


def attend(module: nn.Module, query, key, value, attention_mask, scaling=None, context=None, **kwargs):
    """transformers' attention function: query [1, H, T, D], key and value [1, G, T, D] → ([1, T, H, D], None)."""
    if context is None:
        raise ValueError(f"the attention {NAME} needs the row's documents: call it through models.packed")
    if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None or kwargs.get("sliding_window"):
        raise UserError(f"packed attention knows no soft caps, sinks or sliding windows ({type(module).__name__})")
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if context.exchange is not None:
        q, k, v = (context.exchange[0](tensor) for tensor in (q, k, v))
    if context.plan is None:
        out = varlen.attention(q, k, v, context.offsets, context.lens, scaling)
    else:
        out = _bucketed(q, k, v, scaling, context.plan)
    return (out if context.exchange is None else context.exchange[1](out))[None], None


@torch.compiler.disable
def _bucketed(query, key, value, scaling: float, plan: Plan) -> Tensor:
    """query [T, H, D], key and value [T, G, D] → [T, H, D]. Outside of compiled graphs: each row has other shapes."""
    outputs = []
    for bucket in plan.buckets:
        indices = bucket.queries  # keys behind the queries would only be masked away
        q, k, v = (tensor[indices].transpose(1, 2) for tensor in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        outputs.append(out.transpose(1, 2).reshape(indices.numel(), *query.shape[1:]))
    return torch.cat(outputs)[plan.back]


AttentionInterface.register(NAME, attend)


def compute_type(model: nn.Module) -> torch.dtype:
    """The type of the products inside the forward pass: that of the weights, as FSDP has cast them by then."""
    return model.get_input_embeddings().weight.dtype


def packed_forward(
    model: nn.Module, input_ids: Tensor, position_ids: Tensor, lens: Sequence[int], row: Row | None = None
) -> Tensor:
    """Hidden states [T, hidden] of a packed row: input_ids and position_ids [1, T], document lengths that sum to T.

    `row`: given where this rank has but a piece of it, whose tokens the ids are. Under FSDP call it inside the forward
    of the root module, since it uses the backbone and not the head.
    """
    if row is None:
        if sum(lens) != input_ids.shape[1]:
            raise ValueError(f"document lengths sum to {sum(lens)}, the row has {input_ids.shape[1]} tokens")
        row = Row.of(lens, input_ids.device, compute_type(model))
    backbone = getattr(model, model.base_model_prefix)
    output = backbone(input_ids=input_ids, position_ids=position_ids, use_cache=False, context=row)
    return output.last_hidden_state[0]
