"""A project whose runs are real ones at toy size. Steps are made slow by a renderer that sleeps, which costs no CPU,
until the test has seen what it wants to see."""

import json
import os
import subprocess
import sys
from pathlib import Path

from slurm_tools import ROOT, SOON, jobs, pids, until

PROFILE = ("--profile", "profiles/slurm", *SOON, "--quiet", "rules", "host", "--")
SLOW = """
import os, time
from rlmake.models.chatml import ChatMLRenderer
class Slow(ChatMLRenderer):
    def render(self, *args, **kwargs):
        time.sleep(0 if os.path.exists("fast") else 0.06)
        return super().render(*args, **kwargs)
class Slower(Slow):
    def render(self, *args, **kwargs):
        time.sleep(0 if os.path.exists("fast") else 0.06)
        return super().render(*args, **kwargs)
"""
DATA = """
[experiment]
kind = "data"
[source]
type = "pydoc-phrases"
min_chars = 4
max_chars = 8
num_train = 1500
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
text = "outputs/data/data/train.jsonl"
"""
SFT = """
model.name = "outputs/model/weights"
max_steps = {steps}
[data]
name = "outputs/data/data/train.jsonl"
batch_size = 2
seq_len = 256
num_workers = 0
[renderer]
name = "custom"
import_path = "{renderer}"
[ckpt]
interval = 1000
[slurm]
partition = "{partition}"
time = "20"
memory = "600M"
save_before_end = 118
{table}
[deployment]
{place}
[experiment]
kind = "sft"
"""
RL = """
model.name = "outputs/model/weights"
max_steps = {steps}
seq_len = 256
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
env.taskset.path = "outputs/data/data/train.jsonl"
[trainer.optim]
lr = 1e-3
[ckpt]
interval = 1
[slurm]
partition = "wide"
time = "20"
memory = "600M"
[deployment]
{place}
[experiment]
kind = "rl"
"""
EVAL = """
[inference.vllm]
max_model_len = 64
[eval]
interval = 2
cancel_on_new_checkpoint = false
sampling.max_completion_tokens = 8
[[eval.source]]
name = "held"
env.taskset.id = "reverse-text"
env.taskset.path = "outputs/data/data/heldout.jsonl"
select.limit = 4
"""
ONE = "num_train_gpus = 0\nnum_infer_gpus = 0"
NODES = 'type = "multi_node"\ngpus_per_node = 0\n'
FAST = "rlmake.models.chatml.ChatMLRenderer"


def environment(pid: int) -> dict[str, str]:
    """The environment of a process."""
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


class Project:
    """A project of its own, and Snakemake with the SLURM profile in it."""

    def __init__(self, folder: Path):
        self.folder = folder
        for name in ("Snakefile", "rules", "profiles"):
            (folder / name).symlink_to(ROOT / name)
        self.write("slow.py", SLOW)
        self.write("experiments/data.toml", DATA)
        self.write("experiments/model.toml", MODEL)
        self.env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}

    def write(self, path: str, text: str) -> None:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def sft(self, steps: int, place: str = ONE, renderer: str = "slow.py:Slow", table: str = "") -> None:
        partition = "solo" if place == ONE else "wide"
        values = {"steps": steps, "place": place, "renderer": renderer, "table": table, "partition": partition}
        self.write("experiments/sft.toml", SFT.format(**values))

    def fast(self) -> None:
        """From now on steps take no longer than they must."""
        self.write("fast", "")

    def start(self, *targets: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "snakemake", *PROFILE, *targets]
        return subprocess.Popen(
            command, cwd=self.folder, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def entry(self, *arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "rlmake.cli.main", *arguments]
        return subprocess.run(command, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=120)

    def finish(self, driver: subprocess.Popen, seconds: float = 600) -> str:
        output, _ = driver.communicate(timeout=seconds)
        assert driver.returncode == 0, output[-6000:]
        return output

    def logs(self, run: str) -> Path:
        return self.folder / "outputs" / run / "logs"

    def steps(self, run: str) -> list[int]:
        """The trainer's steps in the order in which they were trained, over all attempts."""
        file = (self.folder / "outputs" / run / "logs").resolve().parent / "monitors" / "file" / "metrics.jsonl"
        if not file.is_file():
            return []
        rows = [json.loads(line) for line in file.read_text().rpartition("\n")[0].splitlines()]
        return [row["step"] for row in rows if row.get("producer") == "trainer" and "loss/mean" in row]

    def training(self) -> dict[str, str]:
        return [job for job in jobs(self.folder) if job["comment"].startswith("rule_train_")][-1]

    def submissions(self) -> int:
        return sum(job["comment"].startswith("rule_train_") for job in jobs(self.folder))

    def wait_for_step(self, run: str, step: int, seconds: float = 300) -> None:
        until(lambda: max(self.steps(run), default=0) >= step, f"step {step} of {run}", seconds)

    def nodes_of(self, word: str) -> list[str]:
        """The nodes on which such processes run."""
        return sorted({environment(pid)["SLURMD_NODENAME"] for pid in self.processes(word)})

    def processes(self, word: str) -> list[int]:
        """Pids of this project's processes whose command line has the word, the sruns that started them left out."""
        commands = {pid: Path(f"/proc/{pid}/cmdline") for pid in pids(self.folder, word)}
        return [pid for pid, file in commands.items() if not file.read_bytes().startswith(b"srun\0")]
