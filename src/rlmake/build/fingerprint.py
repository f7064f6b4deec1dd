"""Fingerprints: the hash of all that a result rests on.

    {schema, stage, kind, semantic, parents [{role, fingerprint, step, kind}], revisions}

`semantic` is the configuration's semantic part with defaults written out (`rlmake.config.fields.semantic_part`), in
which values that name targets or files are replaced by what they stand for. So that old fingerprints stand when the
schema grows, `migrations.json` says with which value each later field was introduced: while a configuration holds that
value the field is left out. A field that was renamed is hashed under its old name.
"""

import functools
import json
from collections.abc import Callable, Iterator
from importlib import resources
from typing import Any

from rlmake.core.jsonio import canonical, hash_bytes, plain_copy

SCHEMA = 1
LENGTH = 16


def fingerprint(
    stage: str,
    kind: str,
    semantic: dict[str, Any],
    parents: list[dict[str, Any]],
    revisions: dict[str, Any],
) -> str:
    """16 hex digits. `parents` are records {role, fingerprint, step, kind}; other fields of theirs do not count."""
    payload = {
        "schema": SCHEMA,
        "stage": stage,
        "kind": kind,
        "semantic": migrated(kind, semantic),
        "parents": sorted(
            ([p["role"], p["fingerprint"], p["step"], p["kind"]] for p in parents), key=lambda row: canonical(row)
        ),
        "revisions": revisions,
    }
    return hash_bytes(canonical(payload))[:LENGTH]


@functools.cache
def migrations() -> dict[str, dict[str, dict[str, Any]]]:
    """`{introduced: {kind: {key: first value}}, renamed: {kind: {key: old key}}}`, keys dotted, `*` for any index."""
    return json.loads(resources.files("rlmake.build").joinpath("migrations.json").read_text(encoding="utf-8"))


def migrated(kind: str, semantic: dict[str, Any], table: dict[str, Any] | None = None) -> dict[str, Any]:
    """`semantic` as the schema of the first day would have written it."""
    table = migrations() if table is None else table
    if not (table["introduced"].get(kind) or table["renamed"].get(kind)):
        return semantic
    semantic = plain_copy(semantic)
    for key, value in table["introduced"].get(kind, {}).items():
        _drop(semantic, key.split("."), canonical(value))
    for new, old in table["renamed"].get(kind, {}).items():
        _move(semantic, new.split("."), old.split("."))
    return semantic


def _drop(node: Any, parts: list[str], value: bytes) -> None:
    """Remove the leaf at `parts` where it holds `value`, and tables that are empty thereafter."""
    head, *rest = parts
    if head == "*":
        for child in node if isinstance(node, list) else list(node.values()) if isinstance(node, dict) else []:
            _drop(child, rest, value)
    elif isinstance(node, dict) and head in node:
        if not rest:
            if canonical(node[head]) == value:
                del node[head]
        else:
            _drop(node[head], rest, value)
            if node[head] == {}:
                del node[head]


def _move(node: dict[str, Any], new: list[str], old: list[str]) -> None:
    """Put the leaf at `new` back to where it was before it was renamed (no `*`: lists keep their keys)."""
    here: Any = node
    for part in new[:-1]:
        here = here.get(part, {}) if isinstance(here, dict) else {}
    if not isinstance(here, dict) or new[-1] not in here:
        return
    value, there = here.pop(new[-1]), node
    for part in old[:-1]:
        there = there.setdefault(part, {})
    there[old[-1]] = value
    for depth in range(len(new) - 1, 0, -1):  # tables that the new name brought with it
        holder = functools.reduce(lambda table, part: table[part], new[: depth - 1], node)
        if holder[new[depth - 1]] == {}:
            del holder[new[depth - 1]]


def leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """`(dotted key, value)` of every leaf; empty tables and lists are leaves."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves(item, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from leaves(item, f"{prefix}.{index}" if prefix else str(index))
    else:
        yield prefix, value


def of_parent(key: str) -> bool:
    """Whether a leaf lies inside a value that stands for a parent (`….parent.0`, `….rest`)."""
    return ".parent." in f".{key}." or key.endswith(".rest")


def replace_texts(value: Any, change: Callable[[str, str], Any], prefix: str = "") -> Any:
    """A copy in which every text that is not empty is `change(dotted key, text)`; `prefix` ends in a dot."""
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    else:
        return value
    out = {}
    for key, item in items:
        if isinstance(item, str):
            out[key] = change(f"{prefix}{key}", item) if item else item
        else:
            out[key] = replace_texts(item, change, f"{prefix}{key}.") if isinstance(item, dict | list) else item
    return out if isinstance(value, dict) else list(out.values())
