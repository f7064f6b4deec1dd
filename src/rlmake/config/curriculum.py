"""Which tasks are drawn, and which finished groups are admitted to training."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlmake.config.fields import Config, group, semantic
from rlmake.config.refused import Refused


class StandardSampler(Config):
    """Cycle through the tasks."""

    type: Literal["standard"] = semantic("standard", "Sampler.")


class Pool(Config):
    """Tasks whose mean reward is at most `threshold` (and above the next lower pool's)."""

    threshold: float = semantic(..., "Largest mean reward of the pool, inclusive.")
    weight: float = semantic(..., "Weight of the pool when a task is drawn.", ge=0)


def _pools() -> dict[str, Pool]:
    return {
        "hard": Pool(threshold=0.25, weight=0.2),
        "normal": Pool(threshold=0.75, weight=1.0),
        "easy": Pool(threshold=1.0, weight=0.2),
    }


class DifficultyPoolSampler(Config):
    """Draw tasks by the pool their mean reward puts them into."""

    type: Literal["difficulty_pool"] = semantic("difficulty_pool", "Sampler.")
    pools: dict[str, Pool] = semantic(_pools, "Pools by name; giving any replaces the table.")
    unseen_weight: float = semantic(1.0, "Weight of tasks that were not tried yet.", ge=0)
    seed: int = semantic(42, "Seed of the draws.")

    @model_validator(mode="after")
    def _pools_make_sense(self):
        faults = []
        if not self.pools:
            faults.append(("pools", "needs at least one pool"))
        elif not any(pool.weight > 0 for pool in self.pools.values()):
            faults.append(("pools", "needs at least one pool with a positive weight"))
        thresholds = [pool.threshold for pool in self.pools.values()]
        if len(set(thresholds)) != len(thresholds):
            faults.append(("pools", "two pools have the same threshold"))
        if faults:
            raise Refused(faults)
        return self


class AdvantageRange(Config):
    """Rejects a group when every trainable advantage lies inside the range."""

    type: Literal["advantage_range"] = semantic("advantage_range", "Gate.")
    reject_min: float = semantic(0.0, "Lower end, inclusive.")
    reject_max: float = semantic(0.0, "Upper end, inclusive.")

    @model_validator(mode="after")
    def _ordered(self):
        if self.reject_min > self.reject_max:
            raise Refused(("reject_min", f"must be ≤ reject_max = {self.reject_max}, not {self.reject_min}"))
        return self


class CurriculumConfig(Config):
    """Sampler of tasks and gates on groups."""

    sampler: Annotated[StandardSampler | DifficultyPoolSampler, Field(discriminator="type")] = group(
        StandardSampler(), "Which task is drawn next."
    )
    gates: dict[str, AdvantageRange] = semantic(dict, "Gates by name; a group must pass all.")
