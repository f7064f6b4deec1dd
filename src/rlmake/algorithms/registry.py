"""The algorithms by the name that `[orchestrator.train.algo] type` gives: `rlmake.config.algo` lists them, and each is
the one `Algorithm` that the module of its name defines."""

import importlib
from typing import Any

from rlmake.algorithms.base import Algorithm, AlgorithmContext
from rlmake.config import algo as tables
from rlmake.core.errors import UserError, nearest


def _of_module(name: str) -> type[Algorithm]:
    module = importlib.import_module(f"rlmake.algorithms.{name}")
    own = [item for item in vars(module).values() if isinstance(item, type) and item.__module__ == module.__name__]
    (algorithm,) = [item for item in own if issubclass(item, Algorithm)]
    return algorithm


_NAMES = [table.model_fields["type"].default for table in tables.ALGORITHMS]
ALGORITHMS: dict[str, type[Algorithm]] = {name: _of_module(name) for name in _NAMES}


def build(config: Any, context: AlgorithmContext) -> Algorithm:
    """The instance for one training source; `config` is the `algo` table, its `type` the name."""
    if config.type not in ALGORITHMS:
        raise UserError(f"algo.type: no algorithm '{config.type}'{nearest(config.type, ALGORITHMS)}")
    for key, model in (("sampling.source", config.sampling.source), ("teacher", getattr(config, "teacher", None))):
        if model not in (None, "policy") and model.base_url is None:
            raise UserError(f"algo.{key}.base_url of '{context.env_name}' is missing: which server has the model?")
    return ALGORITHMS[config.type](config, context)
