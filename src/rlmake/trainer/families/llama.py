"""Llama and what shares its shape (SmolLM2): https://arxiv.org/abs/2407.21783. Grouped-query attention, gated MLP."""

from torch import nn


def blocks(model: nn.Module) -> list[nn.Module]:
    return list(model.model.layers)


def active_parameters(config) -> int:
    hidden, width = config.hidden_size, config.head_dim
    attention = 2 * hidden * config.num_attention_heads * width + 2 * hidden * config.num_key_value_heads * width
    mlp = 3 * hidden * config.intermediate_size
    return config.num_hidden_layers * (attention + mlp) + hidden * config.vocab_size


def attention_width(config) -> int:
    return config.num_hidden_layers * config.num_attention_heads * config.head_dim
