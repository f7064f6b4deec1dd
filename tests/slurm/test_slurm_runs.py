"""Whole runs on a real SLURM: time limit, preemption, loss of nodes and processes, several nodes.

Real trainers at toy size. Steps are made slow by a renderer that sleeps, which costs no CPU.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from slurm_tools import ROOT, SOON, clean_up, jobs, live, runs_again, slurm, until

pytestmark = pytest.mark.timeout(900)
PROFILE = ("--profile", "profiles/slurm", *SOON, "--quiet", "rules", "host", "--")
SLOW = """
import time
from rlmake.models.chatml import ChatMLRenderer
class Slow(ChatMLRenderer):
    def render(self, *args, **kwargs):
        time.sleep(0.06)
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
partition = "work"
time = "20"
memory = "600M"
save_before_end = 100
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
partition = "work"
time = "20"
memory = "600M"
[deployment]
{place}
[experiment]
kind = "rl"
"""
ONE = "num_train_gpus = 0\nnum_infer_gpus = 0"
NODES = 'type = "multi_node"\ngpus_per_node = 0\n'
FAST = "rlmake.models.chatml.ChatMLRenderer"


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
        self.write("experiments/sft.toml", SFT.format(steps=steps, place=place, renderer=renderer, table=table))

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
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        return [row["step"] for row in rows if row.get("producer") == "trainer" and "loss/mean" in row]

    def training(self) -> dict[str, str]:
        return [job for job in jobs(self.folder) if job["comment"].startswith("rule_train_")][-1]

    def submissions(self) -> int:
        return sum(job["comment"].startswith("rule_train_") for job in jobs(self.folder))

    def wait_for_step(self, run: str, step: int, seconds: float = 300) -> None:
        until(lambda: max(self.steps(run), default=0) >= step, f"step {step} of {run}", seconds)

    def processes(self, word: str) -> list[int]:
        """Pids of this project's processes whose command line has the word, the sruns that started them left out."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                ours = entry.name.isdigit() and Path(os.readlink(entry / "cwd")) == self.folder
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode() if ours else ""
                if word in command and not command.startswith("srun"):
                    found.append(int(entry.name))
            except OSError:
                continue
        return found


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Data and model, made once by jobs on the cluster; every project starts with a copy of this store."""
    project = Project(tmp_path_factory.mktemp("shared").resolve())
    project.finish(project.start("outputs/model/weights", "outputs/data/data"))
    yield project
    clean_up(project.folder)


@pytest.fixture
def project(shared, tmp_path):
    subprocess.run(["cp", "-a", shared.folder / "outputs", tmp_path], check=True)
    project = Project(tmp_path.resolve())
    yield project
    clean_up(project.folder)


def cut(job: str) -> None:
    """Let the job's time limit come soon: it is lowered to one or two minutes from now, SLURM does the rest."""
    used = slurm("squeue", "-h", "-j", job, "-o", "%M").strip().split(":")
    slurm("scontrol", "update", f"JobId={job}", f"TimeLimit={int(used[-2]) + 2}")


def test_a_time_limit_that_cuts_twice(project):
    """USR1, checkpoint, requeue from inside, twice: one submission, every step once and in order, no retry used."""
    project.sft(400)
    driver = project.start("outputs/sft/checkpoints/step_80")
    for life in (1, 2):
        before = max(project.steps("sft"), default=0)
        project.wait_for_step("sft", before + 3)
        job = project.training()["id"]
        cut(job)
        until(lambda: project.training()["state"] == "PENDING", f"requeued after life {life}", 120)
        slurm("scontrol", "update", f"JobId={job}", "TimeLimit=20")
        runs_again(job)
    output = project.finish(driver)
    assert project.steps("sft") == list(range(1, 81)), "nothing twice, nothing left out"
    assert project.submissions() == 1, output
    assert len(list(project.logs("sft").glob("attempt_*"))) == 3


def test_preemption(project):
    """A job of a higher partition takes the node: SIGTERM, checkpoint within KillWait, requeued by SLURM, finished."""
    project.sft(24, table='nodelist = "node1"\nexclusive = true')
    driver = project.start("outputs/sft/checkpoints/step_24")
    project.wait_for_step("sft", 3)
    high = slurm("sbatch", "--parsable", "-p", "high", "-w", "node1", "--exclusive", "-o", "/dev/null",
                 "--wrap", "sleep 5").strip()  # fmt: skip
    until(lambda: project.training()["state"] == "PENDING", "preempted", 60)
    until(lambda: high not in slurm("squeue", "-h", "-o", "%i").split(), "the other job is over", 60)
    runs_again(project.training()["id"])
    project.finish(driver)
    assert project.steps("sft") == list(range(1, 25)), "the checkpoint was saved at SIGTERM: nothing is trained twice"
    assert project.submissions() == 1


