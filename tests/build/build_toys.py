"""A toy project: the real Snakefile, jobs, store and records; only the workers that train and evaluate are toys.

The toys are put in the place of the real workers in the jobs' processes by a `sitecustomize` on their PYTHONPATH. A toy
training writes real checkpoints (through rlmake.checkpoint) and appends one line per step to `toy.log` of the project.
"""

import contextlib
import io
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SITE = '''
import os, sys, types

class _Toys:
    """Finds the toy workers before the real ones."""
    def find_spec(self, name, path=None, target=None):
        launch = ("rlmake.launch.train", "rlmake.launch.evaluate", "rlmake.launch.parity")
        if name not in (*launch, "rlmake.export.bf16", "rlmake.models.init"):
            return None
        import importlib.util
        return importlib.util.spec_from_file_location(name, os.path.join(os.path.dirname(__file__), "toys.py"))

if os.environ.get("TOYS"):
    sys.meta_path.insert(0, _Toys())
'''

TOYS = """
import json, os, signal, time
from pathlib import Path
from rlmake import checkpoint
from rlmake.core.errors import RunFailed
from rlmake.core.jsonio import write_json
from rlmake.core.rundir import RunContext, step_dir

def say(*words):
    with open("toy.log", "a") as file:
        print(*words, file=file)

def make(cfg, out):                                     # rlmake.models.init
    (Path(out) / "model.safetensors").write_bytes(b"init" * 8)
    say("model")
    return {"parameters": 8}

def run(*args, **kwargs):
    if "identity" not in kwargs:
        return train(*args, **kwargs)
    return parity(*args, **kwargs) if "fingerprint" in kwargs else evaluate(*args, **kwargs)

def train(kind, cfg, run_dir, *, argv, files, resume, fingerprint, run_name):
    run_dir = Path(run_dir)
    last = cfg.trainer.max_steps if kind == "rl" else cfg.max_steps
    ckpt = (cfg.trainer if kind == "rl" else cfg).ckpt
    done = checkpoint.newest(run_dir) or 0
    checkpoint.prune_future(run_dir, done)
    place = "aside" if "aside" in run_dir.parts else ""
    say("train", run_name, "from", done, "to", last, place)
    ctx = RunContext(run_dir, fingerprint, run_name, 1, fingerprint, run_dir, run_dir)
    model = cfg.trainer.model.name if kind == "rl" else cfg.model.name
    assert Path(model, "model.safetensors").is_file(), model
    for step in range(done + 1, last + 1):
        time.sleep(float(os.environ.get("TOY_SECONDS", 0)))
        say("step", run_name, step)
        while os.environ.get("TOY_GATE") == f"{run_name} {step}" and not os.path.exists("go"):
            time.sleep(0.1)
        row = {"step": step, "time": 0.0, "producer": "trainer", "attempt": 1, "loss/mean": 1 / step}
        row["reward/all/mean"] = step / 10
        (run_dir / "monitors" / "file").mkdir(parents=True, exist_ok=True)
        with open(run_dir / "monitors" / "file" / "metrics.jsonl", "a") as file:
            print(json.dumps(row), file=file)
        if step == last or (ckpt.interval and step % ckpt.interval == 0):
            with checkpoint.writing(step_dir(run_dir, step), "trainer") as half:
                (half / "weights").write_text(f"{kind} {step}")
            checkpoint.publish(run_dir, step, ("trainer",), policy_version=step, world_size=1, ledger="0", ctx=ctx)
            checkpoint.retain(run_dir, ckpt.keep_last, ckpt.keep_interval)
        if os.environ.get("TOY_KILL") == f"{run_name} {step}":
            os.kill(os.getpid(), signal.SIGKILL)
        if os.environ.get("TOY_FAIL") == f"{run_name} {step}":
            raise RunFailed("the toy failed")
        if os.environ.get("TOY_DIVERGE") == f"{run_name} {step}":
            from rlmake.launch.supervise import RunDiverged
            write_json(run_dir / "diverged.json", {"schema": 1, "step": step, "reason": "loss nan", "attempt": 1})
            raise RunDiverged("the toy diverged")

def export(folder, out):                                # rlmake.export.bf16
    out.mkdir(parents=True, exist_ok=True)
    (out / "model.safetensors").write_text((folder / "trainer" / "weights").read_text())
    (out / "config.json").write_text("{}")
    say("export", folder.name)
    return {"tensors": 1}

def evaluate(cfg, model, out, *, identity, argv=(), files=(), again=False):
    value = 1 / identity["model_step"] if identity["model_step"] else 0.0  # the earliest checkpoint is the best
    toy = {"num_tasks": 1, "reward": {"mean": value, "ci95": None}}
    write_json(out / "report.json", {"schema": 1, **identity, "envs": {"toy": toy}})
    (out / "report.html").write_text("<html>")
    say("eval", identity["suite"], identity["run"])

def parity(cfg, model, out, *, identity, argv, files, fingerprint):
    source = cfg.orchestrator.train.source[0].env["taskset"]["path"] if hasattr(cfg, "orchestrator") else cfg.data.name
    assert Path(source).exists() and Path(source).is_absolute(), source
    weights = (Path(model) / "model.safetensors").read_text()
    write_json(out / "report.json", {"schema": 1, **identity, "weights": weights})
    say("parity", identity["run"])
"""

