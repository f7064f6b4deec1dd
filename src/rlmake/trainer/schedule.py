"""Learning-rate schedules as pure functions of the step: nothing to save but the step itself.

Spec rl-and-trainer.md 3.2. `t = step − 1` counts the optimizer steps taken before this one; m = min_lr / lr.
"""

import math
from collections.abc import Callable
from typing import Any

WARMUP_FLOOR = 1e-8


def build(config: Any, lr: float, max_steps: int | None) -> Callable[[int], float]:
    """`factor(step) -> multiple of lr` for steps 1, 2, … of a `scheduler` table.

    The schema has checked the table against `max_steps`.
    """
    if config.type == "constant":
        return lambda step: 1.0
    floor = config.min_lr / lr if lr else 1.0
    warmup = _warmup(config.warmup_steps, max(floor, WARMUP_FLOOR))
    if config.type == "linear":
        return _linear(warmup, config.decay_steps, floor, max_steps)
    return _cosine(warmup, config.warmup_steps, floor, max_steps)


def _warmup(steps: int, start: float) -> Callable[[int], float]:
    """`start` at t = 0, rising linearly to 1 at t = `steps`."""
    return lambda t: start + (1.0 - start) * min(t, steps) / steps if steps else 1.0


def _linear(warmup, decay_steps: int, floor: float, max_steps: int | None):
    """Warmup, flat, then down over `decay_steps − 1` transitions so that the last step is at the floor."""

    def factor(step: int) -> float:
        t = step - 1
        if not decay_steps or t < max_steps - decay_steps:
            return warmup(t)
        done = 1.0 if decay_steps == 1 else min((t - (max_steps - decay_steps)) / (decay_steps - 1), 1.0)
        return 1.0 + (floor - 1.0) * done

    return factor


def _cosine(warmup, warmup_steps: int, floor: float, max_steps: int):
    """Warmup, then half a cosine over `max_steps − warmup_steps` towards the floor."""

    def factor(step: int) -> float:
        t = step - 1
        if t < warmup_steps:
            return warmup(t)
        done = min((t - warmup_steps) / (max_steps - warmup_steps), 1.0)
        return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * done))

    return factor
