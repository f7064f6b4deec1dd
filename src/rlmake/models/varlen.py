"""Packed causal attention on a GPU as one operator, so that a compiled block stays one graph whatever a row holds.

Which kernel runs is decided per row, inside the operator: cuDNN's for a row of one document (nearly twice as fast
there), flash attention of variable length for a row of several, and in deterministic mode. The two are torch's own, by
the names that `torch.nn.functional.scaled_dot_product_attention` and `torch.nn.attention.varlen` call them by.
T tokens, H query heads, G key-value heads, D head width.
"""

import torch
from torch import Tensor

_aten = torch.ops.aten


def _dense(lens: Tensor) -> bool:
    return int(lens.count_nonzero()) == 1 and not torch.are_deterministic_algorithms_enabled()


def _trimmed(offsets: Tensor, lens: Tensor) -> tuple[Tensor, int]:
    """(offsets of the documents that there are, length of the longest)."""
    return offsets[: int(lens.count_nonzero()) + 1], int(lens.max())


def _heads_first(x: Tensor) -> Tensor:
    """[T, H, D] → [1, H, T, D]."""
    return x.transpose(0, 1)[None]


def _tokens_first(x: Tensor) -> Tensor:
    return x[0].transpose(0, 1).contiguous()


@torch.library.custom_op("rlmake::packed_attention", mutates_args=())
def _forward(
    query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, lens: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """([T, H, D], log-sum-exp [H, T]). `offsets` on the GPU and `lens` on the CPU as in `packed.Row`."""
    if _dense(lens):
        found = _aten._scaled_dot_product_cudnn_attention(
            _heads_first(query), _heads_first(key), _heads_first(value), None, True, 0.0, True, False, scale=scale
        )
        return _tokens_first(found[0]), found[1].reshape(query.shape[1], query.shape[0])
    offsets, longest = _trimmed(offsets, lens)
    found = _aten._flash_attention_forward(
        query, key, value, offsets, offsets, longest, longest, 0.0, True, False, scale=scale
    )
    return found[0].contiguous(), found[1]


@_forward.register_fake
def _(query, key, value, offsets, lens, scale):
    return query.new_empty(query.shape), query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)


@torch.library.custom_op("rlmake::packed_attention_backward", mutates_args=())
def _backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, offsets: Tensor, lens: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if _dense(lens):
        none = torch.zeros((), dtype=torch.int64, device=query.device)  # seed and offset of a dropout that there is not
        grads = _aten._scaled_dot_product_cudnn_attention_backward(
            _heads_first(grad), _heads_first(query), _heads_first(key), _heads_first(value), _heads_first(out),
            lse[None, ..., None], none, none, None, None, None, len(query), len(query), 0.0, True, scale=scale,
        )  # fmt: skip
        return tuple(_tokens_first(x) for x in grads)
    offsets, longest = _trimmed(offsets, lens)
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    grads = _aten._flash_attention_backward(
        grad, query, key, value, out, lse, offsets, offsets, longest, longest, 0.0, True, state, state[:0], scale=scale
    )
    return tuple(x.contiguous() for x in grads)


@_backward.register_fake
def _(grad, query, key, value, out, lse, offsets, lens, scale):
    return tuple(x.new_empty(x.shape) for x in (query, key, value))


def _setup(ctx, inputs, output):
    *tensors, ctx.scale = inputs
    query, key, value, offsets, lens = tensors
    ctx.save_for_backward(query, key, value, *output, offsets, lens)


def _gradient(ctx, grad, _):
    return *_backward(grad, *ctx.saved_tensors, ctx.scale), None, None, None


_forward.register_autograd(_gradient, setup_context=_setup)


def attention(query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, lens: Tensor, scale: float) -> Tensor:
    """query [T, H, D], key and value [T, G, D] in bf16 or fp16 → [T, H, D]; no token sees another document."""
    return _forward(query, key, value, offsets, lens, scale)[0]
