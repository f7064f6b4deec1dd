"""Hard distillation: a frozen model generates the rollouts, the policy trains on all their tokens (cross-entropy)."""

from rlmake.algorithms.base import Algorithm


class SFT(Algorithm):
    """No advantage, no reward; `sampling.source` names the frozen model. Its rollouts never go stale."""

    action_loss_type = "ce"
