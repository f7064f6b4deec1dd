"""Reasoning-gym: any data set of the package of that name, asked in one turn and scored by the package's own rule."""

from typing import Any, Literal

import verifiers.v1 as vf
from pydantic import Field

from rlmake.core.errors import UserError
from rlmake.envs.made import identity, reasoning


class GymData(vf.TaskData):
    """What scoring needs to make the data set's entry again."""

    dataset: str
    options: dict[str, Any]
    seed: int
    index: int


class GymTask(vf.Task[GymData]):
    """One question, one reply."""

    @property
    def key(self) -> str:
        return self.data.id or self.hash

    @vf.stop
    async def replied(self, trace: vf.Trace) -> bool:
        """End after the first reply."""
        return trace.num_turns > 0

    @vf.reward(weight=1.0)
    async def gym_score(self, trace: vf.Trace) -> float:
        """The data set's own score of the whole reply, in [0, 1]."""
        data, entry = reasoning.entry(self.data.dataset, self.data.options, self.data.seed, self.data.index)
        return float(data.score_answer(answer=trace.last_reply, entry=entry))


class ReasoningGymConfig(vf.TasksetConfig):
    """Which tasks."""

    dataset: str
    """Data set of the package, e.g. chain_sum."""
    options: dict[str, Any] = {}
    """Options of the data set."""
    size: int = Field(1000, ge=1)
    """Number of tasks, all different."""
    seed: int = Field(0, ge=0)
    """Seed of the data set."""
    split: Literal["all", "train", "heldout"] = "all"
    """One side of the split that data sets of `source.type = "reasoning-gym"` use: the question's hash decides."""
    instruction: str | None = None
    """System prompt of every task; None: the question alone."""


class ReasoningGymTaskset(vf.Taskset[GymTask, ReasoningGymConfig]):
    """The first `size` distinct questions of the side."""

    def load(self):
        config = self.config
        side = {"all": None, "train": False, "heldout": True}[config.split]
        try:
            taken = reasoning.take(config.dataset, config.options, config.seed, side, config.size)
        except UserError as error:
            raise ValueError(str(error)) from None
        for index, entry in taken:
            data = GymData(
                id=identity(reasoning.TASK, entry["question"]),
                prompt=entry["question"],
                system_prompt=config.instruction,
                dataset=config.dataset,
                options=config.options,
                seed=config.seed,
                index=index,
            )
            yield GymTask(data, config.task)


__all__ = ["ReasoningGymTaskset"]
