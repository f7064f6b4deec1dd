"""Reading safetensors by pieces: the same tensors as the library's own reader gives, whatever lies where."""

import json

import pytest
import torch
from safetensors.torch import save_file

from rlmake.core.errors import UserError
from rlmake.models import stream

CPU = torch.device("cpu")


def write(path, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (300, 40), "a.w": (7, 9), "a.b": (9,), "none": (0, 4), "one": (), "z.w": (64, 64)}
    tensors = {f"{path.stem}.{name}": torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tensors[f"{path.stem}.half"] = torch.randn(5, 3, generator=generator).bfloat16()
    tensors[f"{path.stem}.byte"] = torch.arange(13, dtype=torch.uint8)
    save_file(tensors, path)
    return tensors


@pytest.mark.parametrize("piece,chunk,ahead", [(1 << 20, 1 << 16, 4), (500, 64, 1), (1, 1000, 3)])
def test_tensors_are_those_of_the_files(tmp_path, monkeypatch, piece, chunk, ahead):
    for name, value in {"CHUNK": chunk, "AHEAD": ahead}.items():
        monkeypatch.setattr(stream, name, value)
    monkeypatch.setattr(stream.pieces, "__defaults__", (piece,))
    paths = [tmp_path / "x.safetensors", tmp_path / "y.safetensors"]
    wanted = write(paths[0]) | write(paths[1], 1)
    found = list(stream.tensors(paths, CPU))  # all of them live at once, so none may share memory that is used again
    assert len(found) == len(wanted) and {name.split(".")[0] for name, _ in found[: len(found) // 2]} == {"x"}
    for name, tensor in found:
        assert tensor.dtype == wanted[name].dtype and torch.equal(tensor, wanted[name]), name
    assert {name: t.shape for name, t in stream.mapped(paths)} == {name: t.shape for name, t in found}


def test_odd_places(tmp_path):
    """Nothing promises that a tensor begins where its type would have it."""
    path = tmp_path / "odd.safetensors"
    table = {"u": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}
    table["f"] = {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]}
    head = json.dumps(table).encode()
    numbers = torch.tensor([1.5, -2.0])
    path.write_bytes(len(head).to_bytes(8, "little") + head + b"abc" + numbers.numpy().tobytes())
    found = dict(stream.tensors([path], CPU))
    assert torch.equal(found["f"], numbers) and found["u"].tolist() == list(b"abc")


def test_a_reader_that_stops_early_leaves_nothing_waiting(tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "CHUNK", 64)
    write(tmp_path / "x.safetensors")
    source = stream.tensors([tmp_path / "x.safetensors"], CPU)
    next(source)
    source.close()


def test_damaged_files(tmp_path):
    path = tmp_path / "x.safetensors"
    write(path)
    whole = path.read_bytes()
    for content, words in (
        (whole[:-1], "its header promises"),
        (whole[:20], "not readable"),
        (b"", "not readable"),
        (b"\2" + bytes(7) + b"[]", "not readable"),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=words):
            list(stream.tensors([path], CPU))