BASE = """
[deployment]
num_train_gpus = 0
num_infer_gpus = 0
"""
FILES = {
    "base/cpu.toml": BASE,
    "t/data.toml": """
[source]
type = "file"
paths.train = "rows.jsonl"
[experiment]
kind = "data"
""",
    "t/model.toml": """
tokenizer.text = "outputs/t/data/data/train.jsonl"
[experiment]
kind = "init"
""",
    "t/sft.toml": """
# supervised
max_steps = 4
model.name = "outputs/t/model/weights"
data.name = "outputs/t/data/data"
renderer.name = "qwen3"
optim.lr = 1e-3
ckpt.interval = 2
[experiment]
kind = "sft"
extends = ["../base/cpu.toml"]
evals = ["held"]
""",
    "t/rl.toml": """
max_steps = 5
model.name = "outputs/t/sft/weights"
trainer.optim.lr = 1e-5
ckpt.interval = 2
orchestrator.batch_size = 16
orchestrator.renderer.name = "qwen3"
[orchestrator.train]
group_size = 4
[[orchestrator.train.source]]
env.taskset.id = "reverse-text"
env.taskset.path = "outputs/t/data/data/train.jsonl"
[inference]
[experiment]
kind = "rl"
extends = ["../base/cpu.toml"]
evals = ["held"]
""",
    "evals/held.toml": """
renderer.name = "qwen3"
[inference]
[deployment]
num_infer_gpus = 0
[[source]]
env.taskset.id = "reverse-text"
env.taskset.path = "outputs/t/data/data/train.jsonl"
""",
}


class Project:
    """A project directory, with what a test does to it."""

    def __init__(self, root: Path):
        self.root = root
        for name in ("rules", "profiles"):
            shutil.copytree(ROOT / name, root / name)
        shutil.copy(ROOT / "Snakefile", root)
        for name, text in FILES.items():
            self.write(name, text)
        (root / "rows.jsonl").write_text('{"prompt": "abc", "completion": "cba", "target": "cba"}\n' * 4)
        site = root / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(SITE)
        (site / "toys.py").write_text(TOYS)
        path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
        self.env = {**os.environ, "TOYS": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def write(self, name: str, text: str) -> Path:
        path = self.root / "experiments" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def edit(self, name: str, old: str, new: str) -> None:
        path = self.root / "experiments" / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def start(self, *arguments: str, alone: bool = False, **env: str) -> subprocess.Popen:
        """Snakemake, running; `alone`: with a process group of its own, to be killed as a whole."""
        command = [sys.executable, "-m", "snakemake", *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, cwd=self.root, env=self.env | env, start_new_session=alone, **pipes)

    def snakemake(self, *arguments: str, **env: str) -> tuple[int, str]:
        """`(exit code, output)` of `snakemake …` in the project."""
        process = self.start(*arguments, **env)
        output, _ = process.communicate(timeout=900)
        return process.returncode, output

    def rlmake(self, *arguments: str) -> subprocess.CompletedProcess:
        """One of rlmake's commands in the project, the real one."""
        command = [sys.executable, "-m", "rlmake.cli.main", *arguments]
        env = self.env | {"TOYS": ""}
        return subprocess.run(command, cwd=self.root, env=env, capture_output=True, text=True, timeout=120)

    def build(self, *targets: str, **env: str) -> list[str]:
        """Build, and return what the toys did: the new lines of toy.log, single steps left out."""
        before = len(self.log())
        code, output = self.snakemake("-c", "2", *targets, "--quiet", "all", **env)
        assert code == 0, output
        return [line for line in self.log()[before:] if not line.startswith("step ")]

    def go(self) -> None:
        """Let trainings that stand at a step (`TOY_GATE`) go on, now and later."""
        (self.root / "go").touch()

    def log(self) -> list[str]:
        path = self.root / "toy.log"
        return path.read_text().splitlines() if path.is_file() else []

    def refused(self, *targets: str) -> list[str]:
        """The lines with which a plan is refused (exit code 2), asked for in this process."""
        from build_snakemake import dry_run

        errors = io.StringIO()
        with contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as leaving:
            dry_run(targets)
        assert leaving.value.code == 2
        return [line for line in errors.getvalue().splitlines() if line.startswith("error: ")]

    def plan(self, *targets: str, **config: int) -> dict[str, int]:
        """`{rule: jobs}` of Snakemake's dry run, asked for in this process; rlmake's own plan must be the same list."""
        from build_snakemake import dry_run

        jobs, _ = dry_run(targets, **config)
        mine = [(row["rule"], row["output"]) for row in self.document(*targets, **config)["jobs"]]
        assert sorted((job.rule, job.output) for job in jobs) == sorted(mine)
        return dict(Counter(job.rule for job in jobs))

    def document(self, *targets: str, retry_failed: int = 0, allow_missing: int = 0) -> dict:
        """What `rlmake plan --json` prints."""
        from rlmake.build import explain, plan
        from rlmake.build.registry import Registry

        registry = Registry.load(retry=bool(retry_failed), allow_missing=bool(allow_missing))
        whole = "all" in targets
        asked = plan.targets_of_all(registry) if whole else targets
        return explain.document(registry, plan.needs(registry, asked, everything=whole))
