"""The trainer's half: exact state, parameters without a gradient, mismatches in one line, failure leaves nothing."""

import errno

import pytest
import torch
from torch import nn
from trainer_worlds import one_rank

from rlmake.checkpoint import publish
from rlmake.config.optim import AdamWConfig, MuonConfig, SGDConfig, SignSGDConfig
from rlmake.core.errors import RunFailed, UserError
from rlmake.core.rundir import RunContext, step_dir
from rlmake.export.sources import CheckpointSource
from rlmake.trainer import checkpoint, optim, rng

FACTS = {"config": {}, "assets": "x", "chat_template": None, "prefix": checkpoint.PREFIX, "lora": None}


class Toy(nn.Module):
    """Two layers with dropout, a parameter that no forward reaches and a frozen one."""

    def __init__(self, seed: int = 0):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 2)
        self.unreached = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        with torch.no_grad():
            for p in (self.a.weight, self.b.weight):
                p.copy_(torch.randn(p.shape, generator=g))

    def forward(self, x):
        return self.b(torch.dropout(torch.tanh(self.a(x)), 0.1, train=True)) * self.frozen


class Run:
    def __init__(self, config, seed: int = 0):
        self.model = Toy(seed)
        self.named = list(self.model.named_parameters())
        self.optimizer = optim.build(config, self.named)
        optim.ensure_state(self.optimizer)
        self.losses: list[float] = []

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            loss = self.model(x).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())

    def tensors(self) -> dict[str, torch.Tensor]:
        return {key: value.clone() for key, value in checkpoint.tensors_of(self.named, self.optimizer).items()}


CONFIGS = [AdamWConfig(lr=1e-2), SGDConfig(lr=1e-2), MuonConfig(lr=1e-2), SignSGDConfig(lr=1e-2)]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.type)
def test_four_steps_and_four_are_eight(tmp_path, config):
    config = config.model_copy(update={"weight_decay": 0.01})
    with one_rank() as world:
        rng.seed_all(3, 0)
        straight = Run(config)
        straight.steps(1, 8)

        rng.seed_all(3, 0)
        first = Run(config)
        first.steps(1, 4)
        folder = step_dir(tmp_path, 4)
        checkpoint.save(folder, first.tensors(), {"step": 4, "rng": rng.capture()}, FACTS, world)
        publish(
            tmp_path, 4, ("trainer",), policy_version=4, world_size=1, ledger=None, ctx=RunContext.from_env(tmp_path)
        )
        first.steps(5, 5)  # killed after this one: its draws and weights are lost

        second = Run(config, seed=9)
        checkpoint.load(folder, second.named, second.optimizer, world)
        rng.restore(checkpoint.read_state(folder)["rng"])
        second.steps(5, 8)
        assert second.losses == straight.losses[4:]
        for key, value in straight.tensors().items():
            assert torch.equal(value, second.tensors()[key]), key

        if config.type != "sign_sgd":  # a start from the weights alone is another run, or this test shows nothing
            cold = Run(config, seed=9)
            checkpoint.load(folder, cold.named, None, world)
            rng.restore(checkpoint.read_state(folder)["rng"])
            cold.steps(5, 8)
            assert cold.losses[0] == straight.losses[4] and cold.losses[1:] != straight.losses[5:]


def saved(tmp_path, world, config=CONFIGS[0]) -> tuple[Run, object]:
    run = Run(config.model_copy(update={"weight_decay": 0.0}))
    run.steps(1, 1)
    folder = step_dir(tmp_path, 1)
    checkpoint.save(folder, run.tensors(), {"step": 1}, FACTS, world)
    return run, folder


def test_an_export_reads_what_was_saved(tmp_path):
    with one_rank() as world:
        run, folder = saved(tmp_path, world)
    source = CheckpointSource(folder / "trainer")
    found = source.load(list(source.tensors))
    assert found.keys() == dict(run.named).keys()
    assert all(torch.equal(found[name], p) for name, p in run.named)


def test_another_model_or_optimizer_is_one_line(tmp_path):
    with one_rank() as world:
        run, folder = saved(tmp_path, world, SGDConfig(lr=1e-2))
        adam = Run(AdamWConfig(lr=1e-2, weight_decay=0.0))
        with pytest.raises(UserError, match=r"holds no optim\..*: saved with another model or optimizer"):
            checkpoint.load(folder, adam.named, adam.optimizer, world)
        wider = [(name, nn.Parameter(torch.zeros(*p.shape, 2))) for name, p in run.named]
        with pytest.raises(UserError, match="has shape"):
            checkpoint.load(folder, wider, None, world)
        with pytest.raises(UserError, match="which the model lacks"):
            checkpoint.load(folder, run.named[:2], None, world)
        plain = Run(SignSGDConfig(lr=1e-2, weight_decay=0.0))
        with pytest.raises(UserError, match=r"holds optim\..*, which the optimizer lacks"):
            checkpoint.load(folder, plain.named, plain.optimizer, world)
        checkpoint.load(folder, plain.named, None, world)


def test_a_full_disk_leaves_nothing_and_says_so(tmp_path, monkeypatch):
    with one_rank() as world:
        run, folder = saved(tmp_path, world)
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

        def full(*_, **__):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(checkpoint, "write_json", full)
        with pytest.raises(RunFailed, match="no space left on the disk while the trainer half was written"):
            checkpoint.save(step_dir(tmp_path, 2), run.tensors(), {"step": 2}, FACTS, world)
    assert not list(tmp_path.rglob("*.tmp-*"))
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_no_byte_object_goes_into_dcp(tmp_path):
    """Everything that is not a tensor is in the JSON files, so an index entry of another kind is a fault."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    with one_rank() as world:
        _, folder = saved(tmp_path, world)
    entries = FileSystemReader(folder / "trainer").read_metadata().state_dict_metadata
    assert entries and all(isinstance(entry, TensorStorageMetadata) for entry in entries.values())
