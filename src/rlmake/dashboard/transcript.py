"""One episode as the page shows it: messages, branches, times; and its tokens with what is known of each."""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlmake.dashboard import confine, shape
from rlmake.dashboard.confine import NotThere
from rlmake.dashboard.table import Row
from rlmake.monitors.traces import layout, read, records

MAX_TEXT = 100_000  # characters of one text in the overview of an episode; the rest is fetched by itself
MAX_TEXTS = 4_000_000  # of all its texts; those behind are shown with their first SHORT_TEXT
SHORT_TEXT = 500
STREAMS = ("advantages", "trainer_logprobs", "entropies", "is_masked")
MAX_RECORD = 1 << 30
CACHE_BYTES = 64 << 20


class Records:
    """Records of a run's episodes, the last ones kept."""

    def __init__(self, root: Path, roots: Sequence[Path] = ()):
        self.root, self.roots = root, roots or (root.resolve(),)
        self._kept: OrderedDict[tuple[Any, ...], tuple[int, dict[str, Any]]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, row: Row) -> dict[str, Any]:
        """Raises `read.Torn`, also for a record that has not the shape of an episode."""
        key = (row.id, row.arrival, row.chunk, row.offset)  # also of a run that was made again at its place
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key][1]
        record = self._at(layout.stream(self.root), row.chunk, row.offset, row.length, shape.Episode)
        with self._lock:
            self._kept[key] = (row.length, record)
            while sum(size for size, _ in self._kept.values()) > CACHE_BYTES and len(self._kept) > 1:
                self._kept.popitem(last=False)
        return record

    def _at(self, folder: Path, chunk: int, offset: int, length: int, kind: type) -> dict[str, Any]:
        """A record, where it lies in the run. Raises `read.Torn`."""
        where = f"chunk {chunk}, record at {offset}"
        if length > MAX_RECORD:
            raise read.Torn(f"{where}: the index gives it {length} bytes")
        plain = folder / layout.chunk_name(chunk)
        path = plain if os.path.lexists(plain) else plain.with_name(plain.name + ".zst")  # sealed
        try:
            confine.regular(path, self.roots)
            return shape.checked(read.record_at(folder, chunk, offset, length), kind, where)
        except OSError as error:
            raise read.Torn(f"chunk {chunk}: {error.strerror}") from None

    def notes(self, row: Row) -> tuple[list[dict[str, Any]], int]:
        """The annotations of an episode that can be read, oldest first, and how many can't."""
        found = []
        for producer, chunk, offset, length in row.notes:
            folder = layout.annotations(self.root, producer)
            try:
                found.append(self._at(folder, chunk, offset, length, shape.Annotation))
            except read.Torn:
                continue
        return found, len(row.notes) - len(found)


def trace_of(record: dict[str, Any], number: int) -> dict[str, Any]:
    traces = record.get("traces") or []
    if not (0 <= number < len(traces) and isinstance(traces[number], dict)):
        raise NotThere(f"trace {number}")
    return traces[number]


