"""The shape of what a trace stream holds: records are checked once, where they are read, so that what shows them can
rely on it. Keys that are not named here may hold anything."""

from typing import Annotated, Any

import msgspec

from rlmake.monitors.traces import read

Scalar = int | float | str | bool | None
Place = Annotated[int, msgspec.Meta(ge=0)]


class Message(msgspec.Struct):
    tool_calls: list[dict[str, Any]] | None = None


class Link(msgspec.Struct):
    node: Scalar
    type: Scalar


class Node(msgspec.Struct):
    parent: Scalar = None
    message: Message | None = None
    token_ids: list[int] | None = None
    mask: list[bool | int | float] | None = None
    logprobs: list[float | None] | None = None
    advantages: list[float | None] | None = None
    is_content: list[bool | int | float] | None = None
    semantic_parents: list[Link] = []


class Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    cached_input_tokens: int | None = None
    completion_tokens: int | None = None


class Call(msgspec.Struct):
    node: Scalar = None
    usage: Usage | None = None
    error: dict[str, Any] | None = None


class Agent(msgspec.Struct):
    name: Any = None


class Trace(msgspec.Struct):
    agent: Agent | None = None
    nodes: list[Node] | None = None
    calls: list[Call] | None = None
    rewards: dict[str, dict[str, Any] | None] | None = None
    metrics: dict[str, Any] | None = None
    timing: dict[str, Any] | None = None
    errors: list[dict[str, Any]] | None = None


class Episode(msgspec.Struct):
    traces: list[Trace] | None = None
    errors: list[dict[str, Any]] | None = None
    task: dict[str, Any] | None = None


class Branch(msgspec.Struct):
    index: int = 0
    spans: list[tuple[Place, Place]] | None = None
    advantages: list[float | None] | None = None
    trainer_logprobs: list[float | None] | None = None
    entropies: list[float | None] | None = None
    is_masked: list[bool | int | float | None] | None = None


class Annotation(msgspec.Struct):
    branches: list[Branch] | None = None


class Head(msgspec.Struct):
    """The first line of a trace in flight."""

    env: dict[str, Any] | None = None
    group: dict[str, Any] | None = None


class Delta(msgspec.Struct):
    """A line of a trace in flight."""

    nodes: list[Node] | None = None
    calls: list[Call] | None = None
    errors: list[Any] | None = None
    pending: list[dict[str, Any]] | None = None
    links: dict[str, list[Any]] | None = None
    set: dict[str, Any] | None = None


def checked(value: dict[str, Any], kind: type, where: str) -> dict[str, Any]:
    """`value` as it is. Raises `read.Torn` that says what stands where something else belongs."""
    try:
        msgspec.convert(value, kind, strict=True)
    except (msgspec.ValidationError, OverflowError, RecursionError) as error:
        raise read.Torn(f"{where}: {error}") from None
    return value


def fits(value: dict[str, Any], kind: type) -> bool:
    try:
        checked(value, kind, "")
    except read.Torn:
        return False
    return True
