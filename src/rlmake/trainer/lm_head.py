"""Log-probabilities of given tokens from hidden states, without holding the logits of all of them.

`logits / T` of a chunk of rows against a chunk of the vocabulary at a time; the log-sum-exp is built up online
(Milakov & Gimelshein 2018, https://arxiv.org/abs/1805.02867). The backward pass forms the chunks again.
Axes: N rows, H hidden width, V vocabulary.
"""

import torch
from torch import Tensor

VOCAB_CHUNK = 8192


def chunked_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor, token_chunk: int
) -> tuple[Tensor, Tensor]:
    """log-softmax(hidden·weightᵀ / T)[target] and the entropy of that distribution, both fp32 [N].

    `hidden` [N, H] and `weight` [V, H] in the model's dtype (products in it, everything after in fp32), `targets`
    int64 [N], `temperatures` float32 [N]. The entropy carries no gradient.
    """
    return _Chunked.apply(hidden, weight, targets, temperatures.float(), token_chunk)


def _chunks(total: int, size: int):
    return ((start, min(start + size, total)) for start in range(0, total, size))


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperatures, token_chunk):
        rows, vocab = hidden.shape[0], weight.shape[0]
        logprobs = torch.empty(rows, dtype=torch.float32, device=hidden.device)
        entropy, log_z = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for a, b in _chunks(rows, token_chunk):
            inverse_t = 1.0 / temperatures[a:b, None]
            top = torch.full((b - a,), -torch.inf, device=hidden.device)  # running maximum m
            total = torch.zeros_like(top)  # Σ e^{z−m}
            moment = torch.zeros_like(top)  # Σ e^{z−m}·z
            picked = torch.zeros_like(top)  # z of the target
            for c, d in _chunks(vocab, VOCAB_CHUNK):
                z = (hidden[a:b] @ weight[c:d].T).float() * inverse_t
                new_top = torch.maximum(top, z.amax(-1))
                rescale = torch.exp(top - new_top)
                e = torch.exp(z - new_top[:, None])
                total = total * rescale + e.sum(-1)
                moment = moment * rescale + (e * z).sum(-1)
                top = new_top
                inside = (targets[a:b] >= c) & (targets[a:b] < d)
                index = (targets[a:b] - c).clamp(0, d - c - 1)
                picked = torch.where(inside, z.gather(1, index[:, None])[:, 0], picked)
            log_z[a:b] = top + torch.log(total)
            logprobs[a:b] = picked - log_z[a:b]
            entropy[a:b] = log_z[a:b] - moment / total
        ctx.save_for_backward(hidden, weight, targets, temperatures, log_z)
        ctx.token_chunk = token_chunk
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad, _):
        hidden, weight, targets, temperatures, log_z = ctx.saved_tensors
        rows, vocab = hidden.shape[0], weight.shape[0]
        grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=hidden.device)
        for a, b in _chunks(rows, ctx.token_chunk):
            inverse_t = 1.0 / temperatures[a:b, None]
            scaled = grad[a:b, None] * inverse_t
            for c, d in _chunks(vocab, VOCAB_CHUNK):
                z = (hidden[a:b] @ weight[c:d].T).float() * inverse_t
                dz = -torch.exp(z - log_z[a:b, None]) * scaled
                inside = (targets[a:b] >= c) & (targets[a:b] < d)
                at = inside.nonzero()[:, 0]
                dz[at, targets[a:b][at] - c] += scaled[at, 0]
                dz = dz.to(hidden.dtype)
                grad_hidden[a:b] += dz @ weight[c:d]
                grad_weight[c:d] += dz.T @ hidden[a:b]
        return grad_hidden.to(hidden.dtype), grad_weight.to(weight.dtype), None, None, None
