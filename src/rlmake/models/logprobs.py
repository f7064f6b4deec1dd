"""Scoring tokens: logprobs and entropies of a head's temperature-scaled distribution, in fp32, in chunks of rows.

Trainer and engine use the same products and the same log-softmax, so in fp32 on a CPU their bits agree.
T rows, V vocabulary.
"""

import torch
import torch.nn.functional as F

from rlmake.models.packing import TILE, up

CHUNK_VALUES = 1 << 24
"""Logits held at a time; rows per chunk follow from the vocabulary."""
KEEP_VALUES = 1 << 26
"""Up to this many logits the distribution is kept for the backward pass (256 MiB); beyond it is computed again."""


def logits_of(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """fp32 logits [T, V] of hidden [T, width] by a head's weight [V, width]; rows are padded to a multiple of 16."""
    rows = hidden.shape[0]
    padded = F.pad(hidden, (0, 0, 0, up(rows) - rows)) if rows % TILE else hidden
    return F.linear(padded, weight).float()[:rows]


def log_distribution(logits: torch.Tensor, temperatures: torch.Tensor | None) -> torch.Tensor:
    """log-softmax [T, V] of logits / temperature; temperatures [T] > 0, None means 1 everywhere."""
    if temperatures is not None:
        logits = logits / temperatures[:, None]
    return F.log_softmax(logits, -1)


def _chunk_rows(vocabulary: int) -> int:
    return max(up(CHUNK_VALUES // vocabulary + 1 - TILE), TILE)


class _Scored(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperatures):
        step = _chunk_rows(weight.shape[0])
        keep = hidden.shape[0] * weight.shape[0] <= KEEP_VALUES
        logprobs, entropies, kept = [], [], []
        for rows in torch.arange(hidden.shape[0], device=hidden.device).split(step):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            scaled = None if temperatures is None else temperatures[part]
            logp = log_distribution(logits_of(hidden[part], weight), scaled)
            logprobs.append(logp.gather(1, targets[part, None])[:, 0])
            probabilities = logp.exp()
            entropies.append(-(probabilities * logp.clamp_min(torch.finfo(logp.dtype).min)).sum(-1))
            if keep:
                kept.append(probabilities)
        ctx.step, ctx.kept = step, kept
        ctx.save_for_backward(hidden, weight, targets, temperatures)
        entropy = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy)
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx, grad, _):
        hidden, weight, targets, temperatures = ctx.saved_tensors
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        for index, start in enumerate(range(0, hidden.shape[0], ctx.step)):
            part = slice(start, min(start + ctx.step, hidden.shape[0]))
            scaled = None if temperatures is None else temperatures[part]
            if ctx.kept:
                d_logits = ctx.kept[index]
            else:
                d_logits = log_distribution(logits_of(hidden[part], weight), scaled).exp_()
            # d logp_y / d logit_j = (1[j = y] − p_j) / temperature
            row_grad = grad[part] if scaled is None else grad[part] / scaled
            d_logits = d_logits * -row_grad[:, None]
            d_logits.scatter_add_(1, targets[part, None], row_grad[:, None])
            d_logits = d_logits.to(weight.dtype)
            grad_hidden[part] = d_logits @ weight
            grad_weight += d_logits.T @ hidden[part]
        return grad_hidden, grad_weight.to(weight.dtype), None, None


def token_logprobs(
    hidden: torch.Tensor, lm_head_weight: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprob of `targets` [T] under softmax(hidden · headᵀ / temperature), and that distribution's entropy, fp32 [T].

    hidden [T, width], head [V, width], temperatures [T] > 0 or None for 1. Gradients reach hidden and head through the
    logprobs only; entropies carry none. Logits exist for a chunk of rows at a time.
    """
    return _Scored.apply(hidden, lm_head_weight, targets, temperatures)


def score(
    hidden: torch.Tensor, lm_head_weight: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor | None = None
) -> torch.Tensor:
    """The logprobs of `token_logprobs` alone, without gradients."""
    with torch.no_grad():
        return token_logprobs(hidden, lm_head_weight, targets, temperatures)[0]
