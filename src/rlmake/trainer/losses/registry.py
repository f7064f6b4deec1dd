"""From `[trainer.loss]` to the function of the rl component."""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlmake.core.errors import UserError
from rlmake.trainer.losses import policy
from rlmake.trainer.losses.inputs import LossInputs, LossOutputs

RLLoss = Callable[[LossInputs], LossOutputs]
BUILT_IN = {"ipo": policy.ipo, "icepop": policy.icepop, "ppo": policy.ppo, "cispo": policy.cispo}


def build(config: Any) -> tuple[RLLoss, bool]:
    """The loss of the configuration (fields of its `type`), and whether it is token-wise.

    A custom one gets one packed sequence per call. Raises `UserError` when its import path leads nowhere.
    """
    if config.type == "custom":
        return functools.partial(
            import_function(config.import_path, "trainer.loss.import_path"), **config.kwargs
        ), False
    fields = {name: value for name, value in config.model_dump().items() if name != "type"}
    return functools.partial(BUILT_IN[config.type], **fields), True


def import_function(path: str, key: str) -> Callable:
    """`package.module.function` or `file.py:function`; `UserError` naming the configuration key otherwise."""
    where, colon, name = path.rpartition(":") if ":" in path else path.rpartition(".")
    try:
        if colon == ":" and where.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(where).stem, where)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
        function = getattr(module, name)
    except (ImportError, AttributeError, ValueError, OSError) as error:
        raise UserError(f"{key}: cannot import '{path}': {error}") from None
    if not callable(function):
        raise UserError(f"{key}: '{path}' is not a function")
    return function
