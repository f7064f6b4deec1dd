"""Activation checkpointing: whole blocks, or chosen parts of them, are computed again in the backward pass."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rlmake.core.errors import UserError

# What `model.ac.targets` may name: modules of a block by the last part of their path.
TARGETS = {
    "norm": lambda name: name.endswith("norm"),
    "attn_proj": lambda name: name in ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": lambda name: name == "mlp",
}


def recompute(root: nn.Module, blocks: list[nn.Module], config: Any) -> None:
    """Apply `model.ac` to every `freq`-th block, in place: whole blocks around what their call is now, which may be
    compiled; parts of them before they are compiled. Raises `UserError` for a target that a block lacks.

    transformers has such calls of its own, in one place or another of a block by its version.
    """
    dropout = any(isinstance(module, nn.Dropout) and module.p > 0 for module in root.modules())
    again = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=dropout)
    for block in blocks[:: config.freq]:
        if config.mode == "full":
            call = block._compiled_call_impl or block._call_impl
            block._compiled_call_impl = functools.partial(_whole, block, again, call)
        else:
            for target in config.targets:
                _parts(block, target, dropout)


def _whole(block: nn.Module, again: Callable, call: Callable, *args: Any, **kwargs: Any) -> Any:
    if block.training and torch.is_grad_enabled():
        return again(functools.partial(call, **kwargs), *args)
    return call(*args, **kwargs)


def _parts(block: nn.Module, target: str, dropout: bool) -> None:
    found = [module for name, module in block.named_modules() if TARGETS[target](name.rpartition(".")[2])]
    if not found:
        raise UserError(f"model.ac.targets: a block of this model has no part '{target}'")
    for module in found:
        module.__class__ = _again(type(module), dropout)


@functools.cache
def _again(kind: type[nn.Module], dropout: bool) -> type[nn.Module]:
    """A module class that is computed again: one for all blocks, so that they share what was compiled for the first."""

    def forward(self, *args, **kwargs):
        return checkpoint(
            functools.partial(kind.forward, self), *args, use_reentrant=False, preserve_rng_state=dropout, **kwargs
        )

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
