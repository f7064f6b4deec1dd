"""Qwen3, dense: https://arxiv.org/abs/2505.09388. Queries and keys are normed."""

from rlmake.trainer.families.dense import active_parameters, attention_width, blocks, routers

__all__ = ["active_parameters", "attention_width", "blocks", "routers"]
