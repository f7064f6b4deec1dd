"""Where tensors come from: the trainer half of a checkpoint (DCP), or a directory of safetensors.

The trainer half carries `model.json`, all that an export needs beside the tensors:

    {"schema": 1,
     "config": {…},             the model's Hugging Face configuration
     "assets": "…",             directory (or hub id) with tokenizer, generation config, processor, local *.py
     "chat_template": null,     text of a configured chat template that replaces the tokenizer's own
     "prefix": "model.",        what DCP keys of model tensors begin with; the rest is the tensor's Hugging Face name
     "lora": null}              the adapter's settings when the run trains one
"""

import io
import mmap
import threading
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open

from rlmake.core.errors import UserError
from rlmake.core.jsonio import read_json
from rlmake.models import layout

SCHEMA = 1
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True)
class Spec:
    """Type and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class Source(Protocol):
    """Named tensors that are loaded a few at a time, with the configuration and the folder of the other files."""

    tensors: dict[str, Spec]
    config: dict[str, Any]
    assets: str

    def load(self, names: Sequence[str]) -> dict[str, torch.Tensor]: ...


class CheckpointSource:
    """The model of a checkpoint's trainer half, whatever the number of ranks that wrote it. Needs no process group.

    DCP pickles its own `.metadata`: verify the checkpoint's hashes before reading one.
    """

    def __init__(self, trainer_half: Path):
        from torch.distributed.checkpoint import FileSystemReader

        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # for good: threads load
        self.folder = trainer_half
        facts = read_json(trainer_half / "model.json")
        if facts.get("schema") != SCHEMA:
            raise UserError(
                f"{trainer_half / 'model.json'}: schema {facts.get('schema')} is unknown, expected {SCHEMA}"
            )
        self.config, self.assets, self.prefix = facts["config"], facts["assets"], facts["prefix"]
        self.chat_template, self.lora = facts["chat_template"], facts["lora"]
        index = FileSystemReader(trainer_half).read_metadata()
        entries = index.state_dict_metadata
        self._places = index.storage_data
        self._chunks = {key: entry.chunks for key, entry in entries.items() if hasattr(entry, "chunks")}
        self._files: dict[str, mmap.mmap] = {}
        self._lock = threading.Lock()
        self.tensors = {
            key.removeprefix(self.prefix): Spec(entry.properties.dtype, tuple(entry.size))
            for key, entry in entries.items()
            if key.startswith(self.prefix) and hasattr(entry, "size")
        }
        if not self.tensors:
            raise UserError(f"{trainer_half}: holds no tensor whose name begins with {self.prefix!r}")

    def load(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Whole tensors, on the CPU, in the type they were saved in; not to be written to."""
        import torch.distributed.checkpoint as dcp

        found = {name: self._mapped(name) for name in names}
        state = {}
        for name in (name for name, tensor in found.items() if tensor is None):
            spec = self.tensors[name]
            state[self.prefix + name] = torch.empty(spec.shape, dtype=spec.dtype)
        if state:
            dcp.load(state, storage_reader=dcp.FileSystemReader(self.folder), no_dist=True)
        return {name: state[self.prefix + name] if tensor is None else tensor for name, tensor in found.items()}

    def _mapped(self, name: str) -> torch.Tensor | None:
        """A tensor that one rank saved, where it lies in its file (reading through DCP copies it three times). None for
        one in several pieces, or that was written in another way than this."""
        from torch.distributed.checkpoint.metadata import MetadataIndex

        key, spec = self.prefix + name, self.tensors[name]
        if len(self._chunks[key]) != 1 or not spec.numel:
            return None
        place = self._places.get(MetadataIndex(key, self._chunks[key][0].offsets))
        if place is None or getattr(place, "transform_descriptors", None):
            return None
        data = self._file(place.relative_path)
        saved = torch.load(_View(data, place.offset, place.length), map_location="meta", weights_only=True)
        storage = saved.untyped_storage()
        offset = getattr(storage, "_checkpoint_offset", None)  # of what `torch.save` wrote; nothing is compressed
        if offset is None or storage.nbytes() != spec.nbytes or not saved.is_contiguous():
            return None
        if (saved.dtype, tuple(saved.shape)) != (spec.dtype, spec.shape):
            return None
        start = place.offset + offset
        return torch.frombuffer(data, dtype=spec.dtype, count=spec.numel, offset=start).view(spec.shape)

    def _file(self, name: str) -> mmap.mmap:
        with self._lock:
            if name not in self._files:
                with open(self.folder / name, "rb") as file:
                    self._files[name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            return self._files[name]


class _View(io.RawIOBase):
    """A part of a mapped file, as a file."""

    def __init__(self, data: mmap.mmap, start: int, length: int):
        self._data, self._start, self._length, self._at = data, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        return self._at

    def readinto(self, buffer) -> int:
        size = max(0, min(len(buffer), self._length - self._at))
        buffer[:size] = self._data[self._start + self._at : self._start + self._at + size]
        self._at += size
        return size


class DirectorySource:
    """A Hugging Face directory: one `model.safetensors`, or shards with an index."""

    def __init__(self, folder: Path):
        self.folder = folder
        if not folder.is_dir():
            raise UserError(f"{folder}: no such directory")
        self.config, self.assets = read_json(folder / "config.json"), str(folder)
        if not isinstance(self.config, dict):
            raise UserError(f"{folder / 'config.json'}: not a model's configuration")
        if (folder / INDEX).is_file():
            index = read_json(folder / INDEX)
            self.weight_map: dict[str, str] = index.get("weight_map") if isinstance(index, dict) else None
            if not isinstance(self.weight_map, dict) or not all(isinstance(f, str) for f in self.weight_map.values()):
                raise UserError(f"{folder / INDEX}: holds no weight_map that names each tensor's file")
        elif (folder / SINGLE).is_file():
            self.weight_map = dict.fromkeys(_header(folder / SINGLE), SINGLE)
        else:
            raise UserError(f"{folder}: holds neither {SINGLE} nor {INDEX}")
        self.tensors = {}
        for name in sorted(set(self.weight_map.values())):
            for tensor, spec in _header(folder / name).items():
                if self.weight_map.get(tensor) == name:
                    self.tensors[tensor] = spec
        if self.config.get("tie_word_embeddings") and HEAD not in self.tensors:
            self.weight_map.pop(HEAD, None)  # older exporters list the head of a tied model without writing it
        if ghosts := sorted(self.weight_map.keys() - self.tensors.keys()):
            raise UserError(f"{folder / INDEX}: names {ghosts[0]}, which {self.weight_map[ghosts[0]]} does not hold")

    @property
    def shards(self) -> dict[str, list[str]]:
        """`{file: [tensor]}`, files in order of name, tensors in the order they lie in the file."""
        found: dict[str, list[str]] = {name: [] for name in sorted(set(self.weight_map.values()))}
        for tensor in self.tensors:
            found[self.weight_map[tensor]].append(tensor)
        return found

    def load(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        with ExitStack() as stack:
            files = {
                shard: stack.enter_context(safe_open(self.folder / shard, "pt"))
                for shard in {self.weight_map[name] for name in names}
            }
            return {name: files[self.weight_map[name]].get_tensor(name) for name in names}


def _header(path: Path) -> dict[str, Spec]:
    """Types and shapes, in the order in which the tensors lie."""
    return {entry.name: Spec(entry.dtype, entry.shape) for entry in layout.entries(path)}
