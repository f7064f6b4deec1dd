"""The contract between the HTTP server and an engine."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

FinishReason = Literal["stop", "length"]


class Refused(Exception):
    """A request that can't be served as it stands; becomes a 400 with this message."""


class EngineFailed(Exception):
    """The engine has died or was closed; becomes a 503."""


@dataclass(frozen=True)
class Sampling:
    """How one completion is sampled. Ids in `stop_ids` and texts in `stop` end it and are part of the tokens returned.

    `top_logprobs`: so many most likely tokens are reported per position; `prompt_logprobs`: likewise for the prompt,
    at temperature 1, beside the given token; None: none at all. `top_k` 0 and `top_p` 1 switch a filter off.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    min_tokens: int = 0
    seed: int | None = None
    stop_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    top_logprobs: int = 0
    prompt_logprobs: int | None = None


@dataclass(frozen=True)
class Entry:
    """One token's logprob; `rank` 1 is the most likely."""

    token: int
    logprob: float
    rank: int


@dataclass
class Completion:
    """What was generated. `text` is set where stop texts were asked for: cut before the one that was met."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[list[Entry]] = field(default_factory=list)
    finish_reason: FinishReason = "length"
    text: str | None = None
    prompt_logprobs: list[list[Entry] | None] | None = None


@dataclass(frozen=True)
class Stats:
    """Counters and gauges. Token counts are totals; `capacity` is how many tokens the KV cache holds."""

    running: int
    waiting: int
    kv_usage: float
    capacity: int
    preemptions: int
    prompt_tokens: int
    generation_tokens: int
    finished: dict[str, int]
    version: int
    paused: bool


def check_prompt(prompt: tuple[int, ...], max_model_len: int, vocab_size: int) -> None:
    """Raises `Refused` for a prompt that is empty, leaves no room for a token, or has ids that are none."""
    if not prompt:
        raise Refused("the prompt is empty")
    if len(prompt) >= max_model_len:
        raise Refused(f"the prompt has {len(prompt)} tokens; this model's maximum context length is {max_model_len}")
    if max(prompt) >= vocab_size or min(prompt) < 0:
        raise Refused(f"a prompt token is outside of the vocabulary of {vocab_size}")


class Engine(Protocol):
    """Generates. Requests may come from any thread; weights change between forward passes only.

    `openai`: the engine's own application for OpenAI's routes, None where ours serve them. `seconds`: what the last
    update by files took: `check`, `load`.
    """

    tokenizer: object
    max_model_len: int
    vocab_size: int
    default_stop_ids: frozenset[int]
    openai: Any
    seconds: dict[str, float]

    def submit(self, prompt: tuple[int, ...], sampling: Sampling, cache_salt: str | None) -> "Future[Completion]":
        """Queue a completion. Cancelling the future frees its slot. `Refused` for a prompt that does not fit."""

    def pause(self) -> None:
        """Freeze running requests where they are; returns when no pass is under way. New requests queue."""

    def resume(self) -> None:
        """Go on, running requests on the weights of now."""

    def update_weights(self, folder: Path, version: int | None, checksum: str | None = None) -> int:
        """Load a version from a directory, all or nothing; returns the version served. `UserError` leaves the old."""

    def load_adapter(self, folder: Path, name: str) -> int:
        """Serve the adapter of a directory on top of the weights, in place of the one before, under a name of its own;
        returns the version."""

    def workers(self) -> list[dict[str, Any]]:
        """`rank`, `device` and `nccl` (version, None without) of each process that holds weights."""

    def join(self, rendezvous: dict[str, Any], first: int, world: int, timeout: float) -> None:
        """Join the trainer's group (`transport.collective`), workers from rank `first` on. `UserError` says why not."""

    def receive_weights(
        self, version: int, plan: list[dict[str, Any]], dtype: str, digests: dict[str, str] | None
    ) -> int:
        """Take a version from the group that was joined; returns the version served."""

    def metrics(self, model: str) -> str:
        """What `/metrics` shows, in Prometheus' text format; `model`: the name served."""

    def alive(self, timeout: float) -> bool:
        """Whether the engine answers within `timeout` seconds; infinite: whether it lives at all."""

    def close(self) -> None:
        """End; requests under way fail with `EngineFailed`."""
