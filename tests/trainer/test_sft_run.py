"""The SFT process itself: killed and resumed it is the uninterrupted run, bit for bit; how it diverges and leaves."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from trainer_worlds import torchrun

from rlmake import checkpoint as records
from rlmake.config import SFTConfig, dump, parse
from rlmake.models.renderer import CHATML
from rlmake.monitors import read

STEPS, KILL_BEHIND = 8, 4


@pytest.fixture
def config(model_dir, data_dir):
    """`config(run_dir, **keys)` → path of the resolved configuration."""

    def make(run_dir: Path, name: str = "sft", **keys) -> Path:
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
            raw[key] = {**raw.get(key, {}), **value} if isinstance(value, dict) else value
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / f"{name}.json"
        path.write_text(json.dumps(dump(parse(SFTConfig, raw))))
        return path

    return make


def finish(process, run_dir: Path, attempt: int = 1, code: int = 0) -> str:
    """Wait for the end; the log. Fails with it when the exit code is another."""
    try:
        process.wait(timeout=240)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    log = (run_dir / f"log_{attempt}.txt").read_text()
    assert process.returncode == code, log[-4000:]
    return log


def wait_for(condition, process, seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not condition() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.01)


def tensors(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    folder = run_dir / "checkpoints" / f"step_{step}" / "trainer"
    found = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in found.items()}
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return state


def trace(run_dir: Path) -> list[tuple[float, ...]]:
    keys = ("loss/mean", "optim/grad_norm", "optim/lr", "progress/num_samples", "progress/num_tokens")
    return [tuple(row.metrics[key] for key in keys) for row in read(run_dir) if row.producer == "trainer"]


def ledger(run_dir: Path) -> dict[int, dict]:
    rows = {}
    for file in sorted((run_dir / "ledger").glob("*.jsonl")):
        rows |= {row["step"]: row for row in map(json.loads, file.read_text().splitlines())}
    return rows


@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_and_resumed_is_the_uninterrupted_run(config, tmp_path, ranks):
    place = {"deployment": {"num_train_gpus": 0, "num_infer_gpus": 0, "cpu_threads": 1, "num_train_ranks": ranks}}
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    log = finish(torchrun(ranks, "rlmake.trainer.sft", config(straight, **place), straight), straight)
    lines = re.findall(r"SUCCESS.*Step (\d+) \| [\d.]+s \| Loss \d+\.\d{4} \| Grad", log)
    assert lines == [str(step) for step in range(1, STEPS + 1)]

    process = torchrun(ranks, "rlmake.trainer.sft", config(killed, **place), killed)
    wait_for((killed / "checkpoints" / f"step_{KILL_BEHIND}" / "COMPLETE").exists, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    step = records.newest(killed)
    assert step is not None and step >= KILL_BEHIND
    records.prune_future(killed, step)
    resumed = config(killed, "resumed", resume={"step": step}, **place)
    finish(torchrun(ranks, "rlmake.trainer.sft", resumed, killed, attempt=2), killed, 2)

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


def test_two_ranks_are_close_to_one_and_another_world_size_continues(config, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    place = {"num_train_gpus": 0, "num_infer_gpus": 0, "cpu_threads": 1, "num_train_ranks": 2}
    finish(torchrun(1, "rlmake.trainer.sft", config(one, max_steps=4, scheduler={"type": "constant"}), one), one)
    start = config(two, max_steps=2, scheduler={"type": "constant"}, deployment=place)
    finish(torchrun(2, "rlmake.trainer.sft", start, two), two)
    rest = config(two, "rest", max_steps=4, scheduler={"type": "constant"}, resume={"step": 2})
    log = finish(torchrun(1, "rlmake.trainer.sft", rest, two, attempt=2), two, 2)
    assert "was saved by 2 ranks, there are 1" in log
    assert [ledger(one)[n]["samples"] for n in range(1, 5)] == [ledger(two)[n]["samples"] for n in range(1, 5)]
    for (loss, norm, *_), (other, other_norm, *_) in zip(trace(one), trace(two), strict=True):
        assert other == pytest.approx(loss, rel=1e-5) and other_norm == pytest.approx(norm, rel=1e-4)


def test_asked_to_leave_it_saves_after_the_step_and_leaves_with_75(config, tmp_path):
    run = tmp_path / "run"
    process = torchrun(1, "rlmake.trainer.sft", config(run, max_steps=5000, ckpt={"interval": None}), run)
    metrics = run / "monitors" / "file" / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 1, process)
    process.send_signal(signal.SIGUSR1)
    finish(process, run, code=75)
    step = records.newest(run)
    assert step == max(ledger(run)) and records.verify(run / "checkpoints" / f"step_{step}") == []


def test_a_run_that_diverges_says_so_and_saves_nothing_of_it(config, tmp_path):
    run = tmp_path / "run"
    wild = config(run, optim={"lr": 1e30, "max_norm": None}, scheduler={"type": "constant"}, ckpt={"interval": 1})
    log = finish(torchrun(1, "rlmake.trainer.sft", wild, run), run, code=76)
    record = json.loads((run / "diverged.json").read_text())
    assert re.search(r"error: step \d+ diverged: .*weights of step \d+ were not changed", log)
    assert "Traceback" not in log
    newest = records.newest(run)
    assert newest is None or newest == record["step"] - 1
    if newest:
        assert all(tensor.isfinite().all() for key, tensor in tensors(run, newest).items() if key.startswith("model."))


def test_validation_is_over_all_its_rows_and_disturbs_nothing(config, tmp_path, data_dir):
    plain, validated = tmp_path / "plain", tmp_path / "validated"
    finish(torchrun(1, "rlmake.trainer.sft", config(plain, max_steps=2, scheduler={"type": "constant"}), plain), plain)
    path = config(validated, max_steps=2, scheduler={"type": "constant"})
    resolved = json.loads(path.read_text())
    data = {**resolved["data"], "splits": ["heldout"]}
    resolved["val"] = {"interval": 1, "eval_on_start": True, "data": data}
    path.write_text(json.dumps(resolved))
    finish(torchrun(1, "rlmake.trainer.sft", path, validated), validated)
    assert trace(plain) == trace(validated)[-2:] if len(trace(validated)) > 2 else trace(plain) == trace(validated)
    losses = [row.metrics["val/loss"] for row in read(validated) if "val/loss" in row.metrics]
    assert len(losses) == 3 and losses[-1] < losses[0]
