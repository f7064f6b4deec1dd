"""On-policy self-distillation: the policy's tokens, pulled towards the policy itself that has seen a demonstration."""

import asyncio
from typing import Any

import verifiers.v1 as vf

from rlmake.algorithms.base import Algorithm
from rlmake.algorithms.prefill import Prefill
from rlmake.algorithms.traces import set_reference, trainable_branches, trainable_traces
from rlmake.core.errors import UserError
from rlmake.models.renderer import make_renderer


class OPSD(Algorithm):
    """The teacher is the live policy; the demonstration stands in a system message before the whole branch."""

    action_loss_type = "ref_kl"

    def __init__(self, config: Any, context: Any):
        super().__init__(config, context)
        self.teacher = Prefill(context.policy, "the policy")
        self._renderer = None

    async def score_episode(self, episode: vf.Episode) -> None:
        for trace in trainable_traces(episode):
            hint = await asyncio.to_thread(self._hint_ids, self._demonstration(trace))
            branches = trainable_branches(trace)
            # A salt of its own: nothing of a prefix that an engine cached under other weights may be used again.
            scores = await asyncio.gather(
                *(self.teacher.logprobs(hint + branch.token_ids, cache_salt=episode.id) for branch in branches)
            )
            for branch, logprobs in zip(branches, scores, strict=True):
                set_reference(branch, logprobs[len(hint) :])

    def _demonstration(self, trace: vf.Trace) -> str:
        """From `trace.info`, else from the task; one that lacks it is the user's to mend."""
        key, data = self.config.demo_key, trace.task.data
        found = trace.info.get(key)
        if found is None:
            found = getattr(data, key, None) or (data.model_extra or {}).get(key)
        if found is None:
            raise UserError(
                f"{self.context.env_name}: opsd needs algo.demo_key '{key}' in trace.info or on the task, "
                f"task {trace.task.key or data.idx} has none"
            )
        return str(found)

    def _hint_ids(self, demonstration: str) -> list[int]:
        if self._renderer is None:
            self._renderer = make_renderer(self.context.tokenizer, self.config.renderer)
        text = self.config.template.replace("{demonstration}", demonstration)
        return list(self._renderer.render_ids([{"role": "system", "content": text}], add_generation_prompt=False))

    async def close(self) -> None:
        await self.teacher.close()
