"""What is in flight: one small file per trace, gone when its episode is in the stream.

An episode that ends within one flush never gets a file. Token ids and other streams per token are left out: a watcher
reads messages and times, the finished record has the rest.
"""

import shutil
from pathlib import Path
from typing import Any

import msgspec

from rlmake.monitors.traces import layout
from rlmake.monitors.traces.chunks import to_line
from rlmake.monitors.traces.records import Work

NODE_KEYS = ("parent", "message", "sampled", "timestamp", "semantic_parents")
KEPT = ("trace", "discard", "links", "calls", "errors", "pending")
SET_KEYS = ("agent", "rewards", "metrics", "is_completed", "ok", "stop_condition", "is_timeout", "timing")


class Live:
    """Collects changes and writes them at `flush`, which the stream's thread calls."""

    def __init__(self, root: Path):
        self.root = root
        self._started: dict[str, Work] = {}
        self._raw: dict[str, list[tuple[Work, bytes, float]]] = {}
        self._lines: dict[str, list[dict[str, Any]]] = {}
        self._traces: dict[str, set[str]] = {}  # episode name -> its traces
        self._written: set[Path] = set()
        self._swept = False

    def started(self, work: Work) -> None:
        if not self._swept:  # what a killed attempt left; producers that only annotate never come here
            self._swept = True
            shutil.rmtree(layout.live(self.root), ignore_errors=True)
        self._started[work.name] = work

    def delta(self, work: Work, delta: bytes, now: float) -> None:
        """Kept as it came: most episodes end before anybody has to decode it."""
        self._raw.setdefault(work.name, []).append((work, delta, now))

    def _decode(self) -> None:
        raw, self._raw = self._raw, {}
        for work, data, now in (item for items in raw.values() for item in items):
            delta = msgspec.msgpack.decode(data)
            trace = str(delta["trace"])
            if not trace.isalnum():  # it names a file
                continue
            known = self._traces.setdefault(work.name, set())
            lines = self._lines.setdefault(trace, [])
            if trace not in known:
                known.add(trace)
                lines.append({"trace": trace, **work.to_json()})
            lines.append({"time": now, **_messages_of(delta)})

    def ended(self, work: Work) -> None:
        self._started.pop(work.name, None)
        self._raw.pop(work.name, None)
        for trace in self._traces.pop(work.name, ()):
            self._lines.pop(trace, None)
            self._remove(layout.live(self.root) / f"{trace}.jsonl")
        self._remove(self._pending(work.name))

    def flush(self, allowed: bool) -> None:
        """Write what is still in flight; when not `allowed` (no room) forget it."""
        if not allowed:
            self._raw.clear()
        self._decode()
        started, self._started = self._started, {}
        lines, self._lines = self._lines, {}
        if not allowed:
            return
        for work in started.values():
            if work.name not in self._traces:
                path = self._pending(work.name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(to_line(work.to_json()))
                self._written.add(path)
        for trace, rows in lines.items():
            path = layout.live(self.root) / f"{trace}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "ab") as file:
                file.write(b"".join(map(to_line, rows)))
            self._written.add(path)
        for name in self._traces:
            self._remove(self._pending(name))

    def clear(self) -> None:
        """Nothing is in flight any more."""
        for path in list(self._written):
            self._remove(path)

    def _pending(self, name: str) -> Path:
        return layout.pending(self.root) / f"{name.replace('/', '+')}.json"

    def _remove(self, path: Path) -> None:
        if path in self._written:
            self._written.discard(path)
            path.unlink(missing_ok=True)


def _messages_of(delta: dict[str, Any]) -> dict[str, Any]:
    """The part of a delta that people read."""
    found = {key: delta[key] for key in KEPT if key in delta}
    if "open" in delta:
        found["task"] = delta["open"].get("task")
    if "nodes" in delta:
        found["nodes"] = [{key: node[key] for key in NODE_KEYS if key in node} for node in delta["nodes"]]
    if "set" in delta:
        found["set"] = {key: delta["set"][key] for key in SET_KEYS if key in delta["set"]}
    return found
