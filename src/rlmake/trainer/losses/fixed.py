"""The ce and ref_kl components. They take no configuration and ignore `[trainer.loss]` (spec 1.3)."""

from torch import Tensor

from rlmake.trainer.losses.inputs import capped_ratio, members, probability_gap

MAX_FALL, CAP = 0.2, 1e4


def ce(log_pi: Tensor, weights: Tensor) -> Tensor:
    """Σ −w·log π over the members (w ≠ 0). `log_pi`, `weights` [T]."""
    return -(members(log_pi, weights != 0) * weights).sum()


def ref_kl(log_pi: Tensor, log_mu: Tensor, log_ref: Tensor, weights: Tensor) -> Tensor:
    """Σ −w·g·ρ_c with g = sg(log π_ref − log π), over members whose probability has not fallen by more than 0.2.

    The policy gradient of the reverse KL to the reference; ρ_c is capped at 1e4. All tensors [T].
    """
    mask = weights != 0
    pi, mu, ref = members(log_pi, mask), members(log_mu, mask), members(log_ref, mask)
    kept = mask & ~(probability_gap(pi, mu) < -MAX_FALL)
    gain = (ref - pi).detach()
    return -(members(gain * capped_ratio(pi, mu, CAP), kept) * weights).sum()
