"""Losses of the RL trainer. The trainer calls `build` once and `compute` per micro-batch.

`policy` holds the rl component's choices, `fixed` the two others, `components` puts them together.
"""

from rlmake.trainer.losses.components import NAMES, Outputs, Streams, compute
from rlmake.trainer.losses.inputs import LossInputs, LossOutputs
from rlmake.trainer.losses.registry import build

__all__ = ["NAMES", "LossInputs", "LossOutputs", "Outputs", "Streams", "build", "compute"]
