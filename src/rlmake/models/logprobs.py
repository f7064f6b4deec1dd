"""Scoring tokens: logprobs and entropies of a head's temperature-scaled distribution, in fp32, in chunks of rows.

Two kernels behind one function. On a CPU the plain log-softmax: trainer and engine use the same products and the same
sums, so in fp32 their bits agree. On a GPU the logits stay in the head's type, are read by two fused (compiled)
kernels, and are kept for the backward pass where memory allows.
T rows, V vocabulary.
"""

import functools
from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from rlmake.models.packing import TILE, up

CHUNK_VALUES = 1 << 24
"""Logits held at a time on a CPU; rows per chunk follow from the vocabulary."""
KEEP_VALUES = 1 << 26
"""Up to this many logits the distribution is kept for the backward pass (256 MiB); beyond it is computed again."""
KEEP_SHARE = 1 / 24
"""On a GPU logits are kept up to this share of its memory."""


def logits_of(hidden: Tensor, weight: Tensor) -> Tensor:
    """fp32 logits [T, V] of hidden [T, width] by a head's weight [V, width]; rows are padded to a multiple of 16."""
    return _products(hidden, weight).float()


def _products(hidden: Tensor, weight: Tensor) -> Tensor:
    rows = hidden.shape[0]
    padded = F.pad(hidden, (0, 0, 0, up(rows) - rows)) if rows % TILE else hidden
    return F.linear(padded, weight)[:rows]


def log_distribution(logits: Tensor, temperatures: Tensor | None) -> Tensor:
    """log-softmax [T, V] of logits / temperature; temperatures [T] > 0, None means 1 everywhere."""
    if temperatures is not None:
        logits = logits / temperatures[:, None]
    return F.log_softmax(logits, -1)


