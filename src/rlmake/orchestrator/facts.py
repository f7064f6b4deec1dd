"""The numbers of one trace, by the names under which the metrics report them."""

from collections.abc import Sequence
from typing import Any

import verifiers.v1 as vf

from rlmake.orchestrator.records import Group

STAGES = ("boot", "setup", "agent", "finalize", "scoring")


def trace_facts(episode: vf.Episode, group: Group, agents: Sequence[str]) -> list[dict[str, Any]]:
    """One row per trace: floats by metric name, the strings `env` and `agent`, and two marks. `first`: the episode's
    first row, for shares of rollouts. `scored`: its reward counts; that of an agent that does not train only where none
    does.

    An episode without traces gives one row, so that every dispatched rollout is counted; its agent is that of the
    environment's `agents` where there is only one.
    """
    if not episode.traces:
        rows = [_without_trace(episode, group, agents[0] if len(agents) == 1 else "")]
    else:
        rows = [_of_trace(trace, group) for trace in episode.traces]
    none_trains = not any(trace.agent.trainable for trace in episode.traces)
    for trace, row in zip(episode.traces, rows, strict=False):
        row["scored"] = trace.agent.trainable or none_trains
    for error in episode.errors[-1:]:
        rows[0][f"error/{error.type}"] = 1.0
    for number, row in enumerate(rows):
        row["first"] = number == 0
    rows[0]["is_empty"] = max(row["is_empty"] for row in rows)
    return rows


def _without_trace(episode: vf.Episode, group: Group, agent: str) -> dict[str, Any]:
    row: dict[str, Any] = {"env": group.env, "agent": agent, "has_error": 1.0, "is_timeout": float(episode.is_timeout)}
    row |= dict.fromkeys(("is_truncated", "is_completed", "is_trainable", "is_admitted"), 0.0)
    return row | {"is_empty": float(any(error.type == "EmptyEpisode" for error in episode.errors))}


def _of_trace(trace: vf.Trace, group: Group) -> dict[str, Any]:
    branches, usage = trace.branches, trace.usage  # once: each look at them builds them anew
    inputs = branches[0].num_input_tokens if len(branches) == 1 else trace.num_input_tokens
    row: dict[str, Any] = {
        "env": group.env,
        "agent": trace.agent.name,
        "reward": float(trace.reward),
        "num_total_tokens": float(inputs + (usage.completion_tokens if usage else 0)),
        "num_input_tokens": float(inputs),
        "num_output_tokens": float(sum(branch.num_output_tokens for branch in branches)),
        "num_turns": float(trace.num_turns),
        "num_branches": float(len(branches)),
        "is_truncated": float(trace.is_truncated),
        "is_completed": float(trace.is_completed),
        "is_timeout": float(trace.is_timeout),
        "is_empty": float(any(error.type == "EmptyTrajectory" for error in trace.errors)),
        "has_error": float(not trace.ok),
        "is_trainable": 0.0,
        "is_admitted": 0.0,
    }
    row |= {f"rewards/{name}": float(reward.score) for name, reward in trace.rewards.items() if reward is not None}
    row |= {f"metrics/{name}": float(value) for name, value in trace.metrics.items() if value is not None}
    row |= {f"timing/{stage}": float(getattr(trace.timing, stage).duration) for stage in STAGES}
    if trace.stop_condition:
        row[f"stop_condition/{trace.stop_condition}"] = 1.0
    row |= {f"error/{error.type}": 1.0 for error in trace.errors[-1:]}
    return row
