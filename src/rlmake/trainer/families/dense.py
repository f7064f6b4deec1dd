"""What dense decoders with grouped-query attention and a gated MLP share; the file of a family takes it from here."""

from torch import nn


def blocks(model: nn.Module) -> list[nn.Module]:
    return list(model.model.layers)


def routers(model: nn.Module) -> list[nn.Module]:
    return []


def attention_parameters(config) -> int:
    """Of one layer: projections of queries, keys, values and outputs."""
    hidden, width = config.hidden_size, head_dim(config)
    return 2 * hidden * width * (config.num_attention_heads + config.num_key_value_heads)


def active_parameters(config) -> int:
    mlp = 3 * config.hidden_size * config.intermediate_size
    layers = config.num_hidden_layers * (attention_parameters(config) + mlp)
    return layers + config.hidden_size * config.vocab_size


def attention_width(config) -> int:
    return config.num_hidden_layers * config.num_attention_heads * head_dim(config)


def head_dim(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
