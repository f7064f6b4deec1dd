"""Schedules, optimizers and clipping against float64 references."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from rlmake.config.optim import (
    AdamWConfig,
    ConstantSchedule,
    CosineSchedule,
    LinearSchedule,
    MuonConfig,
    SGDConfig,
    SignSGDConfig,
)
from rlmake.trainer import muon, optim, schedule

# ---- schedules ------------------------------------------------------------------------------------------------------


def test_constant():
    assert [schedule.build(ConstantSchedule(), 1e-3, None)(step) for step in (1, 7)] == [1.0, 1.0]


def torch_rates(scheduler, steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        rates.append(scheduler.get_last_lr()[0])
        scheduler.optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(("warmup", "decay", "floor"), [(10, 10, 0.0), (0, 5, 1e-4), (4, 0, 2e-4), (3, 1, 0.0)])
def test_linear_is_warmup_flat_decay(warmup, decay, floor):
    """Against torch's own schedulers, put together as the reference system does."""
    steps, lr = 30, 1e-3
    config = LinearSchedule(warmup_steps=warmup, decay_steps=decay, min_lr=floor)
    factor = schedule.build(config, lr, steps)
    mine = [lr * factor(step) for step in range(1, steps + 1)]
    wanted = np.full(steps, lr)
    start = max(floor / lr, 1e-8)
    for t in range(warmup):
        wanted[t] = lr * (start + (1 - start) * t / warmup)
    for i in range(decay):
        done = 1.0 if decay == 1 else i / (decay - 1)
        wanted[steps - decay + i] = lr + (floor - lr) * done
    np.testing.assert_allclose(mine, wanted, rtol=1e-12, atol=1e-20)
    if decay:
        assert mine[-1] == pytest.approx(floor, abs=1e-18)
    if warmup and decay > 1:
        sgd = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
        kinds = torch.optim.lr_scheduler
        parts = [
            kinds.LinearLR(sgd, start, 1.0, warmup),
            kinds.ConstantLR(sgd, 1.0, steps),
            kinds.LinearLR(sgd, 1.0, floor / lr, decay - 1),
        ]
        both = kinds.SequentialLR(sgd, parts, [warmup, steps - decay])
        np.testing.assert_allclose(mine, torch_rates(both, steps), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(("warmup", "floor"), [(10, 0.0), (0, 1e-4)])
def test_cosine(warmup, floor):
    steps, lr = 40, 1e-3
    factor = schedule.build(CosineSchedule(warmup_steps=warmup, min_lr=floor), lr, steps)
    for step in range(1, steps + 1):
        t = step - 1
        if t < warmup:
            start = max(floor / lr, 1e-8)
            wanted = lr * (start + (1 - start) * t / warmup)
        else:
            wanted = floor + (lr - floor) * (1 + math.cos(math.pi * (t - warmup) / (steps - warmup))) / 2
        assert lr * factor(step) == pytest.approx(wanted, rel=1e-12)


# ---- optimizers -----------------------------------------------------------------------------------------------------


def run(config, steps: int = 5) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    g = torch.Generator().manual_seed(1)
    weight = nn.Parameter(torch.randn(6, 4, generator=g))
    first = weight.detach().double().numpy().copy()
    optimizer = optim.build(config, [("layer.weight", weight)])
    optim.ensure_state(optimizer)
    assert np.array_equal(weight.detach().double().numpy(), first) and weight.grad is None
    grads = []
    for _ in range(steps):
        weight.grad = torch.randn(6, 4, generator=g)
        grads.append(weight.grad.double().numpy().copy())
        optimizer.step()
    return first, weight.detach().double().numpy(), grads


def test_adamw_is_the_formula_also_after_its_state_was_allocated_ahead():
    config = AdamWConfig(lr=1e-2, weight_decay=0.1, betas1=0.8, betas2=0.95)
    p, found, grads = run(config)
    m = v = np.zeros_like(p)
    for n, g in enumerate(grads, 1):
        m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g * g
        p = p * (1 - 1e-2 * 0.1)
        p = p - 1e-2 * (m / (1 - 0.8**n)) / (np.sqrt(v / (1 - 0.95**n)) + 1e-8)
    np.testing.assert_allclose(found, p, rtol=1e-5, atol=1e-6)


def test_sgd_with_nesterov_momentum():
    p, found, grads = run(SGDConfig(lr=1e-2, weight_decay=0.1))
    buffer = np.zeros_like(p)
    for g in grads:
        g = g + 0.1 * p
        buffer = 0.9 * buffer + g
        p = p - 1e-2 * (g + 0.9 * buffer)
    np.testing.assert_allclose(found, p, rtol=1e-5, atol=1e-6)


def test_sign_sgd():
    p, found, grads = run(SignSGDConfig(lr=1e-2, weight_decay=0.1))
    for g in grads:
        p = p - 1e-2 * 0.1 * p - 1e-2 * np.sign(g)
    np.testing.assert_allclose(found, p, rtol=1e-5, atol=1e-6)


def test_muon_is_the_formula():
    p, found, grads = run(MuonConfig(lr=1e-2, weight_decay=0.1), steps=3)
    buffer = np.zeros_like(p)
    for g in grads:
        buffer = 0.95 * buffer + 0.05 * g
        x = 0.05 * g + 0.95 * buffer
        x = x.T / (np.linalg.norm(x) + 1e-7)
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        p = p * (1 - 1e-2 * 0.1) - 1e-2 * 0.2 * math.sqrt(6) * x.T
    np.testing.assert_allclose(found, p, rtol=1e-4, atol=1e-5)


def test_muon_orthogonalises_and_leaves_vectors_embeddings_and_head_to_adamw():
    u = muon.orthogonalise(torch.randn(32, 16, generator=torch.Generator().manual_seed(0)))
    singular = torch.linalg.svdvals(u)
    assert singular.min() > 0.6 and singular.max() < 1.3
    matrix, vector = torch.zeros(2, 2), torch.zeros(2)
    assert muon.is_matrix("model.layers.0.mlp.up_proj.weight", matrix)
    for name, tensor in (
        ("model.norm.weight", vector),
        ("model.embed_tokens.weight", matrix),
        ("lm_head.weight", matrix),
    ):
        assert not muon.is_matrix(name, tensor)
    named = [
        ("up.weight", nn.Parameter(matrix)),
        ("norm.weight", nn.Parameter(vector)),
        ("lm_head.weight", nn.Parameter(matrix)),
    ]
    groups = optim.build(MuonConfig(weight_decay=0.0), named).param_groups
    assert [(len(group["params"]), group["matrix"]) for group in groups] == [(1, True), (2, False)]


@pytest.mark.parametrize("kind", [AdamWConfig, SGDConfig, MuonConfig, SignSGDConfig])
def test_frozen_parameters_are_not_handed_over(kind):
    frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)
    optimizer = optim.build(kind(weight_decay=0.0), [("a", frozen), ("b", nn.Parameter(torch.ones(2, 2)))])
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] != []
    assert all(p is not frozen for group in optimizer.param_groups for p in group["params"])
