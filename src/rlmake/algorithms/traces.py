"""Reading and stamping verifiers' traces: which of them train, which nodes they train, per-token streams.

Nodes hold `advantages` and `reference_logprobs` compactly (one value per sampled token) and `loss_weights[name]`
aligned to all their tokens. A node that several branches share is stamped once.
"""

from collections.abc import Sequence
from typing import Literal

import verifiers.v1 as vf


def trainable_traces(episode: vf.Episode) -> list[vf.Trace]:
    """Traces that give credit: no error, their agent trains, at least one sampled token."""
    return [
        trace
        for trace in episode.traces
        if trace.ok and trace.agent.trainable and any(True in node.mask for node in trainable_nodes(trace))
    ]


def trainable_branches(trace: vf.Trace) -> list[vf.Branch]:
    return [branch for branch in trace.branches if branch.trainable]


def trainable_nodes(trace: vf.Trace) -> list[vf.MessageNode]:
    """Nodes of the trainable branches, each once, in branch order."""
    if _is_chain(trace):  # one branch, as most traces are: it need not be built, which costs more than all else here
        return list(trace.nodes)
    return list({id(node): node for branch in trainable_branches(trace) for node in branch.nodes}.values())


def _is_chain(trace: vf.Trace) -> bool:
    """Whether each message follows the one before it, and nothing says that the harness dropped a branch."""
    return all(
        node.parent == (number - 1 if number else None) and not node.semantic_parents
        for number, node in enumerate(trace.nodes)
    )


def sampled_tokens(trace: vf.Trace) -> int:
    """L: trainable sampled tokens; a token shared by branches counts once."""
    return sum(node.mask.count(True) for node in trainable_nodes(trace))


LARGEST = 3.4028234663852886e38  # a float32


def settle(episode: vf.Episode) -> None:
    """Decide an episode's standing before credit: a failed, timed-out or unscored part fails all of it.

    An unscored reward (None) or one that is no finite number in float32 is recorded as the error `RewardError`.
    """
    for trace in episode.traces:
        bad = [name for name, reward in trace.rewards.items() if reward is None or not abs(reward.value) <= LARGEST]
        if trace.ok and bad:
            trace.ok = False
            trace.errors.append(vf.Error(type="RewardError", message=f"no finite reward: {', '.join(sorted(bad))}"))
    failed = not episode.ok or episode.is_timeout or any(not t.ok or t.is_timeout for t in episode.traces)
    if failed:
        episode.ok = False
        for trace in episode.traces:
            trace.ok = False


def set_advantages(trace: vf.Trace, value: float | Sequence[float]) -> None:
    """A scalar for every sampled token of the trace, or one value per sampled token (all turns, all branches)."""
    counted = [(node, node.mask.count(True)) for node in trainable_nodes(trace)]
    if isinstance(value, int | float):
        for node, count in counted:
            if count:
                node.advantages = [float(value)] * count
        return
    values, total = [float(v) for v in value], sum(count for _, count in counted)
    if len(values) != total:
        raise ValueError(f"{len(values)} advantages for {total} sampled tokens")
    start = 0
    for node, count in counted:
        if count:
            node.advantages = values[start : start + count]
        start += count


def set_weights(node: vf.MessageNode, name: Literal["rl", "ce", "ref_kl"], weights: Sequence[float]) -> None:
    """A loss-weight stream of one node, aligned to all its tokens."""
    if len(weights) != len(node.token_ids):
        raise ValueError(f"{len(weights)} weights for {len(node.token_ids)} tokens")
    node.loss_weights = (node.loss_weights or {}) | {name: [float(weight) for weight in weights]}


def route_actions(trace: vf.Trace, component: Literal["rl", "ce", "ref_kl"]) -> None:
    """Sampled tokens feed `component`: weight 1 there and 0 for rl. For "rl" the absent stream already says so."""
    if component == "rl":
        return
    for node in trainable_nodes(trace):
        set_weights(node, component, [1.0 if sampled else 0.0 for sampled in node.mask])
        set_weights(node, "rl", [0.0] * len(node.mask))


def set_reference(branch: vf.Branch, logprobs: Sequence[float]) -> None:
    """Reference logprobs of a branch, given for all its tokens, onto its sampled nodes (compactly)."""
    if len(logprobs) != len(branch.token_ids):
        raise ValueError(f"{len(logprobs)} reference logprobs for {len(branch.token_ids)} tokens")
    start = 0
    for node in branch.nodes:
        span = logprobs[start : start + len(node.token_ids)]
        start += len(node.token_ids)
        if any(node.mask) and node.reference_logprobs is None:
            node.reference_logprobs = [float(v) for v, sampled in zip(span, node.mask, strict=True) if sampled]
