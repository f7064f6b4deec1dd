"""The step's loss `L = Σ L_rl / N_rl + Σ L_ce / N_ce + Σ L_ref_kl / N_ref_kl` (spec 1.3), one micro-batch at a time.

Each N is global: over every micro-batch and rank of the step, floored at 1. So the result does not depend on how the
samples were split, and there is no length normalisation per sequence.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rlmake.trainer.losses import fixed
from rlmake.trainer.losses.inputs import LossInputs, k3, members
from rlmake.trainer.losses.registry import RLLoss

NAMES = ("rl", "ce", "ref_kl")


@dataclass
class Streams:
    """The loss's view of one packed row, reduced to the N tokens that any component or statistic needs.

    `sequences` are the runs of these tokens by packed sequence, lengths summing to N.
    """

    inference_logprobs: Tensor  # float32 [N]
    advantages: Tensor  # float32 [N]
    loss_mask: Tensor  # bool [N]
    rl_weights: Tensor | None  # float32 [N]
    ce_weights: Tensor | None
    ref_kl_weights: Tensor | None
    ref_logprobs: Tensor | None
    sequences: list[int]

    def to(self, device: torch.device) -> "Streams":
        if device.type == "cpu":
            return self
        moved = {
            name: value.pin_memory().to(device, non_blocking=True)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return Streams(**{**vars(self), **moved})

    def take(self, chosen: Tensor, empty: bool) -> "Streams":
        """The tokens `chosen` [M] as one run; nothing of them counts where they only fill an `empty` row."""

        def part(name: str) -> Tensor | None:
            values = getattr(self, name)
            if values is None:
                return None
            counts = name in ("loss_mask", "rl_weights", "ce_weights", "ref_kl_weights")
            return torch.zeros_like(values[chosen]) if empty and counts else values[chosen]

        names = [name for name in vars(self) if name != "sequences"]
        return Streams(**{name: part(name) for name in names}, sequences=[len(chosen)])

    @property
    def rl_members(self) -> Tensor:
        return self.loss_mask if self.rl_weights is None else self.loss_mask & (self.rl_weights != 0)

    def counts(self) -> Tensor:
        """float64 [3]: Σ of rl weights, number of ce members, number of ref_kl members, of this row."""
        rl = self.rl_members if self.rl_weights is None else members(self.rl_weights, self.rl_members)
        zero = torch.zeros((), dtype=torch.float64, device=self.loss_mask.device)
        ce = zero if self.ce_weights is None else (self.ce_weights != 0).sum()
        ref = zero if self.ref_kl_weights is None else (self.ref_kl_weights != 0).sum()
        return torch.stack([rl.double().sum(), ce.double(), ref.double()])


@dataclass
class Outputs:
    """`loss` is this row's share of the step's loss; `sums` its components before division, detached.

    `tokens`: statistics [N] with the mask [N] of the tokens that they are about. `scalars`: of a custom loss.
    """

    loss: Tensor
    sums: Tensor  # float64 [3]
    tokens: dict[str, tuple[Tensor, Tensor]]
    scalars: dict[str, Tensor]


def compute(logprobs: Tensor, streams: Streams, counts: Tensor, rl_loss: RLLoss, token_wise: bool) -> Outputs:
    """Loss and statistics of one row. `logprobs` float32 [N] with gradient; `counts` float64 [3], global.

    The anchor `Σ logprobs · 0` keeps the backward pass alive in a row without members.
    """
    scale = 1.0 / counts.clamp(min=1.0)
    rl, tokens, scalars = _rl(logprobs, streams, rl_loss, token_wise)
    parts = [rl]
    if streams.ce_weights is not None:
        parts.append(fixed.ce(logprobs, streams.ce_weights))
        mask = streams.ce_weights != 0
        tokens["nll"] = (-members(logprobs.detach(), mask), mask)
    else:
        parts.append(logprobs.new_zeros(()))
    if streams.ref_kl_weights is not None:
        assert streams.ref_logprobs is not None
        weights, mu = streams.ref_kl_weights, streams.inference_logprobs
        parts.append(fixed.ref_kl(logprobs, mu, streams.ref_logprobs, weights))
        tokens["ref_kl"] = (members(logprobs.detach() - streams.ref_logprobs, weights != 0), weights != 0)
    else:
        parts.append(logprobs.new_zeros(()))
    loss = sum((part * scale[i].float() for i, part in enumerate(parts)), logprobs.sum() * 0.0)
    return Outputs(loss, torch.stack([part.detach().double() for part in parts]), tokens, scalars)


def _rl(
    logprobs: Tensor, streams: Streams, rl_loss: RLLoss, token_wise: bool
) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]:
    """The rl component's sum, its statistics per token, and a custom loss's scalars (mean over sequences)."""
    mask = streams.rl_members
    total, per_token, scalars = logprobs.new_zeros(()), {}, {}
    for part, inputs in _inputs(logprobs, streams, mask, whole=token_wise):
        outputs = rl_loss(inputs)
        total = total + outputs.loss
        for name, value in outputs.metrics.items():
            if value.ndim:
                per_token.setdefault(name, torch.zeros_like(streams.advantages))[part] = value.detach().float()
            else:
                scalars.setdefault(name, []).append(value.detach().float())
    tokens = {name: (values, mask) for name, values in per_token.items()}
    about = mask if streams.ref_kl_weights is None else streams.loss_mask & (mask | (streams.ref_kl_weights != 0))
    kl = k3(members(logprobs, about), members(streams.inference_logprobs, about))
    tokens["mismatch_kl"] = (kl, about)
    if "is_masked" in tokens:
        dropped = tokens["is_masked"][0] != 0
        tokens["masked_mismatch_kl"] = (kl, mask & dropped)
        tokens["unmasked_mismatch_kl"] = (kl, mask & ~dropped)
    return total, tokens, {name: torch.stack(values).mean() for name, values in scalars.items()}


def _inputs(logprobs: Tensor, streams: Streams, mask: Tensor, whole: bool) -> Iterator[tuple[slice, LossInputs]]:
    """All tokens at once, or each sequence that has a member."""
    start = 0
    for size in [len(logprobs)] if whole else streams.sequences:
        part = slice(start, start + size)
        start += size
        if not whole and not mask[part].any():
            continue
        yield (
            part,
            LossInputs(
                trainer_logprobs=logprobs[part],
                inference_logprobs=streams.inference_logprobs[part],
                ref_logprobs=None if streams.ref_logprobs is None else streams.ref_logprobs[part],
                advantages=streams.advantages[part],
                loss_mask=mask[part],
                loss_weights=None if streams.rl_weights is None else streams.rl_weights[part],
            ),
        )
