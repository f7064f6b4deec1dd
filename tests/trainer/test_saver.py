"""Saving behind the training's back: a copy of one moment, failures that end the run, a disk that is really full."""

import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from trainer_worlds import Ranks, one_rank

from rlmake import checkpoint as records
from rlmake.config import SFTConfig, parse
from rlmake.core.errors import RunFailed, UserError
from rlmake.core.rundir import RunContext, broadcast_dir, step_dir
from rlmake.models.renderer import CHATML
from rlmake.trainer import broadcast, checkpoint, saver, sft

FACTS = {"config": {}, "assets": "x", "chat_template": None, "prefix": checkpoint.PREFIX, "lora": None}
KEEP = SimpleNamespace(keep_last=None, keep_interval=None)


def load(folder: Path, like: torch.Tensor, world) -> torch.Tensor:
    p = torch.nn.Parameter(torch.zeros_like(like))
    checkpoint.load(folder, [("w", p)], None, world)
    return p.detach()


def test_what_is_saved_is_the_moment_of_the_call(tmp_path, monkeypatch):
    gate, write = threading.Event(), checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda *what: (gate.wait(20), write(*what)))
    with one_rank() as world:
        one = saver.Saver(RunContext.from_env(tmp_path), world, KEEP)
        weight, state = torch.randn(50, 3), {"step": 1, "ledger": None, "pool": [[1, 2]]}
        before = weight.clone()
        one.save(1, {"model.w": weight}, state, FACTS, ("trainer",))
        weight.zero_()  # the loop goes on while nothing is written yet
        state["pool"][0].append(3)
        assert records.newest(tmp_path) is None
        gate.set()
        one.wait()
        folder = step_dir(tmp_path, 1)
        assert records.verify(folder) == [] and torch.equal(load(folder, weight, world), before)
        assert checkpoint.read_state(folder)["pool"] == [[1, 2]]


def test_a_save_that_fails_is_raised_once_and_the_next_one_works(tmp_path, monkeypatch):
    with one_rank() as world:
        one = saver.Saver(RunContext.from_env(tmp_path), world, KEEP)
        save = lambda step: one.save(step, {"model.w": torch.ones(2)}, {"ledger": None}, FACTS, ("trainer",))  # noqa: E731
        with monkeypatch.context() as broken:
            broken.setattr(checkpoint, "save", lambda *_: (_ for _ in ()).throw(RunFailed("no space")))
            save(1)
            one._thread.join()
            assert one.failed
            with pytest.raises(RunFailed, match="no space"):
                save(2)
        assert not one.failed
        save(3)
        one.wait()
    assert records.newest(tmp_path) == 3


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1.5 MiB that can be made larger: `small_disk.grow()`."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        yield SimpleNamespace(
            path=folder, grow=lambda: subprocess.run(["mount", "-o", "remount,size=64m", str(folder)], check=True)
        )
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_full_disk_ends_the_run_in_one_line_and_loses_no_checkpoint(model_dir, data_dir, tmp_path, small_disk, ranks):
    def config(run_dir: Path, **keys) -> SFTConfig:
        raw = {
            "model": {"name": str(model_dir)}, "output_dir": str(run_dir), "max_steps": 6, "ckpt": {"interval": 1},
            "data": {"name": str(data_dir), "batch_size": 2, "seq_len": 64, "num_workers": 0},
            "renderer": {"name": "custom", "import_path": CHATML},
            "deployment": {"num_train_gpus": 0, "num_infer_gpus": 0, "cpu_threads": 1},
        }  # fmt: skip
        return parse(SFTConfig, raw | keys)

    path = small_disk.path / "run"
    log = Ranks(ranks, sft.train, config(path)).finish(code=1)
    said = [line for line in log.splitlines() if line.startswith("error: ")]
    assert said and all("no space left on the disk" in line for line in said), log[-3000:]
    assert "Traceback" not in log and not list(path.rglob("*.tmp-*"))
    reached = records.newest(path)
    assert reached in range(1, 6) and records.steps(path) == list(range(1, reached + 1))
    small_disk.grow()
    Ranks(ranks, sft.train, config(path, resume={"step": reached}), attempt=2).finish()
    Ranks(ranks, sft.train, config(tmp_path / "straight")).finish()
    ends = [records.read(step_dir(run, 6)) for run in (path, tmp_path / "straight")]
    content = [{f["path"]: f["blake3"] for f in end["files"] if f["path"].endswith(".distcp")} for end in ends]
    assert content[0] == content[1] and ends[0]["ledger"] == ends[1]["ledger"]


def test_a_broadcast_that_meets_a_full_disk_says_where_frees_its_part_and_ends_the_save_first(small_disk):
    ctx, waited = RunContext.from_env(small_disk.path), []
    named = [(f"w{n}", torch.nn.Parameter(torch.zeros(500, 300))) for n in range(3)]
    training = SimpleNamespace(
        ctx=ctx, facts=FACTS, step=3,
        config=SimpleNamespace(weight_broadcast=SimpleNamespace(type="filesystem", timeout=1)),
        policy=SimpleNamespace(named=lambda: named, exact=True), saver=SimpleNamespace(wait=lambda: waited.append(1)),
        world=SimpleNamespace(master=True, on_master=lambda action: action()),
    )  # fmt: skip
    sender = broadcast.Sender(training)
    with pytest.raises(RunFailed, match="broadcasts/step_3: no space left on the disk while the weights were written"):
        sender.send()
    assert waited and not broadcast_dir(small_disk.path, 3).exists()
    small_disk.grow()
    with pytest.raises(UserError, match="to accept weights v3"):  # written now: it is a receiver that is missing
        sender.send()
