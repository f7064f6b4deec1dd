"""The safetensors format: a header that says type, shape and place of every tensor, and the tensors behind it.

https://github.com/huggingface/safetensors#format
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rlmake.core.errors import UserError

TYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in TYPES.items()}


class Entry(NamedTuple):
    """A tensor in a file: its bytes `start … stop`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def entries(path: Path) -> list[Entry]:
    """What a file holds, in its order; no tensor is read. Raises `UserError` for a file that is not whole."""
    try:
        with open(path, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            base = file.tell()
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        if foreign := next((name for name, entry in tensors.items() if entry["dtype"] not in TYPES), None):
            raise UserError(f"{path}: {foreign} is of type {tensors[foreign]['dtype']}, expected {', '.join(TYPES)}")
        found = []
        for name, entry in tensors.items():
            start, stop = entry["data_offsets"]
            found.append(Entry(name, TYPES[entry["dtype"]], tuple(entry["shape"]), base + start, base + stop))
        found.sort(key=lambda entry: (entry.start, entry.stop))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, MemoryError) as error:
        raise UserError(f"{path}: not readable as safetensors: {error}") from None
    size, promised = path.stat().st_size, max((entry.stop for entry in found), default=base)
    if size != promised:
        raise UserError(f"{path}: not readable as safetensors: {size} bytes, its header promises {promised}")
    return found


def header(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> tuple[bytes, dict[str, int]]:
    """The beginning of a file that holds these tensors one after the other, and the byte at which each begins."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at, places = 0, {}
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * dtype.itemsize
        table[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        places[name], at = at, at + size
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, {name: len(head) + place for name, place in places.items()}
