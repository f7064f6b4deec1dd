"""The SFT loop: killed and resumed it is the uninterrupted run, bit for bit; how it diverges, validates and leaves."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from trainer_worlds import Ranks

from rlmake import checkpoint as records
from rlmake.config import SFTConfig, dump, parse
from rlmake.core.rundir import RunContext
from rlmake.models.renderer import CHATML
from rlmake.monitors import read
from rlmake.trainer import sft
from rlmake.trainer.training import Training
from rlmake.trainer.world import World

STEPS, KILL_BEHIND = 8, 4


@pytest.fixture
def config(model_dir, data_dir):
    """`config(run_dir, **keys)`: a resolved configuration."""

    def make(run_dir: Path, **keys) -> SFTConfig:
        raw = {
            "model": {"name": str(model_dir)},
            "data": {"name": str(data_dir), "batch_size": 4, "seq_len": 64, "num_workers": 0},
            "renderer": {"name": "custom", "import_path": CHATML},
            "deployment": {"num_train_gpus": 0, "num_infer_gpus": 0, "cpu_threads": 1},
            "optim": {"lr": 1e-2},
            "scheduler": {"type": "cosine", "warmup_steps": 2},
            "ckpt": {"interval": 2},
            "max_steps": STEPS,
            "output_dir": str(run_dir),
        }
        for key, value in keys.items():
            raw[key] = {**raw.get(key, {}), **value} if isinstance(value, dict) and key != "scheduler" else value
        return parse(SFTConfig, raw)

    return make


def run(config: SFTConfig, ranks: int = 1, attempt: int = 1, code: int = 0) -> str:
    return Ranks(ranks, sft.train, config, attempt).finish(code)


def tensors(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    folder = run_dir / "checkpoints" / f"step_{step}" / "trainer"
    found = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in found.items()}
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return state


def trace(run_dir: Path) -> list[tuple[float, ...]]:
    keys = ("loss/mean", "optim/grad_norm", "optim/lr", "progress/num_samples", "progress/num_tokens")
    rows = [row.metrics for row in read(run_dir) if row.producer == "trainer"]
    return [tuple(row[key] for key in keys) for row in rows if "loss/mean" in row]


def ledger(run_dir: Path) -> dict[int, dict]:
    rows = {}
    for file in sorted((run_dir / "ledger").glob("*.jsonl")):
        rows |= {row["step"]: row for row in map(json.loads, file.read_text().splitlines())}
    return rows


CONSTANT = {"type": "constant"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_and_resumed_is_the_uninterrupted_run(config, tmp_path, ranks):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    log = run(config(straight), ranks)
    lines = re.findall(r"SUCCESS.*Step (\d+) \| [\d.]+s \| Loss \d+\.\d{4} \| Grad", log)
    assert lines == [str(step) for step in range(1, STEPS + 1)]

    process = Ranks(ranks, sft.train, config(killed))
    process.wait_until((killed / "checkpoints" / f"step_{KILL_BEHIND}" / "COMPLETE").exists)
    process.kill()
    step = records.newest(killed)
    assert step is not None and KILL_BEHIND <= step < STEPS
    records.prune_future(killed, step)
    run(config(killed, resume={"step": step}), ranks, attempt=2)

    a, b = tensors(straight, STEPS), tensors(killed, STEPS)
    assert a.keys() == b.keys() and any(key.endswith("exp_avg") for key in a)
    assert [key for key in a if not torch.equal(a[key], b[key])] == []
    assert trace(straight) == trace(killed) and len(trace(killed)) == STEPS
    assert {n: row["ledger"] for n, row in ledger(straight).items()} == {
        n: row["ledger"] for n, row in ledger(killed).items()
    }
    assert records.read(straight / "checkpoints" / f"step_{STEPS}")["ledger"] == ledger(killed)[STEPS]["ledger"]
    samples = [sample for _, row in sorted(ledger(killed).items()) for sample in row["samples"]]
    assert len(samples) == len(set(samples)), "no row twice in one epoch"


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_adapter_with_dropout_killed_and_resumed_is_the_uninterrupted_run(config, tmp_path, ranks):
    """Also with recomputation, which must draw the same dropout again. Only the adapter is in the checkpoint."""
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    table = {"model": {"lora": {"rank": 4, "alpha": 8, "dropout": 0.2}, "ac": {}}}
    run(config(straight, **table), ranks)
    process = Ranks(ranks, sft.train, config(killed, **table))
    process.wait_until((killed / "checkpoints" / f"step_{KILL_BEHIND}" / "COMPLETE").exists)
    process.kill()
    step = records.newest(killed)
    records.prune_future(killed, step)
    run(config(killed, resume={"step": step}, **table), ranks, attempt=2)
    a, b = tensors(straight, STEPS), tensors(killed, STEPS)
    assert [key for key in a if not torch.equal(a[key], b[key])] == [] and trace(straight) == trace(killed)
    assert all(".lora_A." in key or ".lora_B." in key for key in a)
    assert sum(key.startswith("model.") for key in a) == 2 * 7 * 2 and any(key.endswith("exp_avg") for key in a)
    facts = json.loads((straight / "checkpoints" / f"step_{STEPS}" / "trainer" / "model.json").read_text())
    assert facts["lora"]["rank"] == 4 and facts["lora"]["alpha"] == 8.0 and "q_proj" in facts["lora"]["target_modules"]
    assert any(tensor.any() for key, tensor in a.items() if key.endswith("lora_B.weight")), "B has moved"
    losses = [loss for loss, *_ in trace(straight)]
    assert losses[-1] < losses[0]


def test_dropout_rests_in_validation_and_recomputation_changes_nothing(config, tmp_path, data_dir):
    """Validation of the untrained adapter is the base model's; with and without recomputation the bytes are equal."""
    losses, traces = [], []
    data = {**config(tmp_path).data.model_dump(), "splits": ["heldout"]}
    val = {"interval": 9, "eval_on_start": True, "data": data}
    for name, model in (
        ("base", {}),
        ("plain", {"lora": {"rank": 4, "dropout": 0.5}}),
        ("again", {"lora": {"rank": 4, "dropout": 0.5}, "ac": {}}),
    ):
        path = tmp_path / name
        run(config(path, max_steps=2, scheduler=CONSTANT, val=val, model=model))
        losses.append(next(row.metrics["val/loss"] for row in read(path) if "val/loss" in row.metrics))
        traces.append(trace(path))
    assert losses[0] == losses[1] == losses[2]
    assert traces[1] == traces[2] != traces[0]


