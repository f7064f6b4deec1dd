"""What every algorithm is: two hooks on episodes, a loss component for sampled tokens, and a state."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import verifiers.v1 as vf

from rlmake.algorithms.traces import route_actions, trainable_traces


@dataclass(frozen=True)
class Endpoint:
    """An inference server: `base_url` ends in /v1; the key is read from the environment variable `api_key_var`."""

    base_url: str
    model: str
    api_key_var: str = "VLLM_API_KEY"


@dataclass(frozen=True)
class AlgorithmContext:
    """What an algorithm may know of its run: the source's name, the live policy's server, the policy's tokenizer, and
    the agents of the environment."""

    env_name: str
    policy: Endpoint
    tokenizer: str
    agents: tuple[str, ...] = ("agent",)


class Algorithm:
    """Per-token credit for the episodes of one source.

    `action_loss_type` names the loss component that sampled (action) tokens feed. Episodes arrive with their traces'
    standing final: `traces.trainable_traces` gives those that count. Hooks may be slow; they are awaited.
    """

    action_loss_type: ClassVar[Literal["rl", "ce", "ref_kl"]] = "rl"

    def __init__(self, config: Any, context: AlgorithmContext):
        self.config, self.context = config, context

    async def score_episode(self, episode: vf.Episode) -> None:
        """Called once per episode that has a trainable trace, in the order in which episodes are accounted for."""

    async def score_group(self, episodes: Sequence[vf.Episode]) -> None:
        """Called once per group when all of it is accounted for; a failed episode in it has no trainable trace."""

    async def finish(self, episodes: Sequence[vf.Episode]) -> None:
        """Score a whole group, then route its sampled tokens to their loss component."""
        await self.score_group(episodes)
        for episode in episodes:
            for trace in trainable_traces(episode):
                route_actions(trace, self.action_loss_type)

    async def close(self) -> None:
        """Release what the algorithm holds (connections)."""

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state that a checkpoint must hold."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`'s."""
