"""Weights by files: put together in memory, hashed there, written by threads; and read back by those who serve them."""

import errno
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rlmake.core.errors import RunFailed, UserError
from rlmake.core.jsonio import hash_file, read_json
from rlmake.core.rundir import RunContext
from rlmake.inference.weights import check_version, read_version
from rlmake.trainer import broadcast as sending
from rlmake.trainer import weights
from rlmake.transport import WeightReceiver, WeightSender

SHAPES = {"embed": (50, 8), "a.w": (8, 8), "a.b": (8,), "one": (), "b.w": (16, 8), "b.b": (1, 1)}


@pytest.fixture(params=["in host memory", "copied first, as from a GPU"])
def small(request, monkeypatch):
    """Files of at most 300 bytes, two of them in memory at a time."""
    monkeypatch.setattr(weights, "_elsewhere", lambda tensor: request.param != "in host memory")
    monkeypatch.setattr(weights, "SHARD_BYTES", 300)
    monkeypatch.setattr(weights, "WRITERS", 2)


def parameters():
    generator = torch.Generator().manual_seed(3)
    return [(name, nn.Parameter(torch.randn(shape, generator=generator))) for name, shape in SHAPES.items()]


def published(tmp_path, named, dtype):
    """The folder of version 1, offered as the trainer does."""
    sender = WeightSender(tmp_path, RunContext(tmp_path, "run", "run", 1, None, tmp_path, tmp_path))
    folder = sender.prepare(1)
    sender.offer(1, hashes=weights.write_weights(named, folder, dtype))
    return folder


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_written_is_what_is_read(tmp_path, small, dtype):
    named = parameters()
    named[1] = ("a.w", nn.Parameter(named[1][1].T))  # not contiguous
    folder = published(tmp_path, named, dtype)
    files = read_json(folder / "version.json")["files"]
    assert len(files) > 2 and files[0]["size"] > 300  # the first tensor is larger than a file may be, and stands alone
    assert all(hash_file(folder / file["path"]) == file["blake3"] for file in files)
    found, version = read_version(folder, 1)
    assert version == 1 and found.keys() == SHAPES.keys()
    for name, p in named:
        assert torch.equal(found[name], p.detach().to(dtype))


def test_a_later_step_does_not_reach_the_files(tmp_path, small):
    """Parameters change as soon as the version is written; what is on its way was copied."""
    named = parameters()
    before = {name: p.detach().clone() for name, p in named}
    folder = published(tmp_path, named, torch.float32)
    with torch.no_grad():
        for _, p in named:
            p.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in read_version(folder, 1)[0].items())


@pytest.mark.parametrize("where", range(3))
def test_every_flipped_bit_and_cut_file_is_named(tmp_path, small, where):
    folder = published(tmp_path, parameters(), torch.bfloat16)
    path = sorted(folder.glob("*.safetensors"))[where]
    receiver = WeightReceiver(tmp_path, RunContext(tmp_path, "run", "run", 1, None, tmp_path, tmp_path))
    good = path.read_bytes()
    for content in (good[:-1] + bytes([good[-1] ^ 1]), bytes([good[0] ^ 4]) + good[1:], good[:-1], good + b"\0"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=rf"{path.name}: missing or damaged, v1 cannot be served"):
            check_version(folder, 1)
        with pytest.raises(UserError, match=rf"{path.name}: missing or damaged, weights v1"):
            receiver.verify(1)
        if len(content) != len(good):
            with pytest.raises(UserError, match=rf"{path.name}: missing or damaged, weights v1"):
                receiver.verify(1, hashes=False)
    path.write_bytes(good)
    assert check_version(folder, 1) == 1 and receiver.verify(1) == receiver.verify(1, hashes=False) == folder


def test_a_file_that_was_not_written_as_meant_is_refused(tmp_path, small):
    """Hashes are of what was meant: a disk that kept less, or other bytes, is found out by the receiver."""
    sender = WeightSender(tmp_path, RunContext(tmp_path, "run", "run", 1, None, tmp_path, tmp_path))
    folder = sender.prepare(1)
    hashes = weights.write_weights(parameters(), folder, torch.bfloat16)
    path = folder / "model-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-2])
    sender.offer(1, hashes=hashes)
    with pytest.raises(UserError, match=r"model-00002.safetensors: missing or damaged"):
        check_version(folder, 1)


def test_other_ranks_only_gather(small, monkeypatch):
    gathered = []
    monkeypatch.setattr(weights, "whole", lambda p, dtype: gathered.append(p))
    named = parameters()
    assert weights.write_weights(named, None, torch.bfloat16) == {}
    assert [id(p) for p in gathered] == [id(p) for _, p in named]


def test_a_full_disk_is_said_after_all_is_gathered(tmp_path, small, monkeypatch):
    """Other ranks wait in the gathering: the master goes through all of it, then fails and leaves nothing behind."""
    gathered, whole, write = [], weights.whole, weights._write

    def full(path, *args):
        if path.name > "model-00001":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, *args)

    monkeypatch.setattr(weights, "whole", lambda p, dtype: gathered.append(p) or whole(p, dtype))
    monkeypatch.setattr(weights, "_write", full)
    named = parameters()
    sender = object.__new__(sending.Sender)
    sender.adapter, sender.dtype, sender.seconds, waited = None, torch.bfloat16, {}, []
    policy, saver = SimpleNamespace(named=lambda: named), SimpleNamespace(wait=lambda: waited.append(True))
    sender.training = SimpleNamespace(policy=policy, saver=saver)
    folder = tmp_path / "step_1"
    folder.mkdir()
    with pytest.raises(RunFailed, match="no space left on the disk while the weights were written"):
        sender._write(folder)
    assert len(gathered) == len(named) and waited and not folder.exists()
