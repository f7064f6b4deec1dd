"""Optimizers and learning-rate schedules of both trainers."""

from typing import Annotated, Literal

from pydantic import Field

from rlmake.config.fields import Config, semantic


class _Optim(Config):
    lr: float = semantic(1e-6, "Peak learning rate.", ge=0)
    weight_decay: float | Literal["auto"] = semantic("auto", "Weight decay; auto: 0.0 for RL, 0.01 for SFT.")
    max_norm: float | None = semantic(1.0, "Global gradient norm to clip to; None: no clipping.", gt=0)


class AdamWConfig(_Optim):
    """AdamW."""

    type: Literal["adamw"] = semantic("adamw", "Optimizer.")
    betas1: float = semantic(0.9, "Decay of the first moment.", ge=0, lt=1)
    betas2: float = semantic(0.999, "Decay of the second moment.", ge=0, lt=1)
    eps: float = semantic(1e-8, "Added to the denominator.", gt=0)


class SGDConfig(_Optim):
    """Stochastic gradient descent with momentum."""

    type: Literal["sgd"] = semantic("sgd", "Optimizer.")
    nesterov: bool = semantic(True, "Nesterov momentum.")
    momentum: float = semantic(0.9, "Momentum.", ge=0, lt=1)


class MuonConfig(_Optim):
    """Muon for matrices, AdamW for the rest (embeddings, head, vectors)."""

    type: Literal["muon"] = semantic("muon", "Optimizer.")
    mu: float = semantic(0.95, "Momentum of Muon.", ge=0, lt=1)
    betas1: float = semantic(0.9, "Decay of the first moment of the AdamW part.", ge=0, lt=1)
    betas2: float = semantic(0.95, "Decay of the second moment of the AdamW part.", ge=0, lt=1)
    eps: float = semantic(1e-8, "Added to the denominator of the AdamW part.", gt=0)


class SignSGDConfig(_Optim):
    """`p ← p − lr·weight_decay·p − lr·sign(g)`."""

    type: Literal["sign_sgd"] = semantic("sign_sgd", "Optimizer.")


Optim = Annotated[AdamWConfig | SGDConfig | MuonConfig | SignSGDConfig, Field(discriminator="type")]


class ConstantSchedule(Config):
    """The peak rate throughout."""

    type: Literal["constant"] = semantic("constant", "Schedule.")


class LinearSchedule(Config):
    """Linear warm-up, flat, linear decay over the last `decay_steps`, whose last step runs at `min_lr`."""

    type: Literal["linear"] = semantic("linear", "Schedule.")
    warmup_steps: int = semantic(10, "Steps of warm-up.", ge=0)
    decay_steps: int = semantic(10, "Steps of decay at the end.", ge=0)
    min_lr: float = semantic(0.0, "Rate at the end of the decay.", ge=0)


class CosineSchedule(Config):
    """Linear warm-up, then a cosine down to `min_lr` at `max_steps`."""

    type: Literal["cosine"] = semantic("cosine", "Schedule.")
    warmup_steps: int = semantic(10, "Steps of warm-up.", ge=0)
    min_lr: float = semantic(0.0, "Rate at the end.", ge=0)


Scheduler = Annotated[ConstantSchedule | LinearSchedule | CosineSchedule, Field(discriminator="type")]


def depends_on_max_steps(scheduler: Config) -> bool:
    """Whether another `max_steps` gives another trajectory from the first step on that differs."""
    return scheduler.type == "cosine" or (scheduler.type == "linear" and scheduler.decay_steps > 0)


def warmup_fault(scheduler: Config, max_steps: int | None) -> str | None:
    """Why a schedule without a decay is no good: it ends before its warm-up does.

    Asked of what a user writes, not of every configuration: a build that wants an early step stops there.
    """
    if max_steps is None or scheduler.type != "linear" or scheduler.decay_steps or scheduler.warmup_steps <= max_steps:
        return None
    return f"warmup_steps = {scheduler.warmup_steps} exceeds max_steps = {max_steps}"


def schedule_faults(scheduler: Config, max_steps: int | None) -> list[tuple[str, str]]:
    """`(key, fault)` of a schedule that does not fit `max_steps`."""
    if scheduler.type == "linear":
        warmup, decay = scheduler.warmup_steps, scheduler.decay_steps
        if warmup == decay == 0:
            return [("scheduler", "linear needs warmup_steps or decay_steps above 0")]
        if decay and max_steps is None:
            return [("scheduler.decay_steps", "a decay needs max_steps")]
        if decay and warmup + decay > max_steps:
            return [("scheduler", f"warmup_steps + decay_steps = {warmup + decay} exceeds max_steps = {max_steps}")]
    if scheduler.type == "cosine":
        if max_steps is None:
            return [("scheduler", "cosine needs max_steps")]
        if scheduler.warmup_steps >= max_steps:
            return [("scheduler.warmup_steps", f"must be below max_steps = {max_steps}, not {scheduler.warmup_steps}")]
    return []
