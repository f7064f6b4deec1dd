"""A project of its own in a temporary folder: the shipped workflow, and reverse-text at toy size."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT = 600


class Project:
    """The folder of a project, and Snakemake in it."""

    def __init__(self, folder: Path):
        self.folder = folder
        for name in ("Snakefile", "rules", "profiles"):
            (folder / name).symlink_to(ROOT / name)

    def write(self, path: str, text: str) -> None:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def start(self, *args: str) -> subprocess.Popen:
        """`snakemake -c 2 args`, output to `snakemake.log`."""
        with open(self.folder / "snakemake.log", "ab") as log:
            command = [sys.executable, "-m", "snakemake", "-c", "2", *args]
            return subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, start_new_session=True)

    def build(self, *args: str) -> None:
        driver = self.start(*args)
        assert driver.wait(TIMEOUT) == 0, self.log()[-6000:]

    def plan(self, *args: str) -> str:
        command = [sys.executable, "-m", "snakemake", "-n", *args]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=TIMEOUT)
        assert done.returncode == 0, done.stderr[-6000:]
        return done.stdout + done.stderr

    def log(self) -> str:
        return (self.folder / "snakemake.log").read_text(errors="replace")

    def training(self, link: str) -> Path:
        """The run directory behind a published link to `logs`."""
        return (self.folder / link).resolve().parent

    def processes(self) -> list[int]:
        """Processes of anybody whose working directory is this project."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and Path(os.readlink(entry / "cwd")) == self.folder:
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def wait_gone(self, seconds: float) -> list[int]:
        deadline = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left


@pytest.fixture
def project(tmp_path):
    project = Project(tmp_path.resolve())
    yield project
    for pid in project.processes():
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


DATA = """
[experiment]
kind = "data"
[source]
type = "pydoc-phrases"
min_chars = 4
max_chars = 8
num_train = 256
num_heldout = 16
copy_share = 0.4
"""

MODEL = """
dtype = "float32"
[experiment]
kind = "init"
[architecture]
hidden_size = 64
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 32
intermediate_size = 128
max_position_embeddings = 256
[tokenizer]
vocab_size = 272
text = "outputs/toy/data/data/train.jsonl"
"""

SFT = """
model.name = "outputs/toy/model/weights"
max_steps = {steps}
[experiment]
kind = "sft"
evals = ["toy"]
[deployment]
num_train_gpus = 0
num_infer_gpus = 0
[data]
name = "outputs/toy/data/data/train.jsonl"
batch_size = 2
seq_len = 256
num_workers = 0
[renderer]
name = "custom"
import_path = "rlmake.models.chatml.ChatMLRenderer"
[optim]
lr = 3e-3
[scheduler]
type = "linear"
warmup_steps = 4
decay_steps = 0
[ckpt]
interval = 4
"""

RL = """
model.name = "outputs/toy/sft/weights"
max_steps = {steps}
seq_len = 256
[experiment]
kind = "rl"
evals = ["toy"]
[deployment]
num_train_gpus = 0
num_infer_gpus = 0
num_train_ranks = {ranks}
[inference.vllm]
max_model_len = 64
[orchestrator]
batch_size = 8
[orchestrator.renderer]
name = "custom"
import_path = "rlmake.models.chatml.ChatMLRenderer"
[orchestrator.train]
group_size = 4
sampling.max_completion_tokens = 8
[[orchestrator.train.source]]
env.taskset.id = "reverse-text"
env.taskset.path = "outputs/toy/data/data/train.jsonl"
[trainer.optim]
lr = 1e-3
[ckpt]
interval = 2
"""

SUITE = """
[deployment]
num_infer_gpus = 0
[inference.vllm]
max_model_len = 64
[renderer]
name = "custom"
import_path = "rlmake.models.chatml.ChatMLRenderer"
[sampling]
temperature = 1.0
max_completion_tokens = 8
[[source]]
env.taskset.id = "reverse-text"
env.taskset.path = "outputs/toy/data/data/heldout.jsonl"
"""


@pytest.fixture
def toy(project):
    """Data, model, SFT (8 steps) and RL (6 steps, checkpoints every 2), and a suite of 16 tasks."""
    project.write("experiments/toy/data.toml", DATA)
    project.write("experiments/toy/model.toml", MODEL)
    project.write("experiments/toy/sft.toml", SFT.format(steps=8))
    project.write("experiments/toy/rl.toml", RL.format(steps=6, ranks=1))
    project.write("experiments/evals/toy.toml", SUITE)
    return project


@pytest.fixture(scope="session")
def parts(tmp_path_factory):
    """A model and its data."""
    from rlmake.config import DataConfig, InitConfig
    from rlmake.envs import data
    from rlmake.models import init

    root = tmp_path_factory.mktemp("parts")
    source = {"type": "pydoc-phrases", "min_chars": 4, "max_chars": 8, "num_train": 256, "num_heldout": 16}
    (root / "data").mkdir()
    data.make(DataConfig(source=source), root / "data")
    found = next((root / "data").rglob("train.jsonl"))
    architecture = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    architecture |= {"head_dim": 32, "intermediate_size": 128, "max_position_embeddings": 256}
    tokenizer = {"vocab_size": 272, "text": str(found)}
    init.make(InitConfig(architecture=architecture, tokenizer=tokenizer, dtype="float32"), root / "model")
    return {"model": root / "model", "data": found}
