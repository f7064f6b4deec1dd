"""Advantages as pure functions of rewards, in float64.

Every baseline is computed from differences to the first reward, `d_i = r_i − r_0`: algebraically the same as the
formula, and equal rewards give exactly zero whatever their binary expansion, which is what "no signal" is tested by.
"""

import math
from collections.abc import Hashable, Sequence


def group_mean(rewards: Sequence[float], weights: Sequence[float] | None = None) -> list[float]:
    """GRPO without standard deviation: `A_i = r_i − Σ w_j r_j / Σ w_j` (w = 1 by default). [] → [], [r] → [0]."""
    if not rewards:
        return []
    weights = [1.0] * len(rewards) if weights is None else list(weights)
    total = math.fsum(weights)
    if total <= 0:
        raise ValueError("the weights of a baseline must have a positive sum")
    differences = [reward - rewards[0] for reward in rewards]
    mean = math.fsum(w * d for w, d in zip(weights, differences, strict=True)) / total
    return [difference - mean for difference in differences]


def max_rl(rewards: Sequence[float]) -> list[float]:
    """MaxRL: `A_i = (r_i − m) / m` with the group mean m; all zero where m ≤ 0."""
    if not rewards:
        return []
    mean = math.fsum(rewards) / len(rewards)
    return [advantage / mean for advantage in group_mean(rewards)] if mean > 0 else [0.0] * len(rewards)


def penalised(
    rewards: Sequence[float],
    outputs: Sequence[int],
    inputs: Sequence[int],
    turns: Sequence[int],
    output_weight: float = 0.25,
    input_weight: float = 0.1,
    turn_weight: float = 0.1,
) -> list[float]:
    """Linear length penalty: `r'_i = r_i − mean(r) · frac_i`, with
    `frac_i = w_out·out_i/max(1, max out) + w_in·in_i/max(1, max in) + w_turn·turns_i/max(1, max turns)`."""
    if not rewards:
        return []
    mean = math.fsum(rewards) / len(rewards)
    columns = ((output_weight, outputs), (input_weight, inputs), (turn_weight, turns))
    return [
        reward - mean * math.fsum(weight * column[i] / max(1, *column) for weight, column in columns)
        for i, reward in enumerate(rewards)
    ]


def peer_mean(keys: Sequence[Hashable], rewards: Sequence[float]) -> list[float]:
    """Reward minus the mean over those with the same key; alone with its key: 0."""
    advantages = [0.0] * len(rewards)
    for key in dict.fromkeys(keys):
        members = [i for i, other in enumerate(keys) if other == key]
        for i, advantage in zip(members, group_mean([rewards[i] for i in members]), strict=True):
            advantages[i] = advantage
    return advantages


def running_baseline(baseline: float, reward: float, decay: float) -> tuple[float, float]:
    """RAE (SPIRAL, https://arxiv.org/abs/2506.24119): `A = r − b` with the baseline before its update, and the
    updated baseline `decay·b + (1 − decay)·r`."""
    return reward - baseline, decay * baseline + (1.0 - decay) * reward
