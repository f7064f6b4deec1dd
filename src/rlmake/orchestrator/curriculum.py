"""Which task of a source is drawn next, and which finished groups are admitted to training.

Samplers draw from counters, not from a generator with hidden state: draw n of a source is a function of the seed, n,
and what was observed, so a checkpoint needs counters and observations only.
"""

import random
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import verifiers.v1 as vf

from rlmake.algorithms.traces import trainable_nodes, trainable_traces
from rlmake.core.errors import UserError
from rlmake.core.seeds import derive


class Sampler(Protocol):
    def next(self, draw: int) -> int:
        """The task of the source's draw number `draw`."""

    def observe(self, task: int, rewards: Sequence[float]) -> None:
        """Rewards of the clean rollouts of a finished group."""

    def metrics(self) -> dict[str, float]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Standard:
    """Cycle through the tasks in their order; a taskset without an end is walked once."""

    def __init__(self, tasks: int | None):
        self.tasks, self.cursor = tasks, 0

    def next(self, draw: int) -> int:
        task = self.cursor if self.tasks is None else self.cursor % self.tasks
        self.cursor += 1
        return task

    def observe(self, task: int, rewards: Sequence[float]) -> None:
        pass

    def metrics(self) -> dict[str, float]:
        return {"epoch": self.cursor / self.tasks} if self.tasks else {}

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self.cursor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.cursor = state["cursor"]


class DifficultyPool:
    """Draw tasks with the weight of the pool that their last mean reward puts them into.

    A task is in the pool with the smallest threshold ≥ its mean reward (the highest pool beyond all); one that was
    not observed yet has the weight `unseen_weight`.
    """

    def __init__(self, tasks: int | None, config: Any, env: str):
        if tasks is None:
            raise UserError(f"source '{env}': a difficulty_pool sampler needs a taskset that ends")
        self.config, self.env = config, env
        pools = sorted(config.pools.items(), key=lambda item: item[1].threshold)
        self.names = [name for name, _ in pools]
        self.thresholds = np.array([pool.threshold for _, pool in pools])
        self.pool_weights = np.array([pool.weight for _, pool in pools])
        self.rewards = np.full(tasks, np.nan)

    def _pools(self, rewards: np.ndarray) -> np.ndarray:
        return np.minimum(np.searchsorted(self.thresholds, rewards, side="left"), len(self.names) - 1)

    def next(self, draw: int) -> int:
        seen = ~np.isnan(self.rewards)
        weights = np.full(len(self.rewards), float(self.config.unseen_weight))
        weights[seen] = self.pool_weights[self._pools(self.rewards[seen])]
        if weights.sum() <= 0:
            unseen = "" if seen.all() else " or not tried yet, with unseen_weight = 0"
            raise UserError(f"source '{self.env}': every task is in a pool of weight 0{unseen}: there is none to draw")
        cumulative = np.cumsum(weights)
        at = random.Random(derive(self.config.seed, "difficulty_pool", self.env, draw)).random() * cumulative[-1]
        return int(np.searchsorted(cumulative, at, side="right"))

    def observe(self, task: int, rewards: Sequence[float]) -> None:
        if rewards:
            self.rewards[task] = float(np.mean(rewards))

    def metrics(self) -> dict[str, float]:
        seen = self.rewards[~np.isnan(self.rewards)]
        counts = np.bincount(self._pools(seen), minlength=len(self.names)) if len(seen) else np.zeros(len(self.names))
        shares = {f"pool/{name}": float(n) / len(self.rewards) for name, n in zip(self.names, counts, strict=True)}
        return shares | {"pool/unseen": 1 - len(seen) / len(self.rewards)}

    def state_dict(self) -> dict[str, Any]:
        return {"rewards": {str(i): float(r) for i, r in enumerate(self.rewards) if not np.isnan(r)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for task, reward in state["rewards"].items():
            self.rewards[int(task)] = reward


def sampler(config: Any, tasks: int | None, env: str) -> Sampler:
    return Standard(tasks) if config.type == "standard" else DifficultyPool(tasks, config, env)


class AdvantageRange:
    """Rejects a group when every trainable advantage lies in [reject_min, reject_max]; no advantages: admitted."""

    def __init__(self, config: Any):
        self.low, self.high = config.reject_min, config.reject_max

    def admits(self, episodes: Sequence[vf.Episode]) -> bool:
        values = [
            advantage
            for episode in episodes
            for trace in trainable_traces(episode)
            for node in trainable_nodes(trace)
            for advantage in node.advantages or ()
        ]
        return not values or any(not self.low <= value <= self.high for value in values)


GATES = {"advantage_range": AdvantageRange}