class _Kernel(Protocol):
    """How a chunk of products [R, V] is scored."""

    def score(
        self, z: Tensor, targets: Tensor, temperatures: Tensor | None, entropies: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(logprob [R], entropy [R], what the gradient needs beside `z` [R], what is kept in place of `z` [R, V]).

        Without `entropies` the second may be anything of that shape.
        """

    def again(self, z: Tensor, temperatures: Tensor | None) -> Tensor:
        """What would have been kept."""

    def gradient(
        self, kept: Tensor, extra: Tensor, targets: Tensor, temperatures: Tensor | None, grad: Tensor
    ) -> Tensor:
        """d loss / d z [R, V]: grad / temperature · (1[target] − p); may overwrite `kept`."""

    def keeps(self, z_bytes: int) -> bool:
        """Whether logits of that size are kept."""


class Plain:
    """log-softmax as torch has it, every value in fp32."""

    def score(self, z, targets, temperatures, entropies):
        logp = log_distribution(z.float(), temperatures)
        if not entropies:
            chosen = logp.gather(1, targets[:, None])[:, 0]
            return chosen, chosen, chosen, logp.exp_()
        probabilities = logp.exp()
        entropy = -(probabilities * logp.clamp_min(torch.finfo(logp.dtype).min)).sum(-1)
        return logp.gather(1, targets[:, None])[:, 0], entropy, entropy, probabilities

    def again(self, z, temperatures):
        return log_distribution(z.float(), temperatures).exp_()

    def gradient(self, kept, extra, targets, temperatures, grad):
        row_grad = grad if temperatures is None else grad / temperatures
        d_logits = kept * -row_grad[:, None]
        return d_logits.scatter_add_(1, targets[:, None], row_grad[:, None])

    def keeps(self, z_bytes):
        return z_bytes <= KEEP_VALUES * 4

    def rows(self, vocabulary: int, asked: int | None) -> int:
        return max(up(CHUNK_VALUES // vocabulary + 1 - TILE), TILE)


class Fused:
    """The same in two passes over the logits forward and one backward; fp32 inside, the head's type in memory."""

    def __init__(self, compiled: bool):
        self._forward, self._backward = (_compiled(f) if compiled else f for f in (_fused_score, _fused_gradient))

    def score(self, z, targets, temperatures, entropies):
        logp, entropy, log_z = self._forward(z, targets, temperatures)
        return logp, entropy, log_z, z

    def again(self, z, temperatures):
        return z

    def gradient(self, kept, extra, targets, temperatures, grad):
        return self._backward(kept, extra, targets, temperatures, grad)

    def keeps(self, z_bytes):
        if not torch.cuda.is_available():
            return True
        return z_bytes <= KEEP_SHARE * torch.cuda.get_device_properties().total_memory

    def rows(self, vocabulary: int, asked: int | None) -> int:
        return asked or max(up((1 << 30) // vocabulary), TILE)


def _fused_score(z: Tensor, targets: Tensor, temperatures: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    x = z.float() if temperatures is None else z.float() / temperatures[:, None]
    top = x.amax(-1, keepdim=True)
    e = torch.exp(x - top)
    total = e.sum(-1)
    log_z = top[:, 0] + torch.log(total)
    return x.gather(1, targets[:, None])[:, 0] - log_z, log_z - (e * x).sum(-1) / total, log_z


def _fused_gradient(z: Tensor, log_z: Tensor, targets: Tensor, temperatures: Tensor | None, grad: Tensor) -> Tensor:
    x = z.float() if temperatures is None else z.float() / temperatures[:, None]
    row_grad = grad if temperatures is None else grad / temperatures
    hit = torch.arange(z.shape[1], device=z.device)[None] == targets[:, None]
    return ((hit.float() - torch.exp(x - log_z[:, None])) * row_grad[:, None]).to(z.dtype)


@functools.cache
def _compiled(function):
    return torch.compile(function, dynamic=None)


@functools.cache
def _kernel(gpu: bool) -> Plain | Fused:
    return Fused(compiled=True) if gpu else Plain()


class _Scored(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperatures, kernel, rows, wanted):
        keep = kernel.keeps(hidden.shape[0] * weight.shape[0] * (4 if isinstance(kernel, Plain) else hidden.itemsize))
        logprobs, entropies, extras, kept = [], [], [], []
        for part in _parts(hidden.shape[0], rows):
            z = _products(hidden[part], weight)
            logp, entropy, extra, big = kernel.score(z, targets[part], _slice(temperatures, part), wanted)
            logprobs.append(logp)
            entropies.append(entropy)
            extras.append(extra)
            kept.append(big if keep else None)
        ctx.kernel, ctx.rows, ctx.extras, ctx.kept = kernel, rows, extras, kept
        ctx.save_for_backward(hidden, weight, targets, temperatures)
        entropy = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy)
        return torch.cat(logprobs), entropy

    @staticmethod
    def backward(ctx, grad, _):
        hidden, weight, targets, temperatures = ctx.saved_tensors
        grad_hidden, grad_weight = torch.empty_like(hidden), None
        for index, part in enumerate(_parts(hidden.shape[0], ctx.rows)):
            scaled = _slice(temperatures, part)
            kept = ctx.kept[index]
            if kept is None:
                kept = ctx.kernel.again(_products(hidden[part], weight), scaled)
            d_logits = ctx.kernel.gradient(kept, ctx.extras[index], targets[part], scaled, grad[part]).to(weight.dtype)
            grad_hidden[part] = d_logits @ weight
            grad_weight = _add_product(grad_weight, d_logits, hidden[part], last=part.stop == hidden.shape[0])
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


def _parts(total: int, rows: int) -> Iterator[slice]:
    return (slice(start, min(start + rows, total)) for start in range(0, total, rows))


def _slice(values: Tensor | None, part: slice) -> Tensor | None:
    return None if values is None else values[part]


def _add_product(total: Tensor | None, d_logits: Tensor, hidden: Tensor, last: bool) -> Tensor:
    """total + d_logitsᵀ · hidden in fp32; a first chunk that is also the last is not widened on a GPU."""
    if not d_logits.is_cuda:
        total = torch.zeros(d_logits.shape[1], hidden.shape[1]) if total is None else total
        return total.add_(d_logits.T @ hidden)
    if total is None and last:
        return d_logits.T @ hidden
    product = torch.mm(d_logits.T, hidden, out_dtype=torch.float32)
    return product if total is None else total.add_(product)


def token_logprobs(
    hidden: Tensor,
    lm_head_weight: Tensor,
    targets: Tensor,
    temperatures: Tensor | None = None,
    chunk: int | None = None,
    kernel: Plain | Fused | None = None,
    entropies: bool = True,
) -> tuple[Tensor, Tensor]:
    """Logprob of `targets` [T] under softmax(hidden · headᵀ / temperature), and that distribution's entropy, fp32 [T].

    hidden [T, width], head [V, width], temperatures [T] > 0 or None for 1. Gradients reach hidden and head through the
    logprobs only; entropies carry none, and are not to be used where they were not asked for. Logits exist for a chunk
    of rows at a time: `chunk` of them on a GPU.
    """
    kernel = kernel or _kernel(hidden.is_cuda)
    rows = kernel.rows(lm_head_weight.shape[0], chunk)
    return _Scored.apply(hidden, lm_head_weight, targets, temperatures, kernel, rows, entropies)


def score(hidden: Tensor, lm_head_weight: Tensor, targets: Tensor, temperatures: Tensor | None = None) -> Tensor:
    """The logprobs of `token_logprobs` alone, without gradients."""
    with torch.no_grad():
        return token_logprobs(hidden, lm_head_weight, targets, temperatures, entropies=False)[0]
