"""MaxRL: GRPO with advantages divided by the group's mean reward (maximum-likelihood RL)."""

from collections.abc import Sequence

import verifiers.v1 as vf
from loguru import logger

from rlmake.algorithms import credit
from rlmake.algorithms.base import Algorithm
from rlmake.algorithms.traces import set_advantages, trainable_traces


class MaxRL(Algorithm):
    """A group whose mean reward is not positive carries no signal: the objective, log of the success probability,
    has no estimate there. Where that is because rewards are negative, the log says so once."""

    _warned = False

    async def score_group(self, episodes: Sequence[vf.Episode]) -> None:
        traces = [trace for episode in episodes for trace in trainable_traces(episode)]
        rewards = [trace.reward for trace in traces]
        if min(rewards, default=0.0) < 0 and sum(rewards) <= 0 and not self._warned:
            self._warned = True
            logger.warning(f"{self.context.env_name}: max_rl needs rewards ≥ 0; groups of mean ≤ 0 get no advantage")
        for trace, advantage in zip(traces, credit.max_rl(rewards), strict=True):
            set_advantages(trace, advantage)
