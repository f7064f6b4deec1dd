"""GRPO for proposer–solver environments: solvers compare with attempts at one proposal, proposers with proposals."""

from collections.abc import Sequence
from typing import Any

import verifiers.v1 as vf

from rlmake.algorithms import credit
from rlmake.algorithms.base import Algorithm, AlgorithmContext
from rlmake.algorithms.traces import set_advantages, trainable_traces
from rlmake.core.errors import UserError, nearest


class HierarchicalGRPO(Algorithm):
    """Agents in `episode_agents` are compared within their episode, all others across the group."""

    def __init__(self, config: Any, context: AlgorithmContext):
        super().__init__(config, context)
        for name in config.episode_agents:
            if name not in context.agents or len(context.agents) < 2:
                has = f"which has {', '.join(context.agents)}{nearest(name, context.agents)}"
                raise UserError(f"algo.episode_agents: no role '{name}' beside others in '{context.env_name}', {has}")

    async def score_group(self, episodes: Sequence[vf.Episode]) -> None:
        found = [(episode, trace) for episode in episodes for trace in trainable_traces(episode)]
        within = self.config.episode_agents
        keys = [(trace.agent.name, episode.id if trace.agent.name in within else None) for episode, trace in found]
        advantages = credit.peer_mean(keys, [trace.reward for _, trace in found])
        for (_, trace), advantage in zip(found, advantages, strict=True):
            set_advantages(trace, advantage)