def nodes_of(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [node if isinstance(node, dict) else {} for node in trace.get("nodes") or []]


def detail(record: dict[str, Any], row: Row) -> dict[str, Any]:
    """Everything but the tokens."""
    traces, texts = [trace for trace in record.get("traces") or [] if isinstance(trace, dict)], Texts()
    return {
        **row.to_json(),
        "dispatch": record.get("dispatch"),
        "arrived": record.get("arrival"),
        "errors": record.get("errors") or [],
        "task_data": (record.get("task") or {}).get("data"),
        "traces": [_trace(trace, texts) for trace in traces],
        "streams": sorted({producer for producer, *_ in row.notes}),
    }


class Texts:
    """Texts of one answer, cut so that all of them together stay small."""

    def __init__(self) -> None:
        self._left = MAX_TEXTS

    def cut(self, content: Any) -> tuple[str, int | None]:
        """`(text, its whole length where it is cut)`."""
        text = text_of(content)
        most = MAX_TEXT if self._left > 0 else SHORT_TEXT
        self._left -= min(len(text), most)
        return (text, None) if len(text) <= most else (text[:most], len(text))


def _trace(trace: dict[str, Any], texts: Texts) -> dict[str, Any]:
    nodes = nodes_of(trace)
    agent = trace.get("agent") or {}
    return {
        "id": trace.get("id"),
        "agent": agent.get("name"),
        "trainable": agent.get("trainable", True),
        "rewards": {
            name: part and {"score": part.get("score"), "weight": part.get("weight", 1)}
            for name, part in (trace.get("rewards") or {}).items()
        },
        "metrics": trace.get("metrics") or {},
        "stop_condition": trace.get("stop_condition"),
        "errors": trace.get("errors") or [],
        "timing": trace.get("timing") or {},
        "info": trace.get("info") or {},
        "calls": [call for call in trace.get("calls") or [] if isinstance(call, dict)],
        "nodes": [_node(number, node, texts) for number, node in enumerate(nodes)],
        "branches": records.paths(nodes),
        "trainable_branches": records.trainable(nodes),
    }


def _node(number: int, node: dict[str, Any], texts: Texts) -> dict[str, Any]:
    message = node.get("message") or {}
    content, cut = texts.cut(message.get("content"))
    reasoning, cut_reasoning = texts.cut(message.get("reasoning_content"))
    return {
        "index": number,
        "parent": node.get("parent"),
        "role": message.get("role"),
        "name": message.get("name"),
        "content": content,
        "cut": cut,
        "reasoning": reasoning,
        "cut_reasoning": cut_reasoning,
        "tool_calls": message.get("tool_calls") or [],
        "sampled": bool(node.get("sampled")),
        "timestamp": node.get("timestamp"),
        "tokens": len(node.get("token_ids") or []),
        "sampled_tokens": sum(map(bool, node.get("mask") or [])),
        "semantic_parents": node.get("semantic_parents") or [],
    }


def text_of(content: Any) -> str:
    """The text of a message's content; other parts are named."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [p if isinstance(p, dict) else {"type": "text", "text": str(p)} for p in content]
        return "\n".join(str(p.get("text", "")) if p.get("type") == "text" else f"[{p.get('type')}]" for p in parts)
    return "" if content is None else str(content)


def message(record: dict[str, Any], trace: int, node: int, start: int, field: str = "content") -> dict[str, Any]:
    """A part of a long message: of its content or its reasoning."""
    nodes = nodes_of(trace_of(record, trace))
    if not 0 <= node < len(nodes):
        raise NotThere(f"node {node}")
    text = text_of((nodes[node].get("message") or {}).get("reasoning_content" if field == "reasoning" else "content"))
    return {"text": text[start : start + 10 * MAX_TEXT], "start": start, "total": len(text)}


def tokens(
    record: dict[str, Any],
    notes: Sequence[dict[str, Any]],
    number: int,
    chosen: Sequence[int] | None,
    decode: Callable[[list[int]], list[str]] | None,
) -> dict[str, Any]:
    """Per node the token ids with their texts, and every stream aligned to them (null where there is nothing).

    `mask`: sampled; `content`: message body, not template; `trained`: counted in the loss of a step; `mismatch` is
    trainer's minus sampler's log-probability.
    """
    trace = trace_of(record, number)
    nodes = nodes_of(trace)
    streams = fold(trace, nodes, notes)
    found = []
    for index in range(len(nodes)) if chosen is None else chosen:
        if not 0 <= index < len(nodes):
            raise NotThere(f"node {index}")
        node, own = nodes[index], streams.get(index, {})
        ids = list(node.get("token_ids") or [])
        mask = [bool(m) for m in node.get("mask") or []]
        mask += [False] * (len(ids) - len(mask))
        logprobs = spread(node.get("logprobs"), mask)
        trainer = own.get("trainer_logprobs")
        row = {
            "index": index,
            "ids": ids,
            "texts": decode(ids) if decode else None,
            "mask": [int(m) for m in mask],
            "content": [int(bool(c)) for c in node.get("is_content") or []] or None,
            "logprobs": logprobs,
            "trained": own.get("trained"),
            **{name: own.get(name) for name in STREAMS},
        }
        if row["advantages"] is None and node.get("advantages") is not None:
            row["advantages"] = spread(node["advantages"], mask)
        row["mismatch"] = trainer and [
            None if a is None or b is None else a - b for a, b in zip(trainer, logprobs, strict=False)
        ]
        found.append(row)
    return {"trace": number, "nodes": found}


def spread(values: Any, mask: Sequence[bool]) -> list[float | None]:
    """Values of the sampled tokens, at their places."""
    rest = iter(values or [])
    return [next(rest, None) if sampled else None for sampled in mask]


def fold(
    trace: dict[str, Any], nodes: list[dict[str, Any]], notes: Sequence[dict[str, Any]]
) -> dict[int, dict[str, list]]:
    """Annotations of branches, laid onto the nodes' own tokens. The newest wins; what branches share is the first's."""
    paths, trainable = records.paths(nodes), records.trainable(nodes)
    sizes = [len(node.get("token_ids") or []) for node in nodes]
    found: dict[int, dict[str, list]] = {}
    for note in notes:
        if note.get("trace_id") != trace.get("id"):
            continue
        touched: set[tuple[int, str]] = set()
        for branch in note.get("branches") or []:
            index = branch.get("index", 0)
            if not (isinstance(index, int) and 0 <= index < len(trainable)):
                continue
            places = [(node, at) for node in paths[trainable[index]] for at in range(sizes[node])]
            spans = branch.get("spans") or []
            if sum(max(0, min(stop, len(places)) - start) for start, stop in spans) > len(places):
                continue  # they overlap
            positions = [p for start, stop in spans for p in range(start, min(stop, len(places)))]
            values = {name: branch[name] for name in STREAMS if isinstance(branch.get(name), list)}
            if "trainer_logprobs" in values or "entropies" in values:
                values["trained"] = [1] * len(positions)
            for name, stream in values.items():
                for position, value in zip(positions, stream, strict=False):
                    node, at = places[position]
                    own = found.setdefault(node, {}).setdefault(name, [None] * sizes[node])
                    if own[at] is None or (node, name) not in touched:
                        own[at] = value
                touched |= {(places[p][0], name) for p in positions}
    return found
