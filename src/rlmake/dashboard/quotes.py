"""Finding a quote in an episode: letter by letter, with any white space equal to any other."""

import re
from typing import Any

from rlmake.dashboard.transcript import nodes_of, text_of
from rlmake.monitors.traces import records

FIELDS = {"content": "content", "reasoning": "reasoning_content"}


def squeezed(text: str) -> str:
    """Runs of white space as one space."""
    return re.sub(r"\s+", " ", text)


def find(
    record: dict[str, Any],
    quote: str,
    trace: int | None = None,
    node: int | None = None,
    field: str | None = None,
    prefix: str = "",
    suffix: str = "",
    branch: int | None = None,
) -> list[dict[str, Any]]:
    """Every place of the quote: `[{trace, node, field}]`, one entry an occurrence. `prefix` and `suffix` stand directly
    before and behind it. `trace`, `node`, `field` and `branch` (−1: all) narrow the search."""
    pattern = squeezed(prefix) + squeezed(quote).strip() + squeezed(suffix)
    if not pattern.strip():
        return []
    found = []
    for number, one in enumerate(record.get("traces") or []):
        if trace is not None and number != trace:
            continue
        nodes = nodes_of(one)
        allowed = set(range(len(nodes)))
        if branch is not None and branch >= 0:
            paths = records.paths(nodes)
            allowed = set(paths[branch]) if branch < len(paths) else set()
        for index, item in enumerate(nodes):
            if index not in allowed or (node is not None and index != node):
                continue
            for name, key in FIELDS.items():
                if field is None or name == field:
                    text = squeezed(text_of((item.get("message") or {}).get(key)))
                    found += [{"trace": number, "node": index, "field": name}] * text.count(pattern)
    return found
