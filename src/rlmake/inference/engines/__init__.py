"""Engines: what turns token ids into token ids. `base` is the contract; one file each, chosen by `inference.engine`."""

from typing import Any

from rlmake.core.errors import UserError
from rlmake.inference.engines.base import Engine


def make_engine(cfg: Any) -> Engine:
    """The engine that an `InferenceConfig` names, started and ready. Raises `UserError`."""
    if cfg.engine != "transformers":
        raise UserError(f"inference.engine: '{cfg.engine}' is not part of this version; use 'transformers'")
    if cfg.device != "cpu":
        raise UserError(f"inference.device: the transformers engine runs on the CPU, not on '{cfg.device}'")
    from rlmake.inference.engines.transformers import TransformersEngine

    return TransformersEngine(cfg)
