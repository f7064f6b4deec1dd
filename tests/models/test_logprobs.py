"""The chunked head against log-softmax in float64: values, entropy, gradients, for both kernels, at any chunk size."""

import pytest
import torch

from rlmake.models import logprobs
from rlmake.models.logprobs import Fused, Plain, token_logprobs

ROWS, WIDTH, VOCAB = 37, 24, 101


def example():
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=g)
    weight = torch.randn(VOCAB, WIDTH, generator=g)
    targets = torch.randint(0, VOCAB, (ROWS,), generator=g)
    temperatures = 0.5 + torch.rand(ROWS, generator=g)
    return hidden, weight, targets, temperatures, torch.randn(ROWS, generator=g)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("hot", [True, False])
@pytest.mark.parametrize("kernel", [Plain(), Fused(compiled=False)], ids=["plain", "fused"])
@pytest.mark.parametrize("chunk", [1, 7, 16, 1 << 40])
def test_chunked_is_the_whole_one(monkeypatch, kernel, chunk, hot, keep):
    monkeypatch.setattr(logprobs, "CHUNK_VALUES", min(chunk, 1 << 20) * VOCAB)
    monkeypatch.setattr(type(kernel), "keeps", lambda self, size: keep)
    hidden, weight, targets, temperatures, grad = example()
    temperatures = temperatures if hot else None
    h64, w64 = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = h64 @ w64.T
    plain = torch.log_softmax(logits / temperatures.double()[:, None] if hot else logits, -1)
    wanted = plain.gather(1, targets[:, None])[:, 0]
    (wanted * grad.double()).sum().backward()
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    found, entropy = token_logprobs(h, w, targets, temperatures, chunk, kernel)
    (found * grad).sum().backward()
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), -(plain.exp() * plain).sum(-1).detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(h.grad.double(), h64.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(w.grad.double(), w64.grad, rtol=1e-4, atol=1e-5)
    assert not entropy.requires_grad


@pytest.mark.parametrize("kernel", [Plain(), Fused(compiled=False)], ids=["plain", "fused"])
def test_large_logits_do_not_overflow(kernel):
    hidden, weight, targets, temperatures, _ = example()
    for values in token_logprobs(hidden * 1e3, weight, targets, temperatures, 8, kernel):
        assert values.isfinite().all()
