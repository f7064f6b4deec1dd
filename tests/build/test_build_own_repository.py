"""A repository of the user's own, outside the project, and the steps of the workflow that plans it in CI."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import yaml
from build_toys import ROOT

WORKFLOW = ROOT / "docs" / "examples" / "plan.yml"


def own(project) -> Path:
    """The toy project as docs/build.md makes such a repository: a Snakefile of one line, rlmake below tools/."""
    root = project.root
    shutil.rmtree(root / "rules")
    (root / "tools").mkdir()
    os.symlink(ROOT, root / "tools" / "rlmake")
    (root / "Snakefile").write_text('include: "tools/rlmake/Snakefile"\n')
    return root


def steps(project) -> tuple[int, str]:
    """`(exit code, plan.md)` of the workflow's steps that say something about the experiments."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    named = {step.get("name"): step for step in yaml.safe_load(WORKFLOW.read_text())["jobs"]["plan"]["steps"]}
    for name in ("The plan", "Snakemake would run it"):
        command = ["bash", "-e", "-c", named[name]["run"]]
        done = subprocess.run(
            command, cwd=project.root, env=project.env | {"PATH": path}, capture_output=True, text=True
        )
        if done.returncode:
            break
    return done.returncode, (project.root / "plan.md").read_text()


def test_it_builds_with_a_snakefile_of_one_line(project):
    own(project)
    assert "train t/sft" in " ".join(project.build("outputs/t/sft/weights"))
    assert Path("outputs/t/sft/weights").resolve().is_dir() and not (ROOT / "outputs/t").exists()
    assert project.plan("outputs/t/sft/weights") == {}


def test_the_commands_of_the_docs(tmp_path):
    """From an empty folder on; only how rlmake comes there is left out."""
    section = (ROOT / "docs" / "build.md").read_text().partition("## A repository of your own")[2].split("```")[1]
    commands = [line for line in section.strip().splitlines() if not line.startswith(("git ", "pip "))]
    (tmp_path / "tools").mkdir()
    os.symlink(ROOT, tmp_path / "tools" / "rlmake")
    command = ["bash", "-e", "-c", "\n".join([*commands, "snakemake -n --quiet all"])]
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "outputs/mine/sft/report.html" in done.stdout, "without a target: all"
    assert (tmp_path / "experiments/mine/sft.toml").is_file()


def test_the_steps_of_the_workflow(project):
    root = own(project)
    code, said = steps(project)
    assert code == 0 and said.startswith("### Plan\n```\n") and said.endswith("\n```\n") and "GPU-hours" in said
    assert "train" in (root / "jobs.txt").read_text()
    project.edit("t/sft.toml", "optim.lr", "optm.lr")
    code, said = steps(project)
    assert code == 2 and "optm: unknown key; did you mean 'optim'?" in said and said.count("```") == 2
    install = yaml.safe_load(WORKFLOW.read_text())["jobs"]["plan"]["steps"][2]["run"].split()
    assert (root / install[install.index("-c") + 1]).is_file() and (root / install[-1] / "pyproject.toml").is_file()
