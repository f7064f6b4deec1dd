"""What the stream holds: records of episodes, rows of the index, annotations. All plain data."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from blake3 import blake3

from rlmake.monitors.traces.layout import VERSION

TRUNCATED = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "compaction_failed")
SEMANTICS = ("compaction", "compaction_attempt")


def trace_id(run_id: str, name: str) -> str:
    """The id of a trace: 32 hex digits from the run's id and the trace's name.

    Every process of the run can make it, so annotations need no message that carries ids. When a resumed run makes a
    trace again it has the same id; annotations belong to the newest record that their attempt can have seen.
    """
    return blake3(f"{run_id}\0{name}".encode()).hexdigest(32)[:32]


@dataclass(frozen=True)
class Work:
    """What an episode is for. `name` identifies it in its run: `<env>/<draw>/<rollout>`, or `eval/…` with the version.

    `step`: the step being collected, or the version under evaluation; `version`: the policy at dispatch, None for a
    frozen model. Times are seconds since the epoch.
    """

    kind: Literal["train", "eval"]
    env: str
    group: str
    name: str
    step: int
    version: int | None
    dispatched: float
    task: int = 0
    sample: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "env": {"name": self.env},
            "group": {"id": self.group},
            "name": self.name,
            "task_index": self.task,
            "sample": self.sample,
            "dispatch": {"step": self.step, "version": self.version, "time": self.dispatched},
        }


@dataclass(frozen=True)
class Arrival:
    """A finished episode. `episode` has `to_record(float_decimals)` and is not changed in what that gives."""

    work: Work
    episode: Any
    version: int | None  # the policy at arrival
    arrived: float


def record(arrival: Arrival, run_id: str, attempt: int, float_decimals: int | None) -> dict[str, Any]:
    """The line of an episode. Ids are those of `trace_id`; `live_ids` are those it had while in flight."""
    work, plain = arrival.work, arrival.episode.to_record(float_decimals)
    traces = plain.get("traces", [])
    live = [trace["id"] for trace in traces]
    for number, trace in enumerate(traces):
        trace["id"] = trace_id(run_id, trace_name(work.name, number, len(traces)))
    head = {"version": VERSION, "id": trace_id(run_id, f"episode/{work.name}"), "attempt": attempt, **work.to_json()}
    done = {"version": arrival.version, "time": arrival.arrived}
    return {**plain, **head, "arrival": done, "live_ids": live, "traces": traces}


def trace_name(name: str, number: int, count: int) -> str:
    """The name of trace `number` of an episode of `count` traces, as in the trainer's ledger."""
    return f"{name}/{number}" if count > 1 else name


