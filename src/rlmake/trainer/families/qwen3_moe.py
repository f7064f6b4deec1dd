"""Qwen3's mixtures of experts: https://arxiv.org/abs/2505.09388. Some layers may be dense."""

from torch import nn

from rlmake.trainer.families.dense import attention_parameters, attention_width, blocks

__all__ = ["active_parameters", "attention_width", "blocks", "routers"]


def routers(model: nn.Module) -> list[nn.Module]:
    return [block.mlp.gate for block in blocks(model) if hasattr(block.mlp, "gate")]


def active_parameters(config) -> int:
    hidden, total = config.hidden_size, config.hidden_size * config.vocab_size
    for layer in range(config.num_hidden_layers):
        total += attention_parameters(config)
        sparse = layer not in config.mlp_only_layers and config.num_experts > 0
        if sparse and (layer + 1) % config.decoder_sparse_step == 0:
            total += config.num_experts_per_tok * 3 * hidden * config.moe_intermediate_size
            total += hidden * config.num_experts
        else:
            total += 3 * hidden * config.intermediate_size
    return total