def test_a_lora_target_that_fits_nothing_ends_the_run_in_one_line(config, tmp_path):
    log = run(config(tmp_path / "run", model={"lora": {"target_modules": ["q_prj"]}}), code=2)
    assert "model.lora.target_modules: no linear layer fits 'q_prj'; did you mean 'q_proj'?" in log
    assert "Traceback" not in log


def test_one_rank_then_two_then_one_goes_on_with_the_same_rows(config, tmp_path):
    """Order, packing and ledger exactly; losses to rounding."""
    one, many = tmp_path / "one", tmp_path / "many"
    run(config(one, max_steps=6, scheduler=CONSTANT))
    run(config(many, max_steps=2, scheduler=CONSTANT))
    log = run(config(many, max_steps=4, scheduler=CONSTANT, resume={"step": 2}), ranks=2, attempt=2)
    assert "was saved by 1 ranks, there are 2" in log
    log = run(config(many, max_steps=6, scheduler=CONSTANT, resume={"step": 4}), attempt=3)
    assert "was saved by 2 ranks, there are 1" in log
    assert {n: row["ledger"] for n, row in ledger(one).items()} == {n: row["ledger"] for n, row in ledger(many).items()}
    assert [ledger(one)[n]["samples"] for n in range(1, 7)] == [ledger(many)[n]["samples"] for n in range(1, 7)]
    for (loss, norm, *_), (other, other_norm, *_) in zip(trace(one), trace(many), strict=True):
        assert other == pytest.approx(loss, rel=1e-5) and other_norm == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize(
    ("ranks", "model"), [(2, {"cp": 2}), (2, {"dp_replicate": 2}), (4, {"cp": 2, "dp_replicate": 2})]
)
def test_shared_rows_and_copies_of_the_model_change_only_rounding(config, tmp_path, ranks, model):
    """Context parallelism (two query heads, one key-value head), replicas, both."""
    one, many = tmp_path / "one", tmp_path / "many"
    run(config(one, max_steps=3, scheduler=CONSTANT, model={"attn": "varlen"}))
    world = {"num_train_ranks": ranks}
    run(config(many, max_steps=3, scheduler=CONSTANT, model={"attn": "varlen", **model}, deployment=world), ranks)
    assert [ledger(one)[n]["samples"] for n in range(1, 4)] == [ledger(many)[n]["samples"] for n in range(1, 4)]
    for (loss, norm, *_), (other, other_norm, *_) in zip(*map(trace, (one, many)), strict=True):
        assert other == pytest.approx(loss, rel=1e-5) and other_norm == pytest.approx(norm, rel=1e-4)
    a, b = tensors(one, 3), tensors(many, 3)
    assert all(torch.allclose(a[key], b[key], atol=1e-4) for key in a if key.startswith("model."))


