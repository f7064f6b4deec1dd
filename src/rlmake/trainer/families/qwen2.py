"""Qwen2 and Qwen2.5, dense: https://arxiv.org/abs/2407.10671. Projections of queries, keys and values have biases."""

from rlmake.trainer.families.dense import active_parameters, attention_width, blocks, routers

__all__ = ["active_parameters", "attention_width", "blocks", "routers"]
