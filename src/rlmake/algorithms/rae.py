"""RAE, role-conditioned advantage estimation: reward minus a running baseline per agent of the environment.

SPIRAL, https://arxiv.org/abs/2506.24119. For self-play with several agents; needs no group.
"""

from typing import Any

import verifiers.v1 as vf

from rlmake.algorithms import credit
from rlmake.algorithms.base import Algorithm
from rlmake.algorithms.traces import set_advantages, trainable_traces


class RAE(Algorithm):
    """`baselines`: agent name → exponential moving average of its rewards, from 0. They are checkpointed."""

    def __init__(self, config: Any, context: Any):
        super().__init__(config, context)
        self.baselines: dict[str, float] = {}

    async def score_episode(self, episode: vf.Episode) -> None:
        for trace in trainable_traces(episode):
            baseline = self.baselines.get(trace.agent.name, 0.0)
            advantage, self.baselines[trace.agent.name] = credit.running_baseline(
                baseline, trace.reward, self.config.decay
            )
            set_advantages(trace, advantage)

    def state_dict(self) -> dict[str, Any]:
        return {"baselines": dict(self.baselines)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.baselines = {name: float(value) for name, value in state["baselines"].items()}
