"""Faults of validation in the user's words: file, line, key, what was expected, the nearest valid name."""

import math
import re
from collections.abc import Iterable, Iterator
from datetime import date, time
from typing import Any

from pydantic import BaseModel, ValidationError

from rlmake.config.fields import Config, element_tables, tables, walk
from rlmake.config.layers import Composed, line_of
from rlmake.config.refused import Refused
from rlmake.core.errors import Fault, nearest

KINDS = {
    "int": "an integer", "float": "a number", "bool": "true or false", "string": "text", "list": "a list",
    "dict": "a table", "model": "a table", "tuple": "a list", "literal": "",
}  # fmt: skip

# Keys of that table alone; `rlmake.config.experiment` rests on this module.
EXPERIMENT = ("kind", "extends", "evals", "manual", "best", "seconds_per_step", "grid")


def of_validation(error: ValidationError, cls: type[BaseModel], raw: dict[str, Any]) -> list[Fault]:
    """One fault per key. `raw` is what was validated."""
    by_path: dict[tuple[str, ...], list[str]] = {}
    between = set()
    for item in error.errors(include_url=False):
        for path, message in _explain(item, cls, raw):
            messages = by_path.setdefault(path, [])
            if message not in messages:
                messages.append(message)
            if isinstance(item.get("ctx", {}).get("error"), Refused):
                between.add(path)
    return [
        Fault(_join(messages), ".".join(path), via="" if path in between else None)
        for path, messages in by_path.items()
    ]


def surplus(error: ValidationError, cls: type[BaseModel], raw: dict[str, Any]) -> set[str]:
    """The dotted keys that were given and that their tables do not have."""
    items = error.errors(include_url=False)
    found = [_walk(item["loc"], cls, raw, item["type"])[0] for item in items if item["type"] == "extra_forbidden"]
    return {".".join(path) for path in found}


