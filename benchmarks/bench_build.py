"""What the build itself costs beside the work: a build of nothing, and what a job takes beyond its work.

    python benchmarks/bench_build.py [--built 100,1000] [--jobs 40]

A build of nothing: `snakemake all` in a project of N experiments (the same as bench_plan's) in which all is there: each
artefact is one small file that was put into the store with its manifest, no job has run.

A job beyond its work: N data sets of two rows, cut one after the other by `snakemake --cores 1 all`, are N jobs of real
work and N links. The seconds of the work are those of the manifests; what the same command takes again, when all is
there, is the plan's. The rest, by the number of jobs, is the overhead of one. Beside it what Snakemake alone takes for
as many jobs of `touch`, and for as many that start Python.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from bench_plan import DATA, ROW, make, measure

SNAKEMAKE = [sys.executable, "-m", "snakemake", "--quiet", "all", "--cores", "1"]
ALONE = """
rule all:
    input: expand("out/{{n}}.txt", n=range({n}))
rule one:
    output: "out/{{n}}.txt"
    shell: "{command} && touch {{output}}"
"""


def put(root: Path) -> int:
    """Put something small in the place of all that the project of the working directory plans; the number of jobs."""
    from rlmake.build import plan, publish, store
    from rlmake.build.registry import Registry
    from rlmake.core.jsonio import list_files

    os.chdir(root)
    registry = Registry.load()
    needs = plan.needs(registry, plan.targets_of_all(registry), everything=True)
    jobs = plan.jobs(registry, needs)
    for job in jobs:
        if job.target is not None:
            publish.publish(Path(job.output), registry.place(job.target))
            continue
        made = job.artefact
        spec = registry.works[made.stage, made.fingerprint].spec(sorted(needs.steps.get(made.fingerprint, ())), {})
        name = "train.jsonl" if made.stage == "data" else "file"  # what the other files name is looked for in it
        file = made.path if made.path.suffix else made.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(ROW)
        made.done_path.parent.mkdir(parents=True, exist_ok=True)
        store.write_spec({**spec, "planned_at": "", "code": {}})
        store.finish(made, store.manifest_of(made, spec, list_files(made.root), seconds=0.0, gpu_hours=0.0))
    return len(jobs)


def built(root: Path, size: int) -> None:
    make(root, size)
    jobs = put(root)
    again, shown = measure([*SNAKEMAKE, "all"], root), measure([sys.executable, "-m", "rlmake.cli.main", "plan"], root)
    assert "nothing to be done" in shown.output, shown.output
    print(f"{size:>11} {jobs:>6}   {again.wall:6.2f} s {again.cpu:6.2f} s   {shown.wall:6.2f} s {shown.cpu:6.2f} s")


def overhead(root: Path, size: int) -> None:
    make(root, 3)
    shutil.rmtree(root / "experiments")
    for n in range(size):
        path = root / "experiments" / f"d{n:05d}.toml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(DATA.replace("rows.jsonl", f"rows{n}.jsonl"))
        (root / f"rows{n}.jsonl").write_text(ROW.replace("abc", str(n)) * 2)
    first, again = measure([*SNAKEMAKE, "all"], root), measure([*SNAKEMAKE, "all"], root)
    manifests = [json.loads(path.read_text()) for path in root.glob("outputs/.store/data-*/manifest.json")]
    assert len(manifests) == size
    work = sum(manifest["seconds"] for manifest in manifests)
    wall, cpu = first.wall - again.wall, first.cpu - again.cpu
    print(
        f"{2 * size} jobs: {wall:.1f} s ({cpu:.1f} s of CPU) beyond a build of nothing, {work:.1f} s of it their work"
    )
    print(f"a job beyond its work: {(wall - work) / (2 * size):.3f} s (CPU with the work {cpu / (2 * size):.3f} s)")
    for name, command in (("touch", "true"), ("starting Python", f"{sys.executable} -c pass")):
        folder = root / "alone" / name
        folder.mkdir(parents=True)
        (folder / "Snakefile").write_text(ALONE.format(n=2 * size, command=command))
        first, again = measure([*SNAKEMAKE, "all"], folder), measure([*SNAKEMAKE, "all"], folder)
        wall, cpu = (first.wall - again.wall) / (2 * size), (first.cpu - again.cpu) / (2 * size)
        print(f"Snakemake alone, {name}: {wall:.3f} s a job ({cpu:.3f} s of CPU)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--built", default="100,1000", help="sizes of the projects in which all is there")
    parser.add_argument("--jobs", type=int, default=40, help="number of data sets to cut")
    args = parser.parse_args()
    print("experiments   jobs   snakemake all         rlmake plan     (by the clock, CPU)")
    for size in map(int, args.built.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            built(Path(folder) / "project", size)
    with tempfile.TemporaryDirectory() as folder:
        overhead(Path(folder) / "project", args.jobs)


if __name__ == "__main__":
    main()
