"""Loading the model that a configuration names, and the facts about it that travel with its checkpoints."""

from typing import Any

from loguru import logger
from torch import nn

from rlmake.models import exact, loading, lora, packed
from rlmake.models.text import template_text
from rlmake.trainer import checkpoint
from rlmake.trainer.families import plan_of


def load_model(config: Any) -> tuple[nn.Module, dict[str, Any]]:
    """The plain model on the CPU in `optimization_dtype`, and the contents of its checkpoints' `model.json`.

    `rlmake.export.sources` says what the fields of the latter mean.
    """
    table, template = config.model, config.tokenizer.chat_template
    is_exact = table.attn == "exact"
    model = loading.load(
        table.name,
        attn=exact.NAME if is_exact else packed.NAME,
        dtype=table.optimization_dtype,
        trust_remote_code=table.trust_remote_code,
    )
    if is_exact:
        exact.require(model.config)
    if getattr(model.config, "attention_dropout", 0):
        logger.warning(f"{table.name}: attention_dropout = {model.config.attention_dropout} is not applied")
    if table.freeze_moe_router:
        for router in plan_of(model.config.model_type).routers(model):
            router.requires_grad_(False)
    adapter = None
    if table.lora is not None:
        adapter = lora.inject(model, lora.Adapter.of_config(table.name, table.lora), config.seed)
    return model, {
        "config": model.config.to_dict(),
        "assets": config.tokenizer.name or table.name,
        "chat_template": None if template is None else template_text(template),
        "prefix": checkpoint.PREFIX,
        "lora": None if adapter is None else adapter.to_record(),
    }
