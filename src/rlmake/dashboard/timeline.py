"""The same episode by the clock, and by what called what."""

import itertools
from typing import Any

from rlmake.dashboard.transcript import nodes_of, trace_of
from rlmake.monitors.traces import records

STAGES = ("boot", "setup", "agent", "finalize", "scoring")


def timeline(record: dict[str, Any], number: int) -> dict[str, Any]:
    """Lanes of one trace: its stages, then one per branch with model calls and what happened between them.

    Times are seconds since the epoch. A branch's lane holds the calls of the nodes that are its own: what it shares
    with an earlier branch stands there only. `semantic`: model calls as a graph with labelled relationships.
    """
    trace = trace_of(record, number)
    nodes, calls = nodes_of(trace), [c for c in trace.get("calls") or [] if isinstance(c, dict)]
    timing = trace.get("timing") or {}
    stages = [{"label": name, **span} for name in STAGES if (span := _span(timing.get(name)))]
    lanes, seen = [], set()
    for branch, path in enumerate(records.paths(nodes)):
        own = [node for node in path if node not in seen]
        seen |= set(own)
        lanes.append({"branch": branch, "leaf": path[-1], "bars": _bars(own, nodes, calls)})
    failed = [call for call in calls if call.get("node") is None and _span(call.get("time"))]
    if failed:
        bars = [
            {"kind": "error", "label": str((c.get("error") or {}).get("type", "no reply")), **_span(c["time"])}
            for c in failed
        ]
        lanes.append({"branch": None, "leaf": None, "bars": bars})
    edges = [bar[key] for lane in [*lanes, {"bars": stages}] for bar in lane["bars"] for key in ("start", "end")]
    return {
        "trace": number,
        "start": min(edges, default=None),
        "end": max(edges, default=None),
        "stages": stages,
        "lanes": lanes,
        "semantic": semantic(nodes, calls),
    }


def _span(value: Any) -> dict[str, float] | None:
    """`{start, end}` of a recorded span that has an end."""
    if not isinstance(value, dict):
        return None
    start, end = value.get("start"), value.get("end")
    if isinstance(start, int | float) and isinstance(end, int | float) and end >= start > 0:
        return {"start": start, "end": end}
    return None


def _bars(own: list[int], nodes: list[dict[str, Any]], calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Model calls of these nodes, and the time from one call's end to the next one's start (tools, harness)."""
    bars = []
    for call in calls:
        if call.get("node") in own and (span := _span(call.get("time"))):
            usage = call.get("usage") or {}
            label = f"{usage.get('completion_tokens', '?')} tokens"
            bars.append(
                {"kind": "model", "label": label, "node": call["node"], "finish": call.get("finish_reason"), **span}
            )
    bars.sort(key=lambda bar: bar["start"])
    between = []
    for before, after in itertools.pairwise(bars):
        if after["start"] > before["end"]:
            names = [_called(nodes[n]) for n in own if before["node"] < n < after["node"]]
            between.append(
                {
                    "kind": "tool",
                    "label": ", ".join(filter(None, names)) or "environment",
                    "start": before["end"],
                    "end": after["start"],
                }
            )
    return sorted([*bars, *between], key=lambda bar: bar["start"])


def _called(node: dict[str, Any]) -> str:
    message = node.get("message") or {}
    return str(message.get("name") or message.get("role") or "") if message.get("role") == "tool" else ""


def semantic(nodes: list[dict[str, Any]], calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Sampled turns with their prompt lengths, and edges: `continuation` along a branch, others as the harness said.

    `context` numbers the chains of continuations; for each the latest and the peak prompt length, and what was
    processed in all. Edges that a harness declares may form loops.
    """
    usage = {call["node"]: call.get("usage") or {} for call in calls if isinstance(call.get("node"), int)}
    turns = [n for n, node in enumerate(nodes) if node.get("sampled")]
    before = {turn: _turn_before(nodes, turn) for turn in turns}
    context = _contexts(turns, before)
    edges = [
        {"from": parent, "to": turn, "type": "continuation"} for turn, parent in before.items() if parent is not None
    ]
    for turn in turns:
        for link in nodes[turn].get("semantic_parents") or []:
            if isinstance(link, dict) and link.get("node") in before:
                edges.append({"from": link["node"], "to": turn, "type": str(link.get("type"))})
    totals: dict[int, dict[str, int]] = {}
    rows = []
    for turn in turns:
        used = usage.get(turn, {})
        prompt = int(used.get("prompt_tokens") or 0) + int(used.get("cached_input_tokens") or 0)
        done = int(used.get("completion_tokens") or 0)
        entry = totals.setdefault(context[turn], {"latest": 0, "peak": 0, "cumulative": 0, "turns": 0})
        entry["latest"], entry["peak"] = prompt, max(entry["peak"], prompt)
        entry["cumulative"] += prompt + done
        entry["turns"] += 1
        tools = [
            c.get("name") for c in (nodes[turn].get("message") or {}).get("tool_calls") or [] if isinstance(c, dict)
        ]
        rows.append({"node": turn, "context": context[turn], "prompt": prompt, "completion": done, "tools": tools})
    return {"turns": rows, "edges": edges, "contexts": [{"context": n, **entry} for n, entry in sorted(totals.items())]}


def _turn_before(nodes: list[dict[str, Any]], turn: int) -> int | None:
    """The sampled turn that this one goes on from, along the tree of messages."""
    at = turn
    while True:
        parent = nodes[at].get("parent")
        if not isinstance(parent, int) or not 0 <= parent < at:
            return None
        if nodes[parent].get("sampled"):
            return parent
        at = parent


def _contexts(turns: list[int], before: dict[int, int | None]) -> dict[int, int]:
    """A number per turn: that of the turn before for the first that goes on from it, a new one for others."""
    found: dict[int, int] = {}
    continued: set[int] = set()
    for turn in turns:
        parent = before[turn]
        if parent is not None and parent not in continued:
            continued.add(parent)
            found[turn] = found[parent]
        else:
            found[turn] = len(set(found.values()))
    return found
