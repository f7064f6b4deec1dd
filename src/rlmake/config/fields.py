"""Declaring configuration fields, and what each of them means for the identity of a result.

Every leaf field says of itself whether it changes the result (`semantic`), only where, how fast or how loud the work is
done (`runtime`), or how far it goes (`horizon`: steps, checkpoint cadence and retention). Tables are declared with
`group`; an optional table is declared like a leaf, since its presence is a value. `classify` lists the classes of a
schema, `semantic_part` takes from a configuration what belongs into a fingerprint.
"""

import copy
import functools
import types
import typing
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, model_validator
from pydantic.fields import FieldInfo
from pydantic_config import BaseConfig
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

FieldClass = Literal["semantic", "runtime", "horizon"]
CLASSES = typing.get_args(FieldClass)
PLAIN = frozenset({str, int, float, bool, type(None)})


class Config(BaseConfig):
    """Base of every table: unknown keys are faults, numbers are finite, true and false are no numbers."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=(), defer_build=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return _with_strict_numbers(handler(source))

    @model_validator(mode="before")
    @classmethod
    def _coerce_dict_str_values(cls, data: Any) -> Any:
        """In place of the library's rule, which turns the texts of any table of texts into numbers, also a file's:
        only the command line has untyped values, and they are typed where it is read."""
        return data

    @model_validator(mode="before")
    @classmethod
    def _default_discriminator_types(cls, data: Any) -> Any:
        """The library's rule (a table without `type` is the default variant), with those fields listed once."""
        if isinstance(data, dict):
            for name, kind in _default_types(cls):
                value = data.get(name)
                if isinstance(value, dict) and "type" not in value:
                    value["type"] = kind
        return data

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """A copy of all that can change: pydantic's rule, with which it copies defaults, without its price."""
        copied = self.__copy__()
        for name, value in copied.__dict__.items():
            if type(value) not in PLAIN:
                copied.__dict__[name] = copy.deepcopy(value, memo)
        return copied

    def reclassified(self) -> dict[str, FieldClass]:
        """Fields (dotted, relative to this table) whose class depends on the values of this configuration."""
        return {}

    entry: ClassVar[str | None] = None
    """Name of the entry point whose root this class is; None for a table inside another."""
    undumped: ClassVar[tuple[str, ...]] = ()
    """Shared keys that `dump` leaves out: what they said stands in the tables that they filled."""


INTEGERS = 2**63 - 1  # what a tensor's index, an Arrow column and a TOML integer can hold
OFFSETS = 2**31 - 1  # tokens of a row: positions and document offsets are int32 in the attention kernels
INNER = ("schema", "items_schema", "keys_schema", "values_schema")  # the keys of a core schema with one inside


def _with_strict_numbers(schema: Any, top: bool = True) -> Any:
    """A table's core schema, in which no number is made of true or false and every integer fits 64 bits.

    Done once for a class and in the schema itself: what it costs is a call for each number that is given. Tables
    inside have been through it already, and so has a class whose schema was built before.
    """
    kind = schema["type"]
    if kind in ("int", "float"):
        if kind == "int":
            schema = {"le": INTEGERS, "ge": -INTEGERS, **schema}
        return core_schema.no_info_before_validator_function(_no_integer if kind == "int" else _no_number, schema)
    if (kind in ("model", "definition-ref") and not top) or _is_strict(schema):
        return schema
    if kind == "model-fields":
        fields = {name: {**field, "schema": _with_strict_numbers(field["schema"], False)}
                  for name, field in schema["fields"].items()}  # fmt: skip
        return {**schema, "fields": fields}
    changed = {key: _with_strict_numbers(schema[key], top and kind != "model") for key in INNER
               if isinstance(schema.get(key), dict)}  # fmt: skip
    if kind == "union":
        changed["choices"] = [_with_strict_numbers(choice, False) for choice in schema["choices"]]
    return {**schema, **changed}


def _is_strict(schema: Any) -> bool:
    return schema["type"] == "function-before" and schema["function"]["function"] in (_no_integer, _no_number)


