"""Sampling parameters of training and of evaluation."""

from collections.abc import Mapping
from typing import Any, Literal

from rlmake.config.fields import Config, semantic


class TrainSamplingConfig(Config):
    """How rollouts are sampled for training. Tokens are drawn from the whole temperature-scaled distribution."""

    temperature: float = semantic(1.0, "Temperature.", gt=0)
    max_completion_tokens: int | None = semantic(None, "Most tokens of one completion; what fits when absent.", ge=1)
    extra_body: dict[str, Any] = semantic(dict, "Passed through to the server; nothing that changes what is drawn.")


class EvalSamplingConfig(Config):
    """How episodes are sampled for evaluation; what is absent is the server's default."""

    temperature: float | None = semantic(None, "Temperature; 0: greedy.", ge=0)
    top_p: float | None = semantic(None, "Nucleus probability.", gt=0, le=1)
    top_k: int | None = semantic(None, "Number of candidates; -1: all.", ge=-1)
    min_p: float | None = semantic(None, "Least probability relative to the best candidate.", ge=0, le=1)
    max_completion_tokens: int | None = semantic(None, "Most tokens of one completion.", ge=1)
    reasoning_effort: Literal["minimal", "low", "medium", "high"] | None = semantic(None, "Reasoning effort.")
    extra_body: dict[str, Any] | None = semantic(None, "Passed through to the server.")


ELSEWHERE = {
    "temperature": "is sampling.temperature", "max_tokens": "is sampling.max_completion_tokens",
    "max_completion_tokens": "is sampling.max_completion_tokens", "n": "is group_size", "best_of": "is group_size",
    "seed": "follows from the run's seed", "cache_salt": "follows from the version of the weights",
    "logprobs": "is set for the loss", "top_logprobs": "is set for the loss",
    "stop_token_ids": "follows from the renderer", "extra_body": "is this table",
}  # fmt: skip
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,), "top_k": (-1, 0), "min_p": (0,), "typical_p": (1,), "presence_penalty": (0,),
    "frequency_penalty": (0,), "repetition_penalty": (1,), "length_penalty": (1,), "min_tokens": (0,),
    "logit_bias": ({},), "bad_words": ([],), "allowed_token_ids": (), "logits_processors": ([],),
    "use_beam_search": (False,), "structured_outputs": (), "response_format": ({"type": "text"},),
    "thinking_token_budget": (),
}  # fmt: skip
"""What changes the distribution that tokens are drawn from, with the values at which it does not."""


def training_faults(extra: Mapping[str, Any], *, policy: bool) -> list[tuple[str, str]]:
    """`(key, fault)` of what a training source must not send. `policy`: the loss compares what was drawn with the
    trained model's own probabilities; a frozen model's tokens are learned however they were drawn."""
    faults = [(key, f"{ELSEWHERE[key]}: leave it out here") for key in extra if key in ELSEWHERE]
    if policy:
        text = "training draws from the whole temperature-scaled distribution, as its loss assumes: leave it out"
        drawn = (key for key, value in extra.items() if value is not None and value not in NEUTRAL.get(key, (value,)))
        faults += [(key, text) for key in [*drawn, *(key for key in extra if key.startswith("guided_"))]]
    return faults