def index_row(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a table needs of an episode, from its record."""
    traces = record.get("traces", [])
    calls = [call for trace in traces for call in trace.get("calls", [])]
    costs = [call["usage"]["cost"] for call in calls if (call.get("usage") or {}).get("cost") is not None]
    scored = [t for t in traces if t.get("agent", {}).get("trainable", True)] or traces
    rewards = [_reward(trace) for trace in scored]
    errors = [error for trace in traces for error in trace.get("errors", [])] + record.get("errors", [])
    dispatch, arrival = record["dispatch"], record["arrival"]
    return {
        "id": record["id"],
        "attempt": record["attempt"],
        "kind": record["kind"],
        "env": record["env"]["name"],
        "group": record["group"]["id"],
        "name": record["name"],
        "task": (record.get("task") or {}).get("key"),
        "task_index": record["task_index"],
        "sample": record["sample"],
        "trace_ids": [trace["id"] for trace in traces],
        "live_ids": record["live_ids"],
        "agents": [trace.get("agent", {}).get("name", "") for trace in traces],
        "ok": bool(record.get("ok")),
        "num_errors": len(errors),
        "error": errors[-1].get("type") if errors else None,
        "reward": math.fsum(rewards) / len(rewards) if rewards and all(map(math.isfinite, rewards)) else None,
        "rewards": _means({k: (v or {}).get("score") for k, v in t.get("rewards", {}).items()} for t in scored),
        "metrics": _means(trace.get("metrics", {}) for trace in scored),
        "input_tokens": int(record.get("num_input_tokens") or 0),
        "output_tokens": int(record.get("num_output_tokens") or 0),
        "turns": sum(bool(node.get("sampled")) for trace in traces for node in trace.get("nodes", [])),
        "branches": sum(len(leaves(trace.get("nodes", []))) for trace in traces),
        "nodes": sum(len(trace.get("nodes", [])) for trace in traces),
        "stop_condition": next((t["stop_condition"] for t in reversed(traces) if t.get("stop_condition")), None),
        "truncated": any(map(_truncated, traces)),
        "timeout": bool(record.get("is_timeout")) or any(t.get("is_timeout") for t in traces),
        "cost": math.fsum(costs) if costs else None,
        "dispatch": dispatch,
        "arrival": arrival,
        "duration": max(0.0, arrival["time"] - dispatch["time"]),
    }


def _reward(trace: Mapping[str, Any]) -> float:
    parts = [part for part in trace.get("rewards", {}).values() if part and part.get("score") is not None]
    return math.fsum(part["score"] * part.get("weight", 1.0) for part in parts)


def _truncated(trace: Mapping[str, Any]) -> bool:
    if trace.get("stop_condition") in TRUNCATED:
        return True
    ended = [call for call in trace.get("calls", []) if not call.get("error")]
    return bool(ended) and ended[-1].get("finish_reason") == "length"


def _means(tables: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for table in tables:
        for name, value in table.items():
            if isinstance(value, int | float) and math.isfinite(value):
                values.setdefault(name, []).append(value)
    return {name: math.fsum(found) / len(found) for name, found in values.items()}


def leaves(nodes: Sequence[Mapping[str, Any]]) -> list[int]:
    """Indices of the nodes that no other has as its parent, ascending: the ends of the branches."""
    inner = {node.get("parent") for node in nodes}
    return [number for number in range(len(nodes)) if number not in inner]


def paths(nodes: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Node indices of every branch from root to leaf, in the order of leaves. A broken parent ends its path."""
    found = []
    for leaf in leaves(nodes):
        path, at = [], leaf
        while isinstance(at, int) and 0 <= at < len(nodes) and at not in path[-1:]:
            path.append(at)
            parent = nodes[at].get("parent")
            at = parent if parent is None or (isinstance(parent, int) and parent < at) else None
        found.append(path[::-1])
    return found


def trainable(nodes: Sequence[Mapping[str, Any]]) -> list[int]:
    """Numbers of the branches that can train, in order: annotations count these. An attempt at compaction from which
    nothing went on can't."""
    links = [(number, link) for number, node in enumerate(nodes) for link in node.get("semantic_parents", [])]
    accepted = {link["node"] for _, link in links if link["type"] == "compaction"}
    attempts = {number for number, link in links if link["type"] == "compaction_attempt"}
    return [n for n, path in enumerate(paths(nodes)) if path[-1] not in attempts or path[-1] in accepted]


def spans(positions: Iterable[int]) -> list[list[int]]:
    """Ascending positions as half-open intervals `[[start, stop], …]`."""
    found: list[list[int]] = []
    for position in positions:
        if found and found[-1][1] == position:
            found[-1][1] += 1
        else:
            found.append([position, position + 1])
    return found


def annotation(
    trace: str, attempt: int, info: Mapping[str, Any] | None = None, branches: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """A line of annotations. A branch is `{index, spans, <stream>: [one value per token of the spans]}`: `index` counts
    the trace's trainable branches, spans are positions in the branch's tokens."""
    row: dict[str, Any] = {"version": VERSION, "trace_id": trace, "attempt": attempt}
    if info:
        row["info"] = dict(info)
    if branches:
        row["branches"] = list(branches)
    return row


def annotation_index_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Whose it is, what streams it has, and its `info` as it is: enough for tables."""
    streams = sorted({key for branch in row.get("branches", ()) for key in branch} - {"index", "spans"})
    return {
        "trace_id": row["trace_id"],
        "attempt": row["attempt"],
        "info": row.get("info", {}),
        "streams": streams,
    }


def count_non_finite(value: Any) -> int:
    """How many numbers in plain data are NaN or infinite. Lists are taken to be of one kind."""
    if isinstance(value, dict):
        return sum(map(count_non_finite, value.values()))
    if isinstance(value, list):
        if not value or isinstance(value[0], int | str):
            return 0
        if isinstance(value[0], float):
            try:
                return 0 if math.isfinite(sum(value)) else sum(not math.isfinite(item) for item in value)
            except TypeError:
                pass
        return sum(map(count_non_finite, value))
    return int(isinstance(value, float) and not math.isfinite(value))
