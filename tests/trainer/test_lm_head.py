"""The chunked head against log-softmax in float64: values, entropy, gradients, at any chunk size."""

import pytest
import torch

from rlmake.models.logprobs import token_logprobs
from rlmake.trainer import lm_head

ROWS, WIDTH, VOCAB = 37, 24, 101


def example():
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=g)
    weight = torch.randn(VOCAB, WIDTH, generator=g)
    targets = torch.randint(0, VOCAB, (ROWS,), generator=g)
    temperatures = 0.5 + torch.rand(ROWS, generator=g)
    return hidden, weight, targets, temperatures, torch.randn(ROWS, generator=g)


@pytest.mark.parametrize("token_chunk", [1, 7, 16, 1 << 40])
@pytest.mark.parametrize("vocab_chunk", [1, 13, 8192])
def test_chunked_is_the_plain_one(monkeypatch, token_chunk, vocab_chunk):
    monkeypatch.setattr(lm_head, "VOCAB_CHUNK", vocab_chunk)
    hidden, weight, targets, temperatures, grad = example()
    h64, w64 = hidden.double().requires_grad_(), weight.double().requires_grad_()
    plain = torch.log_softmax(h64 @ w64.T / temperatures.double()[:, None], -1)
    wanted = plain.gather(1, targets[:, None])[:, 0]
    (wanted * grad.double()).sum().backward()
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logprobs, entropy = lm_head.chunked_logprobs(h, w, targets, temperatures, token_chunk)
    (logprobs * grad).sum().backward()
    torch.testing.assert_close(logprobs.double(), wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), -(plain.exp() * plain).sum(-1).detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(h.grad.double(), h64.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(w.grad.double(), w64.grad, rtol=1e-4, atol=1e-5)
    assert not entropy.requires_grad


def test_large_logits_do_not_overflow():
    hidden, weight, targets, temperatures, _ = example()
    logprobs, entropy = lm_head.chunked_logprobs(hidden * 1e3, weight, targets, temperatures, 8)
    assert logprobs.isfinite().all() and entropy.isfinite().all()


def test_it_agrees_with_the_head_of_the_exact_forward():
    hidden, weight, targets, temperatures, _ = example()
    a = lm_head.chunked_logprobs(hidden, weight, targets, temperatures, 8)
    b = token_logprobs(hidden, weight, targets, temperatures)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
