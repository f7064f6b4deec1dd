"""Sampling parameters of training and of evaluation."""

from typing import Any, Literal

from rlmake.config.fields import Config, semantic


class TrainSamplingConfig(Config):
    """How rollouts are sampled for training. Tokens are drawn from the whole temperature-scaled distribution."""

    temperature: float = semantic(1.0, "Temperature.", gt=0)
    max_completion_tokens: int | None = semantic(None, "Most tokens of one completion; what fits when absent.", ge=1)
    extra_body: dict[str, Any] = semantic(dict, "Passed through to the server.")


class EvalSamplingConfig(Config):
    """How episodes are sampled for evaluation; what is absent is the server's default."""

    temperature: float | None = semantic(None, "Temperature; 0: greedy.", ge=0)
    top_p: float | None = semantic(None, "Nucleus probability.", gt=0, le=1)
    top_k: int | None = semantic(None, "Number of candidates; -1: all.", ge=-1)
    min_p: float | None = semantic(None, "Least probability relative to the best candidate.", ge=0, le=1)
    max_completion_tokens: int | None = semantic(None, "Most tokens of one completion.", ge=1)
    reasoning_effort: Literal["minimal", "low", "medium", "high"] | None = semantic(None, "Reasoning effort.")
    extra_body: dict[str, Any] | None = semantic(None, "Passed through to the server.")