def _no_integer(value: Any) -> Any:
    if value is True or value is False:
        raise PydanticCustomError("int_type", "expected an integer")
    return value


def _no_number(value: Any) -> Any:
    if value is True or value is False:
        raise PydanticCustomError("float_type", "expected a number")
    return value


@functools.cache
def _default_types(cls: type[BaseModel]) -> tuple[tuple[str, str], ...]:
    """`(field, type)` of the fields that are unions told apart by `type`, with the default's type."""
    defaults = ((name, info.default) for name, info in cls.model_fields.items())
    return tuple(
        (name, value.type) for name, value in defaults if isinstance(value, BaseModel) and hasattr(value, "type")
    )


def _declare(kind: str, default: Any, doc: str, extra: dict[str, Any]) -> Any:
    marks = {"class": kind, "shared": extra.pop("shared", False)}
    if isinstance(default, type | types.FunctionType):
        return Field(default_factory=default, description=doc, json_schema_extra=marks, **extra)
    return Field(default, description=doc, json_schema_extra=marks, **extra)


def semantic(default: Any, doc: str, **constraints: Any) -> Any:
    """A field that changes the result. `shared=True`: only fills other fields and is counted where it lands."""
    return _declare("semantic", default, doc, constraints)


def runtime(default: Any, doc: str, **constraints: Any) -> Any:
    """A field that says where, how fast or how loud: it never changes the result."""
    return _declare("runtime", default, doc, constraints)


def horizon(default: Any, doc: str, **constraints: Any) -> Any:
    """A field that says how far a run goes and what it keeps on the way."""
    return _declare("horizon", default, doc, constraints)


def group(default: BaseModel | type, doc: str, **constraints: Any) -> Any:
    """A table (or a union of tables told apart by `type`); its fields have classes of their own."""
    if isinstance(default, type):
        return Field(default_factory=default, description=doc, **constraints)
    return Field(default, description=doc, **constraints)


def field_class(info: FieldInfo) -> FieldClass | None:
    """The declared class of a field, None for a table or a field that forgot to say."""
    extra = info.json_schema_extra
    return extra.get("class") if isinstance(extra, dict) else None


def is_shared(info: FieldInfo) -> bool:
    extra = info.json_schema_extra
    return bool(isinstance(extra, dict) and extra.get("shared"))


def tables(annotation: Any) -> list[type[BaseModel]]:
    """The table classes a field's annotation allows (`A`, `A | None`, `A | B`), not those inside lists."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return tables(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return [table for part in typing.get_args(annotation) for table in tables(part)]
    return []


def element_tables(annotation: Any) -> list[type[BaseModel]]:
    """The table classes inside a `list[…]` or `dict[str, …]` annotation (also an optional one)."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is list:
        return tables(parts[0])
    if origin is dict:
        return tables(parts[1])
    if origin in (typing.Union, types.UnionType, typing.Annotated):
        return [table for part in parts for table in element_tables(part)]
    return []


def walk(cls: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo, type[BaseModel]]]:
    """`(dotted key, field, owner)` of every field below `cls`; elements of lists and dictionaries stand under `*`."""
    for name, info in cls.model_fields.items():
        key = f"{prefix}{name}"
        yield key, info, cls
        for table in tables(info.annotation):
            yield from walk(table, f"{key}.")
        for table in element_tables(info.annotation):
            yield from walk(table, f"{key}.*.")


def classify(cls: type[BaseModel]) -> dict[str, FieldClass]:
    """`{dotted key: class}` of every leaf of a schema. Raises `TypeError` for a leaf without a class."""
    found: dict[str, FieldClass] = {}
    for key, info, owner in walk(cls):
        kind = field_class(info)
        nested = bool(tables(info.annotation) or element_tables(info.annotation))
        if kind is None and nested:
            continue
        if kind not in CLASSES:
            raise TypeError(f"{owner.__name__}: field {key} has no class")
        if found.setdefault(key, kind) != kind:
            raise TypeError(f"{owner.__name__}: field {key} is {kind} here and {found[key]} in another variant")
    return found


