"""What a loss sees and what it returns, and the numerics that every ratio loss shares."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class LossInputs:
    """One packed sequence (a custom loss), or any run of tokens (the built-in ones, which are token-wise).

    All tensors have shape [T]; log-probabilities are fp32 natural logarithms at the sampling temperature.
    """

    trainer_logprobs: Tensor  # log π, with gradient
    inference_logprobs: Tensor  # log μ, of the policy that sampled
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor  # bool, the members of the rl component
    loss_weights: Tensor | None  # None means 1 on every member


@dataclass
class LossOutputs:
    """`loss` is a sum over tokens (never a mean). `metrics`: scalars, or [T] values of which the members count."""

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


def members(values: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """`values` on the mask, `fill` elsewhere; nothing outside the mask reaches forward or backward (`0·inf` would)."""
    return torch.where(mask, values, torch.full_like(values, fill))


def weighted_sum(tokens: Tensor, inputs: LossInputs) -> Tensor:
    """Σ w·tokens over the members."""
    weights = inputs.loss_mask if inputs.loss_weights is None else inputs.loss_weights
    return (members(tokens, inputs.loss_mask) * weights).sum()


def log_ratio(log_pi: Tensor, log_mu: Tensor) -> Tensor:
    """ℓ = log π − log μ, detached, fp32. May be ±inf where one side is; NaN only where a log-probability is NaN."""
    return log_pi.detach().float() - log_mu.float()


def capped_ratio(log_pi: Tensor, log_mu: Tensor, cap: float) -> Tensor:
    """ρ = e^ℓ capped at `cap` in value, with the gradient ρ·∇log π kept.

    `e^{min(ℓ, log cap)}` is a constant and `e^{log π − sg(log π)}` is 1 with the gradient, so no difference of
    infinities is formed even when μ is 0.
    """
    constant = log_ratio(log_pi, log_mu).clamp(max=math.log(cap)).exp()
    return constant * torch.exp(log_pi - log_pi.detach())


def probability_gap(log_pi: Tensor, log_mu: Tensor) -> Tensor:
    """π − μ without cancellation: `e^max·(−expm1(min − max))`, signed, detached, fp32."""
    p, m = log_pi.detach().float(), log_mu.float()
    high, low = torch.maximum(p, m), torch.minimum(p, m)
    return torch.sign(p - m) * high.exp() * -torch.expm1(low - high)


def k3(log_pi: Tensor, log_mu: Tensor) -> Tensor:
    """Mismatch KL per token, `e^ℓ − ℓ − 1` ≥ 0 (Schulman's k3, http://joschu.net/blog/kl-approx.html), detached.

    ℓ is clamped to ±60, so that one stale token shows as a huge number instead of as infinity.
    """
    ell = log_ratio(log_pi, log_mu).clamp(-60.0, 60.0)
    return torch.expm1(ell) - ell
