"""What is in flight, from the files that the trace stream keeps while it is."""

import re
from pathlib import Path
from typing import Any

from rlmake.dashboard.confine import NotThere
from rlmake.monitors.traces import layout, read

NAME = re.compile(r"[0-9A-Za-z]{1,64}")
MOST = 2000


def listed(root: Path) -> dict[str, Any]:
    """Traces and episodes in flight; `etag` changes when anything does."""
    rows, marks = [], []
    folder = layout.live(root)
    for kind, place, pattern in (("live", folder, "*.jsonl"), ("pending", layout.pending(root), "*.json")):
        if place.is_symlink() or not place.is_dir():
            continue
        for path in sorted(place.glob(pattern))[:MOST]:
            try:
                stat = path.lstat()
                with open(path, "rb") as file:
                    head = read.row_of(file.readline(1 << 20))
            except OSError:
                continue
            if head is None or path.is_symlink():
                continue
            marks.append((path.name, stat.st_size))
            rows.append(
                {"state": kind, "trace": path.stem if kind == "live" else None, "kind": head.get("kind"),
                 "env": (head.get("env") or {}).get("name"), "group": (head.get("group") or {}).get("id"),
                 "name": head.get("name"), "dispatch": head.get("dispatch"), "updated": stat.st_mtime}
            )  # fmt: skip
    return {"etag": f"{hash(tuple(marks)) & 0xFFFFFFFF:08x}", "traces": rows}


def one(root: Path, trace: str) -> dict[str, Any]:
    """A trace in flight, put together from its deltas. Raises `NotThere` when it has ended."""
    if not NAME.fullmatch(trace):
        raise NotThere(trace)
    path = layout.live(root) / f"{trace}.jsonl"
    if path.is_symlink() or not path.is_file():
        raise NotThere(trace)
    found: dict[str, Any] = {"nodes": [], "calls": [], "errors": [], "pending": [], "etag": str(path.stat().st_size)}
    for _, row in read.Tail(path).rows():
        if "kind" in row:
            found["head"] = row
        if row.get("discard"):
            found |= {"nodes": [], "calls": [], "errors": [], "pending": []}
        for index, links in (row.get("links") or {}).items():
            if index.isdigit() and int(index) < len(found["nodes"]):
                found["nodes"][int(index)].setdefault("semantic_parents", []).extend(links)
        for key in ("nodes", "calls", "errors"):
            found[key] += [item for item in row.get(key) or [] if isinstance(item, dict)]
        if "nodes" in row:
            found["pending"] = []
        if "pending" in row:
            found["pending"] = row["pending"]
        found |= {key: value for key, value in (row.get("set") or {}).items() if key != "nodes"}
    return found