def of_values(value: Any, key: str = "") -> Iterator[Fault]:
    """Values that no record can hold. Typed fields have refused them before, free tables take what they are given."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from of_values(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from of_values(item, f"{key}.{index}")
    elif isinstance(value, float) and not math.isfinite(value):
        yield Fault(f"must be finite, not {value}", key)
    elif isinstance(value, date | time):
        yield Fault(f"expected text, a number, true or false, not {type(value).__name__} {value}: quote it", key)


def placed(faults: Iterable[Fault], raw: dict[str, Any], file: str | None) -> list[Fault]:
    """The faults with their file, and its line where the file is TOML."""
    found = []
    for fault in faults:
        path = tuple((fault.key or "").split("."))
        source = fault.file or (raw.origin(path) if isinstance(raw, Composed) else None) or file
        line = line_of(source, path)
        via = file if fault.via == "" and source != file else fault.via or None
        found.append(Fault(fault.message, fault.key, f"{source}:{line}" if line else source, via))
    return list(dict.fromkeys(found))


def located(message: str, key: str, raw: dict[str, Any], file: str) -> Fault:
    """A fault of a run or suite: with the line of its file where that gives the value, and not a fragment, whose fault
    is said once with the files that share it."""
    fault = Fault(message, key, file)
    origin = raw.origin(key.split(".")) if isinstance(raw, Composed) else None
    return placed([fault], raw, file)[0] if origin == file else fault


def _join(messages: list[str]) -> str:
    """Alternatives of one key (`a number`, or `'auto'`) become one sentence."""
    expected = [message for message in messages if message.startswith("expected ")]
    if len(expected) < 2:
        return "; ".join(messages)
    wanted = [message.removeprefix("expected ").partition(", not ")[0] for message in expected]
    _, _, rest = expected[0].partition(", not ")
    return f"expected {' or '.join(wanted)}" + (f", not {rest.partition(';')[0]}" if rest else "")


def _explain(item: dict[str, Any], cls: type[BaseModel], raw: Any) -> list[tuple[tuple[str, ...], str]]:
    path, owners = _walk(item["loc"], cls, raw, item["type"])
    cause = item.get("ctx", {}).get("error")
    if isinstance(cause, Refused):
        return [(_under(path, key), message) for key, message in cause.faults]
    return [(path, _message(item, path, owners, cls))]


def _under(path: tuple[str, ...], key: str) -> tuple[str, ...]:
    return (*path, *key.split(".")) if key else path


def _walk(
    loc: tuple[Any, ...], cls: type[BaseModel], raw: Any, kind: str
) -> tuple[tuple[str, ...], list[type[BaseModel]]]:
    """The user's path of an error and the tables that may hold its last key.

    pydantic mixes tags of unions into a location; a part that is no key of the value at hand is such a tag, unless it
    names a missing or a surplus key at the end.
    """
    path: list[str] = []
    owners: list[type[BaseModel]] = [cls]
    node, elements = raw, []
    for position, part in enumerate(loc):
        last = position == len(loc) - 1
        if isinstance(node, dict) and (part in node or (last and kind in ("missing", "extra_forbidden"))):
            path.append(str(part))
            node = node.get(part)
            if last:
                break
            owners, elements = _below(owners, elements, part)
        elif isinstance(node, list) and isinstance(part, int) and part < len(node):
            path.append(str(part))
            node = node[part]
            if last:
                break
            owners, elements = elements, []
        else:
            tagged = [owner for owner in owners if _tag(owner) == part or owner.__name__ == part]
            owners = tagged or owners
    return tuple(path), owners


def _below(owners, elements, part) -> tuple[list[type[BaseModel]], list[type[BaseModel]]]:
    if elements and not any(part in owner.model_fields for owner in owners):
        return elements, []
    infos = [owner.model_fields[part] for owner in owners if part in owner.model_fields]
    inner = [table for info in infos for table in tables(info.annotation)]
    return inner, [table for info in infos for table in element_tables(info.annotation)]


def _tag(owner: type[BaseModel]) -> Any:
    info = owner.model_fields.get("type")
    return info.default if info is not None else None


def _message(item: dict[str, Any], path: tuple[str, ...], owners: list[type[BaseModel]], cls: type[BaseModel]) -> str:
    kind, ctx, value = item["type"], item.get("ctx", {}), item.get("input")
    shown = "" if isinstance(value, dict | BaseModel) else f", not {_short(value)}"
    if kind == "extra_forbidden":
        return f"unknown key{_nearest_key(path, owners, cls)}"
    if kind == "missing":
        return "is needed"
    if kind == "literal_error":
        options = re.findall(r"'([^']*)'", ctx["expected"])
        return f"expected {_options(ctx['expected'])}{shown}{nearest(str(value), options)}"
    if kind == "union_tag_invalid":
        options = re.findall(r"'([^']*)'", ctx["expected_tags"])
        return f"type: expected {_options(ctx['expected_tags'])}, not '{ctx['tag']}'{nearest(ctx['tag'], options)}"
    if kind == "union_tag_not_found":
        return "type: is needed"
    if kind == "value_error":
        return str(ctx["error"])
    if kind == "string_pattern_mismatch":
        return f"expected text like {ctx['pattern']}{shown}"
    limits = {"greater_than": ("gt", ">"), "greater_than_equal": ("ge", "≥"), "less_than": ("lt", "<"),
              "less_than_equal": ("le", "≤")}  # fmt: skip
    if kind in limits:
        name, sign = limits[kind]
        bound = ctx[name]
        return f"must be {sign} {bound if isinstance(bound, int) else f'{bound:g}'}{shown}"
    if kind == "finite_number":
        return f"must be finite{shown}"
    if kind in ("too_short", "too_long"):
        return (
            f"needs {'at least' if kind == 'too_short' else 'at most'} {ctx.get('min_length', ctx.get('max_length'))}"
        )
    word = KINDS.get(kind.partition("_")[0])
    if word:
        return f"expected {word}{shown}"
    return item["msg"][:1].lower() + item["msg"][1:] + shown


def _options(expected: str) -> str:
    return expected.replace(" or ", ", ") if expected.count("'") > 4 else expected


def _short(value: Any) -> str:
    if isinstance(value, date | time):  # TOML's own
        return value.isoformat()
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _nearest_key(path: tuple[str, ...], owners: list[type[BaseModel]], cls: type[BaseModel]) -> str:
    key, names = path[-1], sorted({name for owner in owners for name in owner.model_fields})
    if key.startswith("no_") and key[3:] in names:
        if len(path) == 1:
            return ": --no-… is for true-or-false options and optional tables; give the option a value instead"
        return f": 'no' belongs to the front of the whole option, --no-….{key[3:].replace('_', '-')}"
    here = f"; known here: {', '.join(names)}" if 0 < len(names) <= 8 else ""
    return _of_another_type(path, cls) or _elsewhere(path, cls) or nearest(key, names) or here


def _of_another_type(path: tuple[str, ...], cls: type[BaseModel]) -> str:
    """A hint at the types of the key's table that have it, where the one chosen has not."""
    key = re.sub(r"\.\d+(?=\.|$)", ".*", ".".join(path))
    types = dict.fromkeys(repr(_tag(owner)) for name, _, owner in walk(cls) if name == key and _tag(owner))
    return f" for this type; {' and '.join(types)} {'has' if len(types) == 1 else 'have'} it" if types else ""


def _elsewhere(path: tuple[str, ...], cls: type[BaseModel]) -> str:
    """A hint at keys of the same name in other tables: `optim` → `trainer.optim`, `trainer.lr` → `trainer.optim.lr`.
    Those in the user's own table go before others, then the less nested."""
    if len(path) == 1 and path[0] in EXPERIMENT and issubclass(cls, Config):
        return f"; '{path[0]}' belongs into the table [experiment]"
    named = {key for key, _, _ in walk(cls) if f".{key}".endswith(f".{path[-1]}") and "*" not in key}
    below = {key for key in named if key.startswith(".".join([*path[:-1], ""]))}
    depth = min((key.count(".") for key in below or named), default=0)
    found = sorted(key for key in below or named if key.count(".") == depth)
    return f"; there is {' and '.join(map(repr, found))}" if 0 < len(found) <= 3 else ""
