"""On-policy distillation: the policy's own tokens, each pulled towards a frozen teacher (reverse KL).

The teacher scores the policy's tokens by prefill; the trainer's ref_kl loss does the rest. No reward is used.
"""

import asyncio
from typing import Any

import verifiers.v1 as vf

from rlmake.algorithms.base import Algorithm, Endpoint
from rlmake.algorithms.prefill import Prefill
from rlmake.algorithms.traces import set_reference, trainable_branches, trainable_traces


class OPD(Algorithm):
    action_loss_type = "ref_kl"

    def __init__(self, config: Any, context: Any):
        super().__init__(config, context)
        teacher = config.teacher
        self.teacher = Prefill(Endpoint(teacher.base_url, teacher.name, teacher.api_key_var), "algo.teacher")

    async def score_episode(self, episode: vf.Episode) -> None:
        branches = [branch for trace in trainable_traces(episode) for branch in trainable_branches(trace)]
        scores = await asyncio.gather(*(self.teacher.logprobs(branch.token_ids) for branch in branches))
        for branch, logprobs in zip(branches, scores, strict=True):
            set_reference(branch, logprobs)

    async def close(self) -> None:
        await self.teacher.close()
