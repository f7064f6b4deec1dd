"""The rl component: token-wise policy losses. Formulas: spec rl-and-trainer.md 1.3.

Notation: A advantage, ρ = π/μ, ρ_c = ρ capped at `max_importance_ratio` in value with its gradient kept. Each function
returns a sum over the members; a masked token contributes 0 and stays in the normaliser.
"""

import math

import torch
from torch import Tensor

from rlmake.trainer.losses.inputs import (
    LossInputs,
    LossOutputs,
    capped_ratio,
    log_ratio,
    members,
    probability_gap,
    weighted_sum,
)

LOWEST = -1e4  # stands for log 0 where a log-ratio itself is squared


def ipo(inputs: LossInputs, *, eps: float, adv_tau: float, max_importance_ratio: float, kl_tau: float) -> LossOutputs:
    """−τ·A·ρ_c on tokens with |π − μ| ≤ eps; with `kl_tau`, plus kl_tau·ℓ² on every member."""
    pi, mu, adv = _streams(inputs)
    masked = probability_gap(pi, mu).abs() > eps
    tokens = members(-adv_tau * adv * capped_ratio(pi, mu, max_importance_ratio), ~masked)
    if kl_tau:
        tokens = tokens + kl_tau * (pi - mu.clamp(min=LOWEST)) ** 2
    return _outputs(inputs, tokens, masked, log_ratio(pi, mu) > math.log(max_importance_ratio))


def icepop(inputs: LossInputs, *, ratio_low: float, ratio_high: float, adv_tau: float) -> LossOutputs:
    """−τ·A·ρ on tokens with ratio_low ≤ ρ ≤ ratio_high (tested on the logarithm)."""
    pi, mu, adv = _streams(inputs)
    ell = log_ratio(pi, mu)
    masked = (ell < math.log(ratio_low)) | (ell > math.log(ratio_high))
    tokens = -adv_tau * adv * capped_ratio(pi, mu, ratio_high)
    return _outputs(inputs, members(tokens, ~masked), masked, torch.zeros_like(masked))


def ppo(
    inputs: LossInputs, *, clip_low: float, clip_high: float, adv_tau: float, max_importance_ratio: float
) -> LossOutputs:
    """−τ·min(A·ρ_c, A·clip(ρ_c, 1 − clip_low, 1 + clip_high)) (Schulman et al. 2017, https://arxiv.org/abs/1707.06347)."""
    pi, mu, adv = _streams(inputs)
    ratio_low, ratio_high = 1.0 - clip_low, 1.0 + clip_high
    ratio = capped_ratio(pi, mu, max_importance_ratio)
    clipped = ratio.clamp(ratio_low, ratio_high)
    tokens = -adv_tau * torch.minimum(adv * ratio, adv * clipped)
    masked = ((adv > 0) & (ratio.detach() > ratio_high)) | ((adv < 0) & (ratio.detach() < ratio_low))
    return _outputs(inputs, tokens, masked, log_ratio(pi, mu) > math.log(max_importance_ratio))


def cispo(inputs: LossInputs, *, ratio_low: float, ratio_high: float, adv_tau: float) -> LossOutputs:
    """−τ·sg(clip(ρ, ratio_low, ratio_high))·A·log π (MiniMax-M1, https://arxiv.org/abs/2506.13585); low 0 is off."""
    pi, mu, adv = _streams(inputs)
    ell = log_ratio(pi, mu)
    low = math.log(ratio_low) if ratio_low > 0 else -math.inf
    clipped = (ell > math.log(ratio_high)) | (ell < low)
    coefficient = ell.clamp(low, math.log(ratio_high)).exp()
    return _outputs(inputs, -adv_tau * coefficient * adv * pi, torch.zeros_like(clipped), clipped)


def _streams(inputs: LossInputs) -> tuple[Tensor, Tensor, Tensor]:
    """log π, log μ, A on the members; harmless constants elsewhere."""
    mask = inputs.loss_mask
    return (
        members(inputs.trainer_logprobs, mask),
        members(inputs.inference_logprobs, mask),
        members(inputs.advantages, mask),
    )


def _outputs(inputs: LossInputs, tokens: Tensor, masked: Tensor, clamped: Tensor) -> LossOutputs:
    metrics = {"is_masked": masked.float(), "is_clamped": clamped.float()}
    return LossOutputs(weighted_sum(tokens, inputs), metrics)
