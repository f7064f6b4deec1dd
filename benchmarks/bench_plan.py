"""What a plan costs: generated projects of growing size, planned from cold by rlmake and by Snakemake.

    python benchmarks/bench_plan.py [--sizes 100,1000,2500] [--floor] [--keep FOLDER]

A project of N experiments is one data set, one model, one SFT, and N - 3 RL runs on it, a file each, of which every
third extends a fragment; each asks for weights and a report: 4 jobs a run and one link more. Figures are CPU seconds
(user + system) and peak memory of the command's processes. `--floor` adds what Snakemake alone takes for as many jobs
of trivial rules with literal inputs.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
BASE = """
[deployment]
num_train_gpus = 0
num_infer_gpus = 0
"""
ROW = '{"prompt": "abc", "completion": "cba", "target": "cba"}\n'
DATA = """
[source]
type = "file"
paths.train = "rows.jsonl"
[experiment]
kind = "data"
"""
MODEL = """
tokenizer.text = "outputs/data/data/train.jsonl"
[experiment]
kind = "init"
"""
SFT = """
max_steps = 4
model.name = "outputs/model/weights"
data.name = "outputs/data/data"
renderer.name = "qwen3"
[experiment]
kind = "sft"
extends = ["base/cpu.toml"]
"""
RL = """
# run {n}
model.name = "outputs/sft/weights"
max_steps = 20
[trainer.optim]
lr = {lr}
[ckpt]
interval = 10
[orchestrator]
batch_size = 64
renderer.name = "qwen3"
[orchestrator.train]
group_size = 8
[[orchestrator.train.source]]
env.taskset.id = "reverse-text"
env.taskset.path = "outputs/data/data/train.jsonl"
[inference.vllm]
max_model_len = 96
[experiment]
kind = "rl"
extends = ["../base/cpu.toml"{more}]
"""
MORE = "[orchestrator]\nmax_off_policy_steps = 4\n"
FLOOR = """
N = {n}
rule all:
    input: expand("out/{{n}}/c.txt", n=range(N))
rule a:
    output: "out/{{n}}/a.txt"
    shell: "touch {{output}}"
rule b:
    input: "out/{{n}}/a.txt"
    output: "out/{{n}}/b.txt"
    shell: "touch {{output}}"
rule d:
    input: "out/{{n}}/b.txt"
    output: "out/{{n}}/d.txt"
    shell: "touch {{output}}"
rule c:
    input: "out/{{n}}/d.txt"
    output: "out/{{n}}/c.txt"
    shell: "touch {{output}}"
"""


def make(root: Path, size: int) -> None:
    """A project of `size` experiments below `root`."""
    for name in ("rules", "profiles"):
        shutil.copytree(ROOT / name, root / name)
    shutil.copy(ROOT / "Snakefile", root)
    (root / "rows.jsonl").write_text(ROW)
    files = {"base/cpu.toml": BASE, "base/more.toml": MORE, "data.toml": DATA, "model.toml": MODEL, "sft.toml": SFT}
    for n in range(size - 3):
        more = ', "../base/more.toml"' if n % 3 == 0 else ""
        files[f"rl/r{n:05d}.toml"] = RL.format(n=n, lr=f"{1e-6 * (n + 1):.6e}", more=more)
    for name, text in files.items():
        path = root / "experiments" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@dataclass
class Figures:
    """What a command took: seconds of CPU (of all its processes) and by the clock, peak MiB of its largest process."""

    cpu: float
    wall: float
    memory: float
    output: str

    def __str__(self) -> str:
        return f"{self.cpu:6.2f} s {self.memory:6.0f} MiB  "


def measure(command: list[str], cwd: Path) -> Figures:
    """Run a command; one that fails ends the benchmark."""
    script = (
        "import resource, subprocess, sys, time\n"
        "clock = time.monotonic()\n"
        "done = subprocess.run(sys.argv[1:], capture_output=True, text=True)\n"
        "use = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "wall = time.monotonic() - clock\n"
        "print(use.ru_utime + use.ru_stime, wall, use.ru_maxrss / 1024, done.returncode)\n"
        "print(done.stdout + done.stderr)"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(
        [sys.executable, "-c", script, *command], cwd=cwd, env=env, capture_output=True, text=True, check=True
    )
    head, _, output = answer.stdout.partition("\n")
    *numbers, code = head.split()
    if code != "0":
        raise SystemExit(f"{' '.join(command)} failed:\n{output}")
    return Figures(*map(float, numbers), output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="100,1000,2500", help="numbers of experiments")
    parser.add_argument("--floor", action="store_true", help="also Snakemake alone, with as many trivial jobs")
    parser.add_argument("--keep", help="make the projects in this folder and leave them there")
    args = parser.parse_args()
    python = sys.executable
    print("experiments   jobs   rlmake plan            snakemake -n all       again (cached)         Snakemake alone")
    for size in map(int, args.sizes.split(",")):
        folder = Path(args.keep or tempfile.mkdtemp()) / f"plan-{size}"
        try:
            folder.mkdir(parents=True)
            make(folder, size)
            shown = measure([python, "-m", "rlmake.cli.main", "plan"], folder)
            flow = measure([python, "-m", "snakemake", "-n", "all", "--quiet", "all"], folder)
            again = measure([python, "-m", "rlmake.cli.main", "plan"], folder)
            jobs = re.findall(r"^(\d+) jobs", shown.output, re.MULTILINE)[-1]
            floor = ""
            if args.floor:
                (folder / "floor").mkdir()
                (folder / "floor" / "Snakefile").write_text(FLOOR.format(n=int(jobs) // 4))
                alone = measure([python, "-m", "snakemake", "-n", "all", "--quiet", "all"], folder / "floor")
                floor = str(alone)
            print(f"{size:>11} {jobs:>6}   {shown}   {flow}   {again}   {floor}", flush=True)
        finally:
            if not args.keep:
                shutil.rmtree(folder.parent, ignore_errors=True)


if __name__ == "__main__":
    main()