def test_a_node_goes_down(project):
    """The job of a lost node is requeued by SLURM and goes on elsewhere from its last checkpoint."""
    project.sft(16)
    text = (project.folder / "experiments/sft.toml").read_text().replace("interval = 1000", "interval = 4")
    project.write("experiments/sft.toml", text)
    driver = project.start("outputs/sft/checkpoints/step_16")
    project.wait_for_step("sft", 6)
    node = slurm("squeue", "-h", "-j", project.training()["id"], "-o", "%N").strip()
    try:
        slurm("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
        until(lambda: project.training()["state"] == "PENDING", "requeued", 60)
        runs_again(project.training()["id"])
        project.finish(driver)
    finally:
        resume = ["scontrol", "update", f"NodeName={node}", "State=RESUME"]
        subprocess.run(resume, capture_output=True, check=False)  # refused where the node is back already
    twice = [step for step, count in Counter(project.steps("sft")).items() if count > 1]
    assert sorted(set(project.steps("sft"))) == list(range(1, 17)) and len(twice) <= 4
    assert project.submissions() == 1


def test_two_nodes_and_a_killed_rank(project):
    """SFT over two nodes; a rank on the second dies: named with node and rank, allocation free, retried, finished."""
    project.sft(14, place=NODES + "num_train_nodes = 2")
    text = (project.folder / "experiments/sft.toml").read_text().replace("interval = 1000", "interval = 5")
    project.write("experiments/sft.toml", text)
    driver = project.start("outputs/sft/checkpoints/step_14")
    project.wait_for_step("sft", 6)
    rank = next(pid for pid in project.processes("rlmake.trainer.sft @") if _environment(pid).get("RANK") == "1")
    first = project.training()["id"]
    os.kill(rank, signal.SIGKILL)
    killed = time.monotonic()
    until(lambda: not any(job["id"] == first for job in live(project.folder)), "the allocation is free", 60)
    assert time.monotonic() - killed < 60
    output = project.finish(driver)
    assert "trainer 1 (node" in output and "killed by SIGKILL" in output and "rank 1" in output, output[-5000:]
    assert sorted(set(project.steps("sft"))) == list(range(1, 15))
    logs = project.logs("sft") / "latest"
    assert os.readlink(logs / "trainer.log") == "trainer/node_0.log" and (logs / "trainer" / "node_1.log").is_file()
    ranks = list(logs.glob("trainer/torchrun/job_*/attempt_0/0/stderr.log"))
    assert len(ranks) == 2, "one log for each rank of each node"


def _environment(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def test_rl_over_three_nodes_loses_orchestrator_and_engine(project):
    """Two engines behind the router, one trainer node; each process's death: one message, free at once, finished."""
    project.write("experiments/rl.toml", RL.format(steps=6, place=NODES + "num_train_nodes = 1\nnum_infer_nodes = 2"))
    driver = project.start("outputs/rl/checkpoints/step_6")
    for step, victim in ((2, "PRL::Orchestrator"), (4, "rlmake.inference.server")):
        project.wait_for_step("rl", step)
        job = project.training()["id"]
        os.kill(project.processes(victim)[0], signal.SIGKILL)
        killed = time.monotonic()
        until(lambda job=job: not any(one["id"] == job for one in live(project.folder)), "the allocation is free", 60)
        assert time.monotonic() - killed < 60
    output = project.finish(driver)
    assert "orchestrator (node" in output and re.search(r"inference [01] \(node", output), output[-5000:]
    assert output.count("was killed by SIGKILL") == 2
    assert sorted(set(project.steps("rl"))) == list(range(1, 7)) and project.submissions() == 3
    logs = project.logs("rl") / "latest"
    for name in ("inference/node_0.log", "inference/node_1.log", "inference/router.log", "orchestrator.log"):
        assert (logs / name).is_file(), name
    assert os.readlink(logs / "inference.log") == "inference/node_0.log"
    assert (logs / "inference" / "router.log").read_text().count("http://") >= 3


def test_submission_by_the_entry_point(project):
    """Dry run, submission, tail while queued and running, the guard; a requeued life goes on by itself."""
    project.sft(40)
    text = (project.folder / "experiments/sft.toml").read_text().partition("[experiment]")[0]
    project.write("run.toml", text)
    dry = project.entry("sft", "@", "run.toml", "--run.name", "d", "--dry-run")
    assert dry.returncode == 0 and "submit it by hand with: sbatch " in dry.stdout, dry.stderr
    script = (project.folder / "outputs/d/launcher/sft.sbatch").read_text()
    assert "#SBATCH --signal=B:USR1@100" in script and "#SBATCH --mem=600M" in script and not jobs_of(project)
    done = project.entry("sft", "@", "run.toml", "--run.name", "d")
    assert done.returncode == 0 and "submitted as SLURM job" in done.stdout, done.stderr
    refused = project.entry("sft", "@", "run.toml", "--run.name", "d")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and "wait for it" in refused.stderr
    job = jobs_of(project)[-1]["id"]
    shown = project.folder / "shown"
    with open(shown, "w") as stream:
        command = [sys.executable, "-m", "rlmake.cli.main", "tail", "d"]
        tail = subprocess.Popen(command, cwd=project.folder, env=project.env, stdout=stream, stderr=stream)
    metrics = project.folder / "outputs/d/monitors/file/metrics.jsonl"
    until(lambda: metrics.is_file() and metrics.read_text().count("loss/mean") >= 3, "three steps", 300)
    cut(job)
    until(lambda: jobs_of(project)[-1]["state"] == "PENDING", "requeued", 120)
    slurm("scontrol", "update", f"JobId={job}", "TimeLimit=20")
    until(lambda: "is pending" in shown.read_text(), "tail says so", 60)
    runs_again(job)
    assert tail.wait(200) == 0, shown.read_text()
    for words in (f"SLURM job {job} is running", "attempt 3 begins", "COMPLETED"):
        assert words in shown.read_text(), f"{words}: {shown.read_text()}"
    rows = [json.loads(line) for line in metrics.read_text().splitlines() if "loss/mean" in line]
    assert [row["step"] for row in rows] == list(range(1, 41))


def jobs_of(project) -> list[dict[str, str]]:
    """Jobs that were submitted directly."""
    return [job for job in jobs(project.folder) if not job["comment"].startswith("rule_")]
