"""What is in flight, from the files that the trace stream keeps while it is."""

import functools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlmake.dashboard import confine, shape
from rlmake.dashboard.confine import NotThere
from rlmake.monitors.traces import layout, read

MAX_HEAD = 1 << 16
NAME = re.compile(r"[0-9A-Za-z]{1,64}")
MOST = 2000
OWN = ("nodes", "calls", "errors", "pending", "etag", "head")  # not for a delta to set


def listed(root: Path, roots: Sequence[Path]) -> dict[str, Any]:
    """Traces and episodes in flight; `etag` changes when anything does."""
    rows, marks, torn = [], [], 0
    for kind, place, suffix in (("live", layout.live(root), ".jsonl"), ("pending", layout.pending(root), ".json")):
        try:
            with os.scandir(confine.target(place, roots)) as entries:
                found = sorted((one for one in entries if one.name.endswith(suffix)), key=lambda one: one.name)[:MOST]
        except OSError:
            continue
        for entry in found:
            try:
                stat = entry.stat()
                head = _head(entry.path, tuple(roots), stat.st_ino, stat.st_mtime_ns if kind == "pending" else 0)
            except FileNotFoundError:  # it has ended
                continue
            except (OSError, read.Torn):
                torn += 1
                continue
            marks.append((entry.name, stat.st_size))
            trace = entry.name.removesuffix(suffix) if kind == "live" else None
            rows.append({"state": kind, "trace": trace, **head, "updated": stat.st_mtime})
    return {"etag": f"{hash(tuple(marks)) & 0xFFFFFFFF:08x}", "traces": rows, "torn": torn}


@functools.lru_cache(maxsize=2 * MOST)
def _head(path: str, roots: tuple[Path, ...], _file: int, _written: int) -> dict[str, Any]:
    """What the first line of a file says: pages ask every few seconds, and thousands may be in flight."""
    with confine.opened(Path(path), roots) as file:
        head = read.row_of(file.readline(MAX_HEAD))
    if head is None:
        raise read.Torn(path)
    shape.checked(head, shape.Head, path)
    env, group = (head.get("env") or {}).get("name"), (head.get("group") or {}).get("id")
    return {"env": env, "group": group} | {key: head.get(key) for key in ("kind", "name", "dispatch")}


def one(root: Path, trace: str, roots: Sequence[Path]) -> dict[str, Any]:
    """A trace in flight, put together from its deltas. Raises `NotThere` when it has ended."""
    if not NAME.fullmatch(trace):
        raise NotThere(trace)
    try:
        path, stat = confine.regular(layout.live(root) / f"{trace}.jsonl", roots)
    except OSError:
        raise NotThere(trace) from None
    found: dict[str, Any] = {"nodes": [], "calls": [], "errors": [], "pending": [], "etag": str(stat.st_size)}
    tail, lost = read.Tail(path), 0
    for _, row in tail.rows():
        if not shape.fits(row, shape.Delta):
            lost += 1
            continue
        if "kind" in row:
            found["head"] = row
        if row.get("discard"):
            found |= {"nodes": [], "calls": [], "errors": [], "pending": []}
        for index, links in (row.get("links") or {}).items():
            if re.fullmatch("[0-9]{1,9}", index) and int(index) < len(found["nodes"]):
                found["nodes"][int(index)].setdefault("semantic_parents", []).extend(links)
        for key in ("nodes", "calls"):
            found[key] += row.get(key) or []
        found["errors"] += [item for item in row.get("errors") or [] if isinstance(item, dict)]
        if "nodes" in row:
            found["pending"] = []
        if "pending" in row:
            found["pending"] = row["pending"] or []
        found |= {key: value for key, value in (row.get("set") or {}).items() if key not in OWN}
    return {**found, "torn": tail.torn + lost}
