"""From `[trainer.loss]` to the function of the rl component."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlmake.core.errors import UserError
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
        function = import_function(config.import_path, "trainer.loss.import_path", config.kwargs)
        return functools.partial(_checked, function, config.import_path), False
    fields = {name: value for name, value in config.model_dump().items() if name != "type"}
    return functools.partial(BUILT_IN[config.type], **fields), True


def _checked(function: Callable[[LossInputs], Any], path: str, inputs: LossInputs) -> LossOutputs:
    """What a custom loss gives for a sequence; its metrics may be plain numbers."""
    outputs = function(inputs)
    if not isinstance(outputs, LossOutputs) or not isinstance(outputs.loss, Tensor) or outputs.loss.ndim:
        given = getattr(outputs, "loss", outputs)
        shape = f" of shape {list(given.shape)}" if isinstance(given, Tensor) else ""
        raise UserError(
            f"trainer.loss.import_path: '{path}' must return LossOutputs with the sum as its loss, a tensor of no "
            f"dimension; it gave a {type(outputs).__name__}{shape}"
        )
    try:
        return LossOutputs(outputs.loss, {name: torch.as_tensor(value) for name, value in outputs.metrics.items()})
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"trainer.loss.import_path: '{path}' must return its metrics as a table of tensors or numbers: {error}"
        ) from None
