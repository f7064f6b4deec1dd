"""A run of two sources, asynchronous, batches over ZMQ: each of its processes is killed once, and the run still ends.

Real processes at toy size, started by `rl` as a user would. One attempt for each kind of process that ends the run, a
worker of an env server that does not; the last attempt runs to the end. What is left is compared with the list of the
metrics' names.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlmake.config import DataConfig, InitConfig, parse
from rlmake.core import procs
from rlmake.envs import data
from rlmake.monitors import names

STEPS = 14  # the kills come at steps 1 to 7 or so
CONFIG = """
model.name = "{model}"
max_steps = {steps}
seq_len = 128
deterministic = false
[deployment]
num_train_gpus = 0
num_infer_gpus = 0
[inference.vllm]
max_model_len = 64
[rollout_transport]
type = "zmq"
port = 0
[orchestrator]
batch_size = 16
[orchestrator.renderer]
name = "custom"
import_path = "rlmake.models.chatml.ChatMLRenderer"
[orchestrator.train]
group_size = 4
sampling.max_completion_tokens = 8
[[orchestrator.train.source]]
name = "short"
ratio = 2
env.taskset = {{ id = "reverse-text", path = "{data}" }}
[[orchestrator.train.source]]
name = "same"
env.taskset = {{ id = "reverse-text", path = "{data}" }}
[orchestrator.train.source.curriculum.sampler]
type = "difficulty_pool"
[orchestrator.eval]
interval = 3
group_size = 2
[[orchestrator.eval.source]]
name = "held"
env.taskset = {{ id = "reverse-text", path = "{data}" }}
select.limit = 4
[trainer.optim]
lr = 1e-3
[ckpt]
interval = 1
keep_last = 2
"""
VICTIMS = ("rlmake.inference.server", "PRL::EnvServer", "PRL::Orchestrator", "rlmake.trainer.rl", "launcher")
WHEN = (
    "",
    "evaluations",
    "evaluations of two tasks",
    "engine metrics",
    "checkpoints",
    "asynchronous mode",
    "an rl loss",
)


class Run:
    """`rl` in a folder of its own."""

    def __init__(self, folder: Path, config: Path):
        self.folder, self.config, self.run_dir = folder, config, folder / "out/toy"
        self.driver: subprocess.Popen | None = None

    def start(self, *args: str) -> None:
        command = [sys.executable, "-c", "from rlmake.cli.main import rl; rl()", "@", str(self.config)]
        command += ["--output-dir", str(self.folder / "out"), "--run.name", "toy", *args]
        with open(self.folder / "launcher.log", "ab") as log:
            self.driver = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def wait(self, seconds: float = 120) -> int:
        return self.driver.wait(seconds)

    def steps(self) -> list[int]:
        found = (self.run_dir / "checkpoints").glob("step_*/COMPLETE")
        return sorted(int(path.parent.name.partition("_")[2]) for path in found)

    def reach(self, step: int, seconds: float = 240) -> None:
        """Until checkpoint `step` is complete."""
        deadline = time.monotonic() + seconds
        while not any(done >= step for done in self.steps()):
            assert self.driver.poll() is None, self.log()[-4000:]
            assert time.monotonic() < deadline, self.log()[-4000:]
            time.sleep(0.05)

    def processes(self, title: str = "") -> list[procs.Process]:
        mark = str(self.run_dir)
        mine = procs.find("PRL_ATTEMPT_LOG_DIR", lambda value: value.startswith(mark))
        return [one for one in mine if title in _cmdline(one.pid)]

    def log(self) -> str:
        return (self.folder / "launcher.log").read_text(errors="replace")

    def ledger(self) -> dict[int, list[str]]:
        rows: dict[int, list[str]] = {}
        paths = (self.run_dir / "ledger").glob("attempt_*.jsonl")
        for path in sorted(paths, key=lambda p: int(p.stem.rpartition("_")[2])):
            rows |= {row["step"]: row["samples"] for row in map(json.loads, path.read_text().splitlines())}
        return dict(sorted(rows.items()))


def _cmdline(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


@pytest.fixture
def run(tmp_path):
    from rlmake.models import init

    source = {"type": "pydoc-phrases", "min_chars": 4, "max_chars": 8, "num_train": 64, "num_heldout": 8}
    (tmp_path / "data").mkdir()
    data.make(parse(DataConfig, {"source": source}), tmp_path / "data")
    rows = tmp_path / "data/train.jsonl"
    architecture = {
        "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
        "intermediate_size": 128, "max_position_embeddings": 256,
    }  # fmt: skip
    table = {"dtype": "float32", "architecture": architecture, "tokenizer": {"vocab_size": 272, "text": str(rows)}}
    (tmp_path / "model").mkdir()
    init.make(parse(InitConfig, table), tmp_path / "model")
    config = tmp_path / "toy.toml"
    config.write_text(CONFIG.format(model=tmp_path / "model", data=rows, steps=STEPS))
    made = Run(tmp_path, config)
    yield made
    if made.driver is not None and made.driver.poll() is None:
        made.driver.kill()
    for one in made.processes():
        one.signal(signal.SIGKILL)


@pytest.mark.timeout(1500)
def test_each_process_dies_once_and_the_run_ends(run):
    run.start()
    for number, victim in enumerate(VICTIMS):
        run.reach((run.steps() or [0])[-1] + 1)
        if victim == "launcher":
            os.kill(run.driver.pid, signal.SIGKILL)
        else:
            chosen = run.processes(victim)
            assert chosen, f"no process {victim}"
            chosen[-1].signal(signal.SIGKILL)
        assert run.wait() != 0
        assert procs.wait_gone(run.processes(), 20) == [], f"left behind after {victim} was killed"
        assert victim == "launcher" or "SIGKILL" in run.log(), run.log()[-3000:]
        run.start("--resume")
        if number == 0:  # a worker costs its episodes, not the run
            run.reach(run.steps()[-1] + 1)
            workers = run.processes("PRL::EnvWorker")
            assert len(workers) == 3
            for worker in workers:
                worker.signal(signal.SIGKILL)
            run.reach(run.steps()[-1] + 1)
    assert run.wait(400) == 0, run.log()[-4000:]
    assert run.processes() == [] and run.steps()[-1] == STEPS

    ledger = run.ledger()
    assert list(ledger) == list(range(1, STEPS + 1))
    flat = [sample for samples in ledger.values() for sample in samples]
    assert len(flat) == len(set(flat)) >= 16 * STEPS, "a sample was trained twice"
    assert {sample.partition("/")[0] for sample in flat} == {"short", "same"}

    rows = [json.loads(line) for line in (run.run_dir / "monitors/file/metrics.jsonl").read_text().splitlines()]
    logged = {(row["producer"], key) for row in rows for key in row}
    missing = [
        (metric.producer, name)
        for metric in names.METRICS
        if metric.when in WHEN
        for name in names.expand(metric, ["short", "same"], ["held"], ks=[1, 2] if "pass" in metric.pattern else [2])
        if (metric.producer, name) not in logged
    ]
    assert missing == []
    heads = ("step", "time", "producer", "attempt")
    told = {(producer, key) for producer, key in logged if producer in ("orch", "trainer") and key not in heads}
    assert [one for one in sorted(told) if names.find(one[1], one[0]) is None] == []
    evaluated = {row["step"] for row in rows if "eval/held/reward/mean" in row}
    assert {0, 3, 6, STEPS} <= evaluated, "the base model, each third step, the last version"
