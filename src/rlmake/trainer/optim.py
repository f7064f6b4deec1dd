"""Optimizers of the `optim` table. They see each rank's shards, except Muon, whose update needs whole matrices."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from rlmake.trainer.gradients import local
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


def step(optimizer: Optimizer, on_host: bool) -> None:
    """Take the step. `on_host`: the moments wait in host memory and visit the device one parameter after another.

    They are copied and the update is the optimizer's own, so not a bit changes; made on the host it would round
    otherwise. Scalars (counts of steps) stay where they are.
    """
    if not on_host:
        return optimizer.step()
    for p in _each(optimizer):
        if p.grad is None:
            continue
        state = optimizer.state[p]
        waiting = {key: value for key, value in state.items() if value.ndim}
        state |= {key: value.to(p.device, non_blocking=True, copy=True) for key, value in waiting.items()}
        optimizer.step()
        for key, value in waiting.items():
            value.copy_(state[key], non_blocking=True)
        state |= waiting
    if p.is_cuda:
        torch.cuda.current_stream(p.device).synchronize()  # whoever reads them next does so on the host


def ensure_state(optimizer: Optimizer, on_host: bool = False) -> dict[nn.Parameter, dict[str, Tensor]]:
    """Allocate the state that the first step would allocate, so that a checkpoint has somewhere to load into.

    Runs a step with zero gradients and learning rate 0, one parameter at a time, then resets every tensor to 0:
    parameters keep their bytes. Also gives parameters that never got a gradient a state, so that saved and loaded sets
    of keys always agree. `on_host`: see `step`.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    set_lr(optimizer, 0.0)
    for p in _each(optimizer):
        held, before = p.grad, p.detach().clone()
        p.grad = torch.zeros_like(p)
        optimizer.step()
        with torch.no_grad():
            p.copy_(before)  # a −0.0 may have become 0.0
            p.grad = held
            for key, value in optimizer.state[p].items():
                value.zero_()
                if on_host and value.ndim:
                    optimizer.state[p][key] = _to_host(value)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    return optimizer.state


def _each(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """One parameter after another, while each is the only one that the optimizer has."""
    groups = optimizer.param_groups
    whole = [group["params"] for group in groups]
    try:
        for group in groups:
            group["params"] = []
        for group, params in zip(groups, whole, strict=True):
            for p in params:
                group["params"] = [p]
                yield p
            group["params"] = []
    finally:
        for group, params in zip(groups, whole, strict=True):
            group["params"] = params


def _to_host(value: Tensor) -> Tensor:
    """The same in the host's memory, pinned where it leaves a GPU; of a distributed tensor this rank's shard moves."""
    moved = value.to("cpu")
    if value.is_cuda:
        local(moved).data = local(moved).pin_memory()
    return moved
