"""GRPO: reward minus the mean of its group, no division by the standard deviation."""

from collections.abc import Sequence

import verifiers.v1 as vf

from rlmake.algorithms import credit
from rlmake.algorithms.base import Algorithm
from rlmake.algorithms.traces import sampled_tokens, set_advantages, set_weights, trainable_nodes, trainable_traces


class GRPO(Algorithm):
    """Options: linear length penalty, baseline weighted by trainable tokens, loss weighted per prompt."""

    async def score_group(self, episodes: Sequence[vf.Episode]) -> None:
        traces = [trace for episode in episodes for trace in trainable_traces(episode)]
        if not traces:
            return
        rewards = [trace.reward for trace in traces]
        if (penalty := self.config.length_penalty) is not None:
            outputs = [trace.num_output_tokens for trace in traces]
            rewards = credit.penalised(
                rewards,
                outputs,
                [trace.num_total_tokens - out for trace, out in zip(traces, outputs, strict=True)],
                [trace.num_turns for trace in traces],
                penalty.num_output_tokens_weight,
                penalty.num_input_tokens_weight,
                penalty.num_turns_weight,
            )
        lengths = [sampled_tokens(trace) for trace in traces]
        advantages = credit.group_mean(rewards, lengths if self.config.length_weighted_baseline else None)
        for trace, advantage in zip(traces, advantages, strict=True):
            set_advantages(trace, advantage)
            if self.config.loss_aggregation == "prompt":
                weight_per_prompt(trace, sum(lengths))


def weight_per_prompt(trace: vf.Trace, group_tokens: int) -> None:
    """Every trainable token of a group weighs 1/T_q, so each group weighs 1 in N_rl whatever its length."""
    for node in trainable_nodes(trace):
        set_weights(node, "rl", [1.0 / group_tokens if sampled else 0.0 for sampled in node.mask])
