"""ECHO: GRPO on the policy's tokens, plus cross-entropy on tokens that the environment wrote (tool results, …)."""

from collections.abc import Sequence
from typing import Any

import verifiers.v1 as vf

from rlmake.algorithms.grpo import GRPO
from rlmake.algorithms.traces import set_weights, trainable_branches, trainable_traces
from rlmake.core.errors import UserError
from rlmake.core.imports import import_function


class Echo(GRPO):
    """`roles`: role → ce weight alpha of its observation tokens. `filter`: narrows which of them train."""

    def __init__(self, config: Any, context: Any):
        super().__init__(config, context)
        self.keep = None
        if config.filter:
            self.keep = import_function(config.filter.import_path, "algo.filter.import_path", config.filter.kwargs)

    async def score_group(self, episodes: Sequence[vf.Episode]) -> None:
        await super().score_group(episodes)
        alphas = {role: entry.alpha for role, entry in self.config.roles.items()}
        for episode in episodes:
            for trace in trainable_traces(episode):
                weigh_observations(trace, alphas, self._keep_masks(trace))

    def _keep_masks(self, trace: vf.Trace) -> list[list[bool]] | None:
        if self.keep is None:
            return None
        masks, branches = self.keep(trace), trainable_branches(trace)
        sizes, expected = [len(mask) for mask in masks], [len(branch.token_ids) for branch in branches]
        if sizes != expected:
            path = self.config.filter.import_path
            raise UserError(f"algo.filter: '{path}' gave masks of lengths {sizes}, the branches have {expected} tokens")
        return masks


def weigh_observations(trace: vf.Trace, alphas: dict[str, float], keep: list[list[bool]] | None = None) -> None:
    """Stamp ce weights: in each trainable branch, nodes after the first sampled one that were not sampled and whose
    role is in `alphas`; only body tokens where the renderer tells body from scaffold. Shared nodes: the larger weight.
    """
    for index, branch in enumerate(trainable_branches(trace)):
        start, seen_sampled = 0, False
        for node in branch.nodes:
            span = slice(start, start + len(node.token_ids))
            start = span.stop
            if node.sampled:
                seen_sampled = True
            elif seen_sampled and (alpha := alphas.get(node.message.role)):
                body = node.is_content if len(node.is_content) == len(node.token_ids) else [True] * len(node.token_ids)
                kept = keep[index][span] if keep else [True] * len(node.token_ids)
                before = (node.loss_weights or {}).get("ce") or [0.0] * len(node.token_ids)
                new = [alpha if inside and wanted else 0.0 for inside, wanted in zip(body, kept, strict=True)]
                set_weights(node, "ce", [max(old, weight) for old, weight in zip(before, new, strict=True)])
