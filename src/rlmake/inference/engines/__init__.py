"""Engines: what turns token ids into token ids. `base` is the contract; one file each, chosen by `inference.engine`."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from rlmake.core.errors import UserError
from rlmake.inference.engines.base import Engine


@contextlib.asynccontextmanager
async def opened(cfg: Any) -> AsyncIterator[Engine]:
    """The engine that an `InferenceConfig` names, ready; closed at the end. Raises `UserError`."""
    if cfg.engine == "vllm":
        from rlmake.inference.engines.vllm import VllmEngine

        async with VllmEngine.opened(cfg) as engine:
            yield engine
        return
    if cfg.device != "cpu":
        raise UserError(f"inference.device: the transformers engine runs on the CPU, not on '{cfg.device}'")
    from rlmake.inference.engines.transformers import TransformersEngine

    engine = TransformersEngine(cfg)
    try:
        yield engine
    finally:
        engine.close()