def unsharded(*args) -> int:
    """The loop as GPUs run it that each hold a whole model: gradients are summed once a step."""
    World.unsharded = True
    return sft.train(*args)


def test_whole_models_killed_and_resumed_change_only_rounding(config, tmp_path):
    """One rank, and two with their own copy, killed: the same rows and losses."""
    one, many = tmp_path / "one", tmp_path / "many"
    run(config(one))
    two = {"model": {"dp_replicate": 2}, "deployment": {"num_train_ranks": 2}}
    copies = config(many, **two)
    process = Ranks(2, unsharded, copies)
    process.wait_until((many / "checkpoints" / f"step_{KILL_BEHIND}" / "COMPLETE").exists)
    process.kill()
    step = records.newest(many)
    records.prune_future(many, step)
    resumed = config(many, **two, resume={"step": step})
    Ranks(2, unsharded, resumed, attempt=2).finish()
    assert [ledger(one)[n]["samples"] for n in range(1, 9)] == [ledger(many)[n]["samples"] for n in range(1, 9)]
    for (loss, norm, *_), (other, other_norm, *_) in zip(trace(one), trace(many), strict=True):
        assert other == pytest.approx(loss, rel=1e-5) and other_norm == pytest.approx(norm, rel=1e-4)
    a, b = tensors(one, STEPS), tensors(many, STEPS)
    assert a.keys() == b.keys() and all(torch.allclose(a[key], b[key], atol=1e-4) for key in a)


@pytest.mark.parametrize("targets", [["norm"], ["mlp", "attn_proj"]])
def test_selective_recomputation_changes_no_byte(config, tmp_path, targets):
    plain, again = tmp_path / "plain", tmp_path / "again"
    run(config(plain, max_steps=2, scheduler=CONSTANT))
    run(config(again, max_steps=2, scheduler=CONSTANT, model={"ac": {"mode": "selective", "targets": targets}}))
    assert trace(plain) == trace(again)


def test_micro_batches_change_only_rounding(config, tmp_path):
    runs = [tmp_path / "one", tmp_path / "four"]
    for path, size in zip(runs, (1, 4), strict=True):
        run(config(path, max_steps=3, scheduler=CONSTANT, data={"micro_batch_size": size}))
    for (loss, norm, *_), (other, other_norm, *_) in zip(*map(trace, runs), strict=True):
        assert other == pytest.approx(loss, rel=1e-5) and other_norm == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_asked_to_leave_it_saves_after_the_step_and_leaves_with_75(config, tmp_path, ranks):
    path = tmp_path / "run"
    process = Ranks(ranks, sft.train, config(path, max_steps=5000, ckpt={"interval": None}))
    metrics = path / "monitors" / "file" / "metrics.jsonl"
    process.wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 1)
    process.signal(signal.SIGUSR1)
    process.finish(code=75)
    step = records.newest(path)
    assert step == max(ledger(path)) and records.verify(path / "checkpoints" / f"step_{step}") == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_diverges_says_so_and_saves_nothing_of_it(config, tmp_path, ranks):
    path = tmp_path / "run"
    wild = {"optim": {"lr": 1e30, "max_norm": None}, "scheduler": CONSTANT, "ckpt": {"interval": 1}}
    log = run(config(path, **wild), ranks, code=76)
    record = json.loads((path / "diverged.json").read_text())
    assert re.search(r"error: step \d+ diverged: .*weights of step \d+ were not changed", log)
    assert "Traceback" not in log
    newest = records.newest(path)
    assert newest == (record["step"] - 1 or None)
    if newest:
        assert all(tensor.isfinite().all() for key, tensor in tensors(path, newest).items() if key.startswith("model."))