def semantic_part(config: Config, *, with_horizon: bool = False) -> dict[str, Any]:
    """What of a resolved configuration belongs into its identity: the semantic fields, all defaults written out.

    Shared keys of a root are left out: they are counted in the tables that they filled. Tables without any semantic
    field vanish. `with_horizon` adds the horizon fields.
    """
    wanted = ALL_BUT_RUNTIME if with_horizon else SEMANTIC
    return _select(config, wanted, _overrides(config)) or {}


SEMANTIC, ALL_BUT_RUNTIME = frozenset({"semantic"}), frozenset({"semantic", "horizon"})
Overrides = dict[str, Any]  # field → its class, or the overrides of the fields of that table


@functools.cache
def _marks(cls: type[BaseModel]) -> tuple[tuple[str, FieldClass | None], ...]:
    """`(field, declared class)` of a table's own fields, without those that only fill others."""
    return tuple((name, field_class(info)) for name, info in cls.model_fields.items() if not is_shared(info))


@functools.cache
def _counting(cls: type[BaseModel], wanted: frozenset[str]) -> tuple[tuple[str, FieldClass | None], ...]:
    """Those of `_marks` that can count while nothing in the table is reclassified."""
    return tuple((name, declared) for name, declared in _marks(cls) if declared is None or declared in wanted)


@functools.cache
def _changing(cls: type[BaseModel]) -> tuple[str, ...]:
    """Fields of a table that may hold a table with `reclassified` fields."""
    return tuple(name for name, info in cls.model_fields.items() if any(map(_changes, tables(info.annotation))))


def _changes(cls: type[BaseModel]) -> bool:
    own = issubclass(cls, Config) and cls.reclassified is not Config.reclassified
    return own or bool(_changing(cls))


def _overrides(config: BaseModel) -> Overrides:
    """All `reclassified` fields below `config`; an outer table's word counts over an inner one's."""
    found: Overrides = {}
    for name in _changing(type(config)):
        value = getattr(config, name)
        if isinstance(value, BaseModel) and (inner := _overrides(value)):
            found[name] = inner
    for key, kind in config.reclassified().items() if isinstance(config, Config) else ():
        *parents, last = key.split(".")
        functools.reduce(lambda table, part: table.setdefault(part, {}), parents, found)[last] = kind
    return found


def _select(config: BaseModel, wanted: frozenset[str], overrides: Overrides | None) -> dict[str, Any] | None:
    out: dict[str, Any] = {}
    for name, declared in _marks(type(config)) if overrides else _counting(type(config), wanted):
        kind, inner, value = declared, None, getattr(config, name)
        if overrides and name in overrides:
            changed = overrides[name]
            kind, inner = (declared, changed) if isinstance(changed, dict) else (changed, None)
        if not (kind is None or kind in wanted or (isinstance(value, BaseModel) and _any_counts(inner, wanted))):
            continue
        picked = value if type(value) in PLAIN else _pick(value, wanted, inner)
        if picked is not None or kind is not None:
            out[name] = picked
    return out or None


def _any_counts(overrides: Overrides | None, wanted: frozenset[str]) -> bool:
    """Whether a field was reclassified to count, although the table itself does not."""
    return any(
        _any_counts(kind, wanted) if isinstance(kind, dict) else kind in wanted for kind in (overrides or {}).values()
    )


def _pick(value: Any, wanted: frozenset[str], overrides: Overrides | None) -> Any:
    if isinstance(value, BaseModel):
        return _select(value, wanted, overrides)
    if isinstance(value, list | tuple):
        return [_pick(item, wanted, overrides) for item in value]
    if isinstance(value, dict):
        return {key: _pick(item, wanted, overrides) for key, item in value.items()}
    return value


def dump(config: BaseModel) -> dict[str, Any]:
    """A JSON-able dictionary: every default written out, None kept, shared keys where they landed."""
    return config.model_dump(mode="json", exclude=set(getattr(config, "undumped", ())))
