"""What an evaluation leaves: the record of an episode (a line of episodes.jsonl), and all those of an environment."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlmake.core.errors import UserError

MAX_ERROR_CHARS = 500


@dataclass(frozen=True)
class EpisodeRecord:
    """Sample `sample` of task `task` (its index) of environment `env`. Nothing in it depends on time or machine.

    `key` identifies the task across runs; `seed` is that of the sampling. `reward` is finite. `rewards` are the
    weighted parts that it is made of, `metrics` unweighted numbers of the taskset. `error` is "Type: message" of the
    last error, for an episode that did not succeed in running; None otherwise.
    """

    env: str
    task: int
    key: str
    sample: int
    seed: int
    prompt: str
    reply: str
    reward: float
    truncated: bool
    timeout: bool
    error: str | None
    turns: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    rewards: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class EnvResult:
    """What an evaluation of one environment came to. `records` are in the order of (task, sample).

    `planned` episodes were to run; fewer records mean that it was stopped before the end.
    """

    env: str
    num_tasks: int
    group_size: int
    sampling: Mapping[str, Any]
    records: list[EpisodeRecord]
    seconds: float

    @property
    def planned(self) -> int:
        return self.num_tasks * self.group_size

    @property
    def partial(self) -> bool:
        return len(self.records) < self.planned


def of_episode(episode: Any, env: str, task: Any, sample: int, seed: int) -> EpisodeRecord:
    """The record of a verifiers episode. With several agents the reward is the mean over those that train."""
    traces = [trace for trace in episode.traces if trace.agent.trainable] or list(episode.traces)
    reward = math.fsum(trace.reward for trace in traces) / len(traces) if traces else 0.0
    error = None if episode.ok else _error(episode)
    if not math.isfinite(reward):
        reward, error = 0.0, error or f"RewardError: the reward is {reward}"
    return EpisodeRecord(
        env=env,
        task=task.index,
        key=task.key,
        sample=sample,
        seed=seed,
        prompt=episode.task.data.prompt_text,
        reply=traces[0].last_reply if traces else "",
        reward=reward,
        truncated=any(trace.is_truncated for trace in traces),
        timeout=episode.is_timeout or any(trace.is_timeout for trace in episode.traces),
        error=error,
        turns=episode.num_turns,
        input_tokens=episode.num_input_tokens,
        output_tokens=episode.num_output_tokens,
        rewards=_mean({name: part and part.value for name, part in trace.rewards.items()} for trace in traces),
        metrics=_mean(trace.metrics for trace in traces),
    )


def _error(episode: Any) -> str:
    errors = [error for trace in episode.traces for error in trace.errors] + list(episode.errors)
    if not errors:
        stops = [trace.stop_condition for trace in episode.traces if trace.stop_condition]
        return f"Stopped: {stops[-1]}" if stops else "Stopped: the episode did not end well"
    return f"{errors[-1].type}: {errors[-1].message}"[:MAX_ERROR_CHARS]


def _mean(tables: Any) -> dict[str, float]:
    """Per name the mean of the finite values that are there."""
    values: dict[str, list[float]] = {}
    for table in tables:
        for name, value in table.items():
            if value is not None and math.isfinite(value):
                values.setdefault(name, []).append(value)
    return {name: math.fsum(found) / len(found) for name, found in sorted(values.items())}


def read(path: Path) -> list[EpisodeRecord]:
    """The records of an episodes.jsonl. Raises `UserError` naming file and line."""
    records = []
    try:
        with open(path, encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    row = json.loads(line)
                    if not isinstance(row, Mapping):
                        raise TypeError("not an object")
                    records.append(EpisodeRecord(**row))
                except (ValueError, TypeError) as error:
                    raise UserError(f"{path}: line {number}: not a record of an episode: {error}") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    return records
