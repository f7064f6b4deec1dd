"""Weights by files between streams of a GPU: no buffer is read, or used again, too early. Skipped without one."""

import pytest
import torch
from torch import nn

from rlmake.core.jsonio import hash_file
from rlmake.models import stream
from rlmake.trainer import weights

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_versions_that_follow_fast_arrive_whole(tmp_path, monkeypatch, dtype):
    """Files of a few MiB and small chunks, so that page-locked memory goes round many times; parameters change as soon
    as the call has returned, and kernels that write them are still under way when it begins."""
    monkeypatch.setattr(weights, "SHARD_BYTES", 3 << 20)
    monkeypatch.setattr(weights, "WRITERS", 2)
    monkeypatch.setattr(stream, "CHUNK", 1 << 20)
    shapes = [(4096, 1024), (33,), (1000, 700), *[(512, 512)] * 20]
    named = [(f"w{n:02}", nn.Parameter(torch.zeros(shape, device=DEVICE))) for n, shape in enumerate(shapes)]
    own = torch.cuda.Stream()
    for version in range(1, 6):
        with torch.cuda.stream(own), torch.no_grad():
            for n, (_, p) in enumerate(named):
                p.fill_(version).add_(torch.arange(p.numel(), device=DEVICE).view(p.shape) % 251 + n)
            wanted = {name: p.detach().clone() for name, p in named}
            hashes = weights.write_weights(named, tmp_path, dtype)
            for _, p in named:
                p.fill_(-1)
        assert len(hashes) > 4 and all(hash_file(tmp_path / name) == value for name, value in hashes.items())
        with torch.cuda.stream(torch.cuda.Stream()):
            found = dict(stream.tensors([tmp_path / name for name in hashes], DEVICE))
        torch.cuda.synchronize()
        assert found.keys() == wanted.keys()
        for name, tensor in found.items():
            assert tensor.is_cuda and torch.equal(tensor, wanted[name].to(dtype)), (version, name)
