"""Optimizers of the `optim` table. They see each rank's shards, except Muon, whose update needs whole matrices."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from rlmake.trainer.muon import Muon


class SignSGD(Optimizer):
    """`p ← p − lr·weight_decay·p − lr·sign(g)`."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, weight_decay: float):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1.0 - group["lr"] * group["weight_decay"]).add_(p.grad.sign(), alpha=-group["lr"])


def build(config: Any, named: list[tuple[str, nn.Parameter]]) -> Optimizer:
    """The optimizer over the trainable ones of `named` (names and parameters). `weight_decay` is resolved already."""
    named = [(name, p) for name, p in named if p.requires_grad]
    params = [p for _, p in named]
    decay = config.weight_decay
    match config.type:
        case "adamw":
            betas = (config.betas1, config.betas2)
            return AdamW(params, config.lr, betas, config.eps, decay, fused=True)
        case "sgd":
            nesterov = config.nesterov and config.momentum > 0
            return SGD(params, config.lr, config.momentum, weight_decay=decay, nesterov=nesterov)
        case "muon":
            betas = (config.betas1, config.betas2)
            return Muon(named, config.lr, decay, mu=config.mu, betas=betas, eps=config.eps)
        case "sign_sgd":
            return SignSGD(params, config.lr, decay)
    raise ValueError(f"optimizer {config.type}")


def set_lr(optimizer: Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def ensure_state(optimizer: Optimizer) -> dict[int, dict[str, Tensor]]:
    """Allocate the state that the first step would allocate, so that a checkpoint has somewhere to load into.

    Runs one step with zero gradients and learning rate 0, then resets every tensor to 0: parameters keep their bytes.
    Also gives parameters that never got a gradient a state, so that saved and loaded sets of keys always agree.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    held = {}
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for p in group["params"]:
            held[p], p.grad = p.grad, torch.zeros_like(p)
    before = {p: p.detach().clone() for p in held}
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    with torch.no_grad():
        for p, grad in held.items():
            p.copy_(before[p])  # a −0.0 may have become 0.0
            p.grad = grad
            for value in optimizer.state[p].values():
                if isinstance(value, Tensor):
                    value.zero_()
    return optimizer.state
