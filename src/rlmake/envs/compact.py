"""Episodes as they arrive: numbers per token stay arrays until somebody asks for them as lists.

A list of Python numbers is several times the size of what travelled, and making and freeing it costs as much as all
else that is done with an episode. The way from an env server to a batch needs the arrays only; an algorithm, an
environment's code or a dump that looks at `token_ids`, `is_content` or `logprobs` finds the lists that verifiers
promises.
"""

import struct
from collections.abc import Callable
from typing import Any, TypedDict

import msgspec
import numpy as np
import verifiers.v1 as vf
from pydantic import PrivateAttr, model_serializer
from verifiers.v1.serve.delta import LIST_FIELDS

from rlmake.core.collector import without_cycles

try:
    from rlmake.envs import _packed
except ImportError:  # no compiler when rlmake was installed
    _packed = None

_ints = msgspec.msgpack.Decoder(list[int]).decode
_bools = msgspec.msgpack.Decoder(list[bool]).decode
_floats = msgspec.msgpack.Decoder(list[float]).decode
_pack = msgspec.msgpack.Encoder().encode
Buffer = bytes | memoryview
_FLOAT64, _FALSE, _TRUE = 0xCB, 0xC2, 0xC3  # msgpack's tags
_WIDE = np.dtype([("tag", "u1"), ("value", ">f8")])


class CompactNode(vf.MessageNode):
    """Equal in use to verifiers' node; `kept` arrays become lists when they are first looked at."""

    _kept: dict[str, np.ndarray] = PrivateAttr(default_factory=dict)

    def __getattr__(self, name: str) -> Any:  # called only for what the instance does not hold
        if name in ARRAYS and (values := self._kept.get(name)) is not None:
            self.__dict__[name] = values = values.tolist()
            without_cycles(values)
            return values
        return super().__getattr__(name)

    @model_serializer(mode="wrap")
    def _whole(self, handler: Callable[[Any], Any]) -> Any:
        for name in self._kept:
            getattr(self, name)
        return handler(self)


class CompactTrace(vf.WireTrace):
    nodes: list[CompactNode] = []


class CompactEpisode(vf.WireEpisode):
    traces: list[CompactTrace] = []


def kept(node: vf.MessageNode, name: str) -> np.ndarray | None:
    """The array of a stream as it arrived; None where the list is what counts: asked for or replaced since, or never
    an array."""
    if name in node.__dict__ or not isinstance(node, CompactNode):
        return None
    return node._kept.get(name)


def keep(node: CompactNode, streams: dict[str, np.ndarray | list]) -> None:
    """Give a node its streams."""
    for name, values in streams.items():
        if isinstance(values, list):
            without_cycles(values)
            setattr(node, name, values)
        else:
            del node.__dict__[name]
            node.__pydantic_fields_set__.add(name)
            node._kept[name] = values


def int32(values: list[int]) -> np.ndarray:
    """`np.asarray` in half the time. Raises `struct.error` beyond 32 bits."""
    return np.frombuffer(struct.pack(f"={len(values)}i", *values), np.int32)


def float32(values: list[float]) -> np.ndarray:
    """`np.asarray` in a fifth of the time, where all are plain floats."""
    try:
        wide = _wide(_pack(values))
    except TypeError:  # numpy's own numbers
        wide = None
    return np.asarray(values, np.float32) if wide is None else wide.astype(np.float32)


def _wide(packed: Buffer) -> np.ndarray | None:
    """The numbers of a packed list of plain floats: 9 bytes each."""
    count, head = _size(packed)
    if len(packed) != head + 9 * count:
        return None
    wide = np.frombuffer(packed, _WIDE, count, head)
    return wide["value"] if (wide["tag"] == _FLOAT64).all() else None


def _size(packed: Buffer) -> tuple[int, int]:
    """Of a packed list: how many there are, and the bytes before the first."""
    tag = packed[0] if len(packed) else 0
    if tag >> 4 == 9:
        return tag & 15, 1
    if tag in (0xDC, 0xDD):
        head = 3 if tag == 0xDC else 5
        return int.from_bytes(packed[1:head], "big"), head
    return -1, 0


def _token_ids(packed: Buffer) -> np.ndarray | list[int]:
    count, head = _size(packed)
    if _packed is not None and 0 <= count <= len(packed) - head:  # a byte each at least
        found = np.empty(count, np.int32)
        if _packed.int32s(packed, head, found.ctypes.data, count):
            return found
    values = _ints(packed)
    try:
        return int32(values)
    except struct.error:
        return values


def _logprobs(packed: Buffer) -> np.ndarray:
    wide = _wide(packed)
    return np.asarray(_floats(packed), np.float64) if wide is None else wide.astype(np.float64)


def _is_content(packed: Buffer) -> np.ndarray | list[bool]:
    count, head = _size(packed)
    flags = np.frombuffer(packed, np.uint8)[head:]
    true = flags == _TRUE
    if len(flags) == count and (true | (flags == _FALSE)).all():
        return true
    return _bools(packed)


def _mask(packed: Buffer) -> list[bool]:
    return _bools(packed)


# By name, what makes a stream of its packed list; a list of anything else raises `msgspec.ValidationError`.
ARRAYS = {"token_ids": _token_ids, "is_content": _is_content, "logprobs": _logprobs}
_STREAMS = ARRAYS | {"mask": _mask}
_Node = TypedDict(
    "_Node", {name: msgspec.Raw if name in _STREAMS else Any for name in vf.MessageNode.model_fields}, total=False
)
# What verifiers' assembly looks at.
FIELDS = ("trace", "discard", "open", "links", "routing_repairs", "set", "pending", *LIST_FIELDS)
_Delta = TypedDict("_Delta", {name: list[_Node] if name == "nodes" else Any for name in FIELDS}, total=False)
decoded: Callable[[bytes], dict[str, Any]] = msgspec.msgpack.Decoder(_Delta).decode
"""A delta of an episode; the streams of its nodes stay packed."""


def streams(node: dict[str, Any]) -> dict[str, np.ndarray | list]:
    """Take the numbers per token out of a plain node, checked: pydantic would make each of them anew."""
    return {name: make(memoryview(node.pop(name))) for name, make in _STREAMS.items() if name in node}
