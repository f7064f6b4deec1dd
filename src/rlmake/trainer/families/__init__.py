"""One parallel plan per model family, all of the same shape; adding a dense family is one file and one line here.

A plan says which modules are the blocks that FSDP shards and compile and recomputation work on, and counts the
parameters that a token meets. Models know nothing of it.
"""

from typing import Protocol

from torch import nn

from rlmake.core.errors import UserError, nearest
from rlmake.trainer.families import llama, qwen2, qwen3, qwen3_moe


class Plan(Protocol):
    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The decoder blocks, in order of execution."""

    def routers(self, model: nn.Module) -> list[nn.Module]:
        """The modules that choose experts, in the same order; none in a dense model."""

    def active_parameters(self, config) -> int:
        """Weights in the matrix products that one token passes: blocks and one head, without the embedding."""

    def attention_width(self, config) -> int:
        """Query heads × head dimension, summed over the layers."""


PLANS: dict[str, Plan] = {"qwen3": qwen3, "qwen2": qwen2, "llama": llama, "qwen3_moe": qwen3_moe}


def plan_of(model_type: str) -> Plan:
    """The plan for a `model_type` of transformers; `UserError` for a family that has none."""
    if model_type not in PLANS:
        known = ", ".join(sorted(PLANS))
        raise UserError(f"model type '{model_type}' has no parallel plan (have: {known}){nearest(model_type, PLANS)}")
    return PLANS[model_type]
