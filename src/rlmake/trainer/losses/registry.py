"""From `[trainer.loss]` to the function of the rl component."""

import functools
from collections.abc import Callable
from typing import Any

from rlmake.core.imports import import_function
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
