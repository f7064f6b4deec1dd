"""The schema in words: what `--help` prints and what the tables of docs/configuration.md hold."""

import shutil
import textwrap
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from rlmake.config.fields import Config, element_tables, field_class, tables

WORDS = {int: "int", float: "float", str: "text", bool: "bool", Any: "any"}


@dataclass
class Row:
    """One key of a table: its name, type, default, class and meaning."""

    key: str
    type: str
    default: str
    kind: str
    doc: str


@dataclass
class Section:
    """One table: its class, its dotted path (empty for the root), the variant (`type`) it describes, and its keys."""

    table: type[BaseModel]
    path: str
    doc: str
    variant: str | None = None
    rows: list[Row] = field(default_factory=list)


def type_text(annotation: Any) -> str:
    """A type in few words: `int`, `"a" | "b"`, `list of text`, `table`."""
    if annotation is type(None):
        return "None"
    if annotation in WORDS:
        return WORDS[annotation]
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_text(parts[0])
    if origin is Literal:
        return " | ".join(repr(part) for part in parts)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(dict.fromkeys(type_text(part) for part in parts))
    if origin is list:
        return f"list of {type_text(parts[0])}"
    if origin is dict:
        return f"table of {type_text(parts[1])}"
    return "table" if isinstance(annotation, type) and issubclass(annotation, BaseModel) else str(annotation)


def default_text(info: FieldInfo) -> str:
    if info.default_factory is not None:
        value = info.default_factory()  # type: ignore[call-arg]
    else:
        value = info.default
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, BaseModel):
        kind = getattr(value, "type", None)
        return f"type {kind!r}" if kind else "on, with its defaults"
    if isinstance(value, dict) and any(isinstance(item, BaseModel) for item in value.values()):
        return ", ".join(value)
    return repr(value)


def _variant(table: type[BaseModel]) -> str | None:
    info = table.model_fields.get("type")
    return info.default if info is not None and typing.get_origin(info.annotation) is Literal else None


def sections(cls: type[BaseModel], path: str = "", *, into_entries: bool = True) -> Iterator[Section]:
    """The tables of a schema, outer ones first; elements of lists stand under `*`.

    With `into_entries` false, tables that are an entry point's own schema are named but not described.
    """
    own = Section(cls, path, _first_line(cls), _variant(cls))
    inner: list[tuple[str, type[BaseModel]]] = []
    for name, info in cls.model_fields.items():
        below = [(f"{path}.{name}".strip("."), table) for table in tables(info.annotation)]
        below += [(f"{path}.{name}.*".strip("."), table) for table in element_tables(info.annotation)]
        inner += below
        kind = field_class(info)
        if kind is not None or not below or len(below) > 1:
            own.rows.append(
                Row(name, type_text(info.annotation), default_text(info), kind or "", info.description or "")
            )
    if own.rows:
        yield own
    for key, table in inner:
        if into_entries or getattr(table, "entry", None) is None:
            yield from sections(table, key, into_entries=into_entries)


def _first_line(cls: type[BaseModel]) -> str:
    return (cls.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ")


def help_text(cls: type[Config], prog: str) -> str:
    """The text of `--help`: every option once, a line or two each."""
    width = max(60, min(shutil.get_terminal_size().columns, 140))
    out = [f"usage: {prog} [@ FILE ...] [--KEY VALUE ...]", "", _first_line(cls), ""]
    out += textwrap.wrap(
        "Files (.toml, .yaml, .json) are merged from left to right: tables key by key, lists replaced; options win "
        "over files. '--table @ FILE' merges a file below a table. '--no-x' switches x off, a bare '--x' switches a "
        "table on.",
        width,
    )
    for section in sections(cls):
        title = f"[{section.path}]" if section.path else "options"
        title += f' type = "{section.variant}"' if section.variant else ""
        out += ["", f"{title}  {section.doc if section.path else ''}".rstrip()]
        for row in section.rows:
            if row.key == "type":
                continue
            flag = f"{section.path}.{row.key}".strip(".").replace("_", "-")
            head = f"  --{flag} {row.type.replace(' | ', '|')}"
            text = f"{row.doc} ({row.default})" if row.default == "required" else f"{row.doc} (default: {row.default})"
            out.append(head)
            out += textwrap.wrap(text, width, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join(out) + "\n"
