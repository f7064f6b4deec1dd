"""The main job with its real processes at toy size: built, killed, resumed, not built again."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from rlmake.core import jsonio
from rlmake.monitors import names
from rlmake.monitors.rows import HEAD

ALL = ("outputs/toy/rl/weights", "outputs/toy/rl/evals/toy", "outputs/toy/sft/evals/toy", "outputs/toy/rl/report.html")
NOTHING = "Nothing to be done"


def ledger(run: Path) -> dict[int, list[str]]:
    """`{step: samples}` of the final trajectory: of a step trained twice, the later attempt counts."""
    rows: dict[int, list[str]] = {}
    for path in sorted((run / "ledger").glob("attempt_*.jsonl"), key=lambda p: int(p.stem.rpartition("_")[2])):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            rows[row["step"]] = row["samples"]
    return dict(sorted(rows.items()))


def wait_for_step(run: Path, step: int, driver, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (run / "checkpoints" / f"step_{step}" / "COMPLETE").exists():
            return
        assert driver.poll() is None, "the build ended before it could be killed"
        time.sleep(0.1)
    raise AssertionError(f"no checkpoint of step {step} within {seconds} s")


def weights(run: Path, step: int) -> str:
    return jsonio.hash_file(run / "exports" / f"step_{step}" / "weights" / "model.safetensors")


@pytest.mark.timeout(1200)
def test_the_main_job(toy):
    toy.build(*ALL)
    run = toy.training("outputs/toy/rl/logs")

    # What was asked for is there and says what it is.
    report = jsonio.read_json(toy.folder / "outputs/toy/rl/evals/toy/report.json")
    env = report["envs"]["reverse-text"]
    assert env["num_episodes"] == 16
    assert 0 <= env["reward"]["ci95"][0] <= env["reward"]["mean"] <= env["reward"]["ci95"][1] <= 1
    assert "<html" in (toy.folder / "outputs/toy/rl/report.html").read_text()
    rows = [json.loads(line) for line in (run / "monitors/file/metrics.jsonl").read_text().splitlines()]
    mismatch = [row["mismatch_kl/all/max"] for row in rows if "mismatch_kl/all/max" in row]
    assert mismatch[0] == 0.0, "trainer and engine agree bit for bit on the first, on-policy, batch"
    logged = {(row["producer"], key) for row in rows for key in row}
    mine = [metric for metric in names.METRICS if metric.when in ("", "engine metrics", "checkpoints", "an rl loss")]
    expected = [(metric.producer, name) for metric in mine for name in names.expand(metric, ["reverse-text"])]
    assert [one for one in expected if one not in logged] == []
    told = [(who, key) for who, key in sorted(logged) if who in ("orch", "trainer") and key not in HEAD]
    assert [one for one in told if names.find(one[1], one[0]) is None] == []
    assert NOTHING in toy.plan(*ALL)

    # The exported weights load in transformers and hold finite numbers.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(toy.folder / "outputs/toy/rl/weights")
    tokenizer = AutoTokenizer.from_pretrained(toy.folder / "outputs/toy/rl/weights")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "abc"}], return_tensors="pt", return_dict=True)
    assert torch.isfinite(model(**ids).logits).all()

    # Comments, a new name's worth of touching, and a log level: nothing to do.
    file = toy.folder / "experiments/toy/rl.toml"
    file.write_text("# a comment\n" + file.read_text() + "\n[log]\nlevel = 'debug'\n")
    for path in (toy.folder / "experiments").rglob("*.toml"):
        os.utime(path)
    assert NOTHING in toy.plan(*ALL)

    # Another rate: one training, its export, evaluation and report, and nothing else.
    file.write_text(file.read_text().replace("lr = 1e-3", "lr = 2e-3"))
    planned = toy.plan(*ALL)
    words = [line.split() for line in planned.splitlines()]
    stats = {row[0]: int(row[1]) for row in words if len(row) == 2 and row[1].isdigit()}
    made = {rule: stats[rule] for rule in ("data", "model", "train", "export", "evaluate", "report") if rule in stats}
    assert made == {"train": 1, "export": 1, "evaluate": 1, "report": 1}
    file.write_text(file.read_text().replace("lr = 2e-3", "lr = 1e-3"))

    # The same again, killed in mid-run: the same bytes, nothing trained twice in the final trajectory, nobody left.
    expected, samples = weights(run, 6), ledger(run)
    shutil.rmtree(run)
    for link in ("weights", "report.html", "logs", "configs", "evals"):
        path = toy.folder / "outputs/toy/rl" / link
        path.unlink() if path.is_symlink() else shutil.rmtree(path, ignore_errors=True)
    driver = toy.start("outputs/toy/rl/weights")
    wait_for_step(run, 2, driver)
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    for pid in toy.processes():  # the job may be in a session of its own: kill the launcher as a user would
        cmdline = Path(f"/proc/{pid}/cmdline")
        if cmdline.exists() and b"rlmake.cli.job" in cmdline.read_bytes():
            os.kill(pid, signal.SIGKILL)
    assert toy.wait_gone(10) == [], "a process outlived its launcher"
    toy.build("outputs/toy/rl/weights")
    assert weights(run, 6) == expected
    assert ledger(run) == samples
    assert sorted(samples) == [1, 2, 3, 4, 5, 6]
    assert (run / "logs" / "attempt_2").is_dir()
    flat = [sample for batch in samples.values() for sample in batch]
    assert len(flat) == len(set(flat))


@pytest.mark.timeout(900)
def test_a_dead_child_ends_the_run_and_two_ranks_resume(toy):
    text = (toy.folder / "experiments/toy/rl.toml").read_text()
    text = text.replace("num_train_ranks = 1", "num_train_ranks = 2").replace("max_steps = 6", "max_steps = 4")
    toy.write("experiments/toy/two.toml", text.replace("toy/sft/weights", "toy/model/weights"))
    driver = toy.start("outputs/toy/two/weights")
    deadline = time.monotonic() + 400
    while not (toy.folder / "outputs/toy/two/logs").exists() and time.monotonic() < deadline:
        assert driver.poll() is None, toy.log()[-4000:]
        time.sleep(0.2)
    run = toy.training("outputs/toy/two/logs")
    wait_for_step(run, 2, driver)
    victims = [pid for pid in toy.processes() if b"EnvServer" in _cmdline(pid)]
    assert victims
    os.kill(victims[0], signal.SIGKILL)
    assert driver.wait(120) != 0
    assert "SIGKILL" in toy.log()
    assert toy.wait_gone(10) == []
    toy.build("outputs/toy/two/weights")
    assert sorted(ledger(run)) == [1, 2, 3, 4]


def _cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
