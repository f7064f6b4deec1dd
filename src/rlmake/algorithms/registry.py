"""The algorithms by the name that `[orchestrator.train.algo] type` gives."""

from typing import Any

from rlmake.algorithms.base import Algorithm, AlgorithmContext
from rlmake.algorithms.echo import Echo
from rlmake.algorithms.grpo import GRPO
from rlmake.algorithms.hierarchical_grpo import HierarchicalGRPO
from rlmake.algorithms.max_rl import MaxRL
from rlmake.algorithms.opd import OPD
from rlmake.algorithms.opsd import OPSD
from rlmake.algorithms.rae import RAE
from rlmake.algorithms.sft import SFT
from rlmake.core.errors import UserError, nearest

ALGORITHMS: dict[str, type[Algorithm]] = {
    "grpo": GRPO,
    "max_rl": MaxRL,
    "rae": RAE,
    "hierarchical_grpo": HierarchicalGRPO,
    "opd": OPD,
    "opsd": OPSD,
    "sft": SFT,
    "echo": Echo,
}


def build(config: Any, context: AlgorithmContext) -> Algorithm:
    """The instance for one training source; `config` is the `algo` table, its `type` the name."""
    if config.type not in ALGORITHMS:
        raise UserError(f"algo.type: no algorithm '{config.type}'{nearest(config.type, ALGORITHMS)}")
    for key, model in (("sampling.source", config.sampling.source), ("teacher", getattr(config, "teacher", None))):
        if model not in (None, "policy") and model.base_url is None:
            raise UserError(f"algo.{key}.base_url of '{context.env_name}' is missing: which server has the model?")
    return ALGORITHMS[config.type](config, context)