def test_validation_is_over_all_its_rows_and_disturbs_nothing(config, tmp_path):
    """Nor the checkpoint of a step that was validated: it holds what the other run's does, optimizer state too."""
    plain, validated = tmp_path / "plain", tmp_path / "validated"
    saving = {"interval": 1}
    run(config(plain, max_steps=2, scheduler=CONSTANT, ckpt=saving))
    data = {**config(plain).data.model_dump(), "splits": ["heldout"]}
    val = {"interval": 1, "eval_on_start": True, "data": data}
    run(config(validated, max_steps=2, scheduler=CONSTANT, ckpt=saving, val=val))
    for step in (1, 2):
        a, b = tensors(plain, step), tensors(validated, step)
        assert a.keys() == b.keys() and any(key.endswith("exp_avg") for key in b)
        assert [key for key in a if not torch.equal(a[key], b[key])] == []
    losses = [row.metrics["val/loss"] for row in read(validated) if "val/loss" in row.metrics]
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert trace(plain) == trace(validated)
    two = tmp_path / "two"
    run(config(two, max_steps=1, scheduler=CONSTANT, val=val), ranks=2)
    assert tensors(two, 1).keys() == tensors(plain, 1).keys()
    first = next(row.metrics["val/loss"] for row in read(two) if "val/loss" in row.metrics)
    assert first == pytest.approx(losses[0], rel=1e-6)


def test_another_data_set_is_refused_unless_its_state_is_skipped(config, tmp_path, data_dir):
    path = tmp_path / "run"
    run(config(path, max_steps=2, scheduler=CONSTANT))
    other = {"data": {"splits": ["heldout"]}, "max_steps": 4, "scheduler": CONSTANT, "resume": {"step": 2}}
    assert "is not the data set that the checkpoint was made with" in run(config(path, **other), attempt=2, code=2)
    run(config(path, ckpt={"skip_dataloader": True}, **other), attempt=3)
    assert ledger(path)[3]["samples"][0].startswith("0/")


def test_a_run_of_the_build_skips_nothing_when_it_continues_itself(config, tmp_path, monkeypatch):
    """Or a kill would make it another run; a fork, and a run started directly, skip what is asked."""
    path, fork = tmp_path / "run", tmp_path / "fork"
    skips = {"interval": 1, "skip_progress": True, "skip_optimizer": True}
    run(config(path, max_steps=2, scheduler=CONSTANT))
    run(config(fork, max_steps=3, scheduler=CONSTANT, ckpt=skips, resume={"dir": f"{path}/checkpoints/step_2"}))
    samples = trace(path)[-1][3]
    assert trace(fork)[0][3] < samples, "the totals of a fork count anew"
    monkeypatch.setenv("RLMAKE_FINGERPRINT", "0" * 16)
    training = object.__new__(Training)
    for resume, skipped in (({"step": 2}, False), ({"dir": "x/step_2"}, True)):
        training.config = config(path, ckpt=skips, resume=resume)
        training.ctx = RunContext.from_env(path)
        assert training.skips("optimizer") is skipped


def test_the_module_is_started_as_the_launcher_does(config, tmp_path):
    """`python -m rlmake.trainer.sft @ file`: main, arguments, exit codes."""
    path = tmp_path / "run"
    path.mkdir()
    (path / "sft.json").write_text(json.dumps(dump(config(path, max_steps=1, scheduler=CONSTANT))))
    command = [sys.executable, "-m", "rlmake.trainer.sft"]
    done = subprocess.run([*command, "@", str(path / "sft.json")], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "Step 1 |" in done.stderr, done.stderr[-3000:]
    assert records.newest(path) == 1
