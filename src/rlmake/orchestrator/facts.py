"""The numbers of one trace, by the names under which the metrics report them."""

from typing import Any

import verifiers.v1 as vf

from rlmake.orchestrator.records import Group

STAGES = ("boot", "setup", "agent", "finalize", "scoring")


def trace_facts(episode: vf.Episode, group: Group) -> list[dict[str, Any]]:
    """One row per trace: floats by metric name, and the strings `env` and `agent`.

    An episode without traces gives one row, so that every dispatched rollout is counted.
    """
    if not episode.traces:
        errors = {f"error/{error.type}": 1.0 for error in episode.errors[-1:]}
        empty = float(any(error.type == "EmptyEpisode" for error in episode.errors))
        head = {"env": group.env, "agent": "", "is_timeout": float(episode.is_timeout), "is_empty": empty}
        return [head | {"has_error": 1.0, "is_trainable": 0.0, "is_admitted": 0.0} | errors]
    rows = [_of_trace(trace, group) for trace in episode.traces]
    for error in episode.errors[-1:]:
        rows[0][f"error/{error.type}"] = 1.0
    return rows


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
