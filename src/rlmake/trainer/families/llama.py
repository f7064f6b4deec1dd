"""Llama and what shares its shape (SmolLM2): https://arxiv.org/abs/2407.21783."""

from rlmake.trainer.families.dense import active_parameters, attention_width, blocks, routers

__all__ = ["active_parameters", "attention_width", "blocks", "routers"]
