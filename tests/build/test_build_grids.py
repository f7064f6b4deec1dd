"""Grids through Snakemake with toy workers: twelve ablations on one parent, killed twice; then one value edited."""

import csv
import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from rlmake.build import lease
from rlmake.build.explain import Change, _of_grid
from rlmake.build.names import WORKING
from rlmake.build.registry import Registry
from rlmake.cli import verbs
from rlmake.core.errors import UserError

pytestmark = pytest.mark.timeout(1200)
GRID = """
max_steps = 4
model.name = "outputs/t/sft/weights"
ckpt.interval = 2
orchestrator.batch_size = 16
orchestrator.renderer.name = "qwen3"
[[orchestrator.train.source]]
env.taskset.id = "reverse-text"
env.taskset.path = "outputs/t/data/data/train.jsonl"
[inference]
[experiment]
kind = "rl"
extends = ["../base/cpu.toml"]
[experiment.grid]
"trainer.optim.lr" = [1e-5, 3e-5, 1e-4]
"orchestrator.train.group_size" = [4, 8]
seed = [0, 1]
baseline = {"trainer.optim.lr" = 1e-5, "orchestrator.train.group_size" = 4}
"""
REPORT = "outputs/abl/lr/report.html"


def steps(project, prefix: str) -> dict[tuple[str, str], int]:
    """`{(run, step): times trained}` of runs whose name begins so."""
    found: dict[tuple[str, str], int] = {}
    for line in project.log():
        word, _, rest = line.partition(" ")
        if word == "step" and rest.startswith(prefix):
            run, _, step = rest.rpartition(" ")
            found[run, step] = found.get((run, step), 0) + 1
    return found


def together() -> set[str]:
    """The files of the grid that are published, all of one report."""
    links = [path for path in Path(REPORT).parent.iterdir() if path.is_symlink()]
    assert len({os.path.dirname(os.readlink(path)) for path in links}) == 1
    return {path.name for path in links}


def killed(project, when: int) -> None:
    """Build the grid's report and kill everything with SIGKILL once `when` cells have made a step."""
    driver = project.start("-c", "2", REPORT, "--quiet", "all", TOY_SECONDS="0.2", alone=True)
    try:
        while driver.poll() is None and len({run for run, _ in steps(project, "abl/lr/")}) < when:
            time.sleep(0.05)
        assert driver.poll() is None, driver.stdout.read()
    finally:
        os.killpg(driver.pid, signal.SIGKILL)
        driver.communicate(timeout=60)


def test_twelve_ablations_on_one_parent_killed_twice(project):
    project.write("abl/lr.toml", GRID)
    killed(project, 3)
    killed(project, 7)
    project.build(REPORT)
    assert together() == {"report.html", "results.csv", "results.json"}
    assert set(steps(project, "t/sft").values()) == {1}, "the parent is trained once"
    trained = steps(project, "abl/lr/")
    assert len({run for run, _ in trained}) == 12 and len(trained) == 12 * 4
    again = [key for key, times in trained.items() if times > 1]
    assert len(again) <= 2 * 2 * 2, "per kill, of the two that ran at most the steps since the last checkpoint"
    assert project.plan(REPORT) == {}

    found = json.loads(Path("outputs/abl/lr/results.json").read_text())
    assert [cell["state"] for cell in found["cells"]] == ["done"] * 12
    assert len(found["variants"]) == 6 and found["baseline"] == "lr 1e-5, group_size 4"
    assert found["variants"][1]["metrics"]["train reward"] == {"mean": 0.4, "ci95": [0.4, 0.4], "n": 2}
    assert found["variants"][1]["differences"]["train reward"] == {
        "mean": 0.0,
        "ci95": [0.0, 0.0],
        "n": 2,
        "over": "seeds",
    }
    for run in ("t/sft", "abl/lr/lr=1e-4,group_size=8,seed=1"):
        assert all(Path("outputs", run, leaf).is_symlink() for leaf in WORKING), "nobody asked for the run itself"
    rows = list(csv.DictReader(Path("outputs/abl/lr/results.csv").read_text().splitlines()))
    assert rows[0]["cell"] == "lr=1e-5,group_size=4,seed=0" and rows[0]["trainer.optim.lr"] == "1e-5"
    page = Path(REPORT).read_text()
    assert "lr=1e-4,group_size=8,seed=1" in page and "http" not in page.replace("http://www.w3.org/2000/svg", "")

    project.edit("abl/lr.toml", 'lr" = [1e-5, 3e-5, 1e-4]', 'lr" = [1e-5, 3e-5, 2e-4]')
    assert project.plan(REPORT) == {"train": 4, "grid": 1, "publish_report": 1}
    done = [line for line in project.build(REPORT) if line.startswith("train")]
    assert len(done) == 4 and all("lr=2e-4" in line for line in done), "only the edited value's cells run"

    shutil.rmtree("outputs/t")
    project.edit("t/sft.toml", "optim.lr = 1e-3", "optim.lr = 2e-3")
    rows = {row["run"]: row for row in project.document(REPORT)["jobs"] if row["rule"] in ("train", "grid")}
    (change,) = rows["t/sft"]["changes"]
    assert (change["key"], change["before"], change["after"]) == ("optim.lr", 1e-3, 2e-3), "without a link"
    (change,) = rows["abl/lr/lr=2e-4,group_size=8,seed=1"]["changes"]
    assert change["key"] == "trainer.model.name" and change["before"] != change["after"]
    assert len(rows) == 1 + 12 + 1
    (told,) = rows["abl/lr"]["changes"]
    assert told["key"] == "cells made anew" and len(told["after"].split(", ")) == 12


def test_what_changed_about_a_grid_is_told_by_its_cells():
    before = {"cells": [["seed=0", {"seed": 0}, True], ["seed=1", {"seed": 1}, False]], "lost": {}}
    now = {"cells": [["seed=0", {"seed": 0}, False], ["seed=2", {"seed": 2}, True]], "lost": {"seed=2": "diverged"}}
    found = _of_grid(before, now, "experiments/g.toml")
    assert str(found[0]) == "cells added: seed=2 (experiments/g.toml)"
    assert str(found[1]) == "cells removed: seed=1 (experiments/g.toml)"
    many = Change("cells added", None, ", ".join(f"seed={n}" for n in range(9)))
    assert str(many) == "cells added: seed=0, seed=1, seed=2 and 6 more"
    assert [(change.key, change.before, change.after) for change in found] == [
        ("cells added", None, "seed=2"), ("cells removed", "seed=1", None),
        ("baseline", "seed=0", "seed=2"), ("cells failed", None, "seed=2"),
    ]  # fmt: skip
    (other,) = _of_grid(now | {"grid": "f"}, now | {"grid": "g"}, "experiments/g.toml")
    assert str(other) == "grid f → g (experiments/g.toml)"
    (back,) = _of_grid(now, now | {"lost": {}}, "experiments/g.toml")
    assert str(back) == "cells no longer failed: seed=2"
    half = now | {"lost": {}, "missing": {"seed=0": "unfinished: step 2 of 4"}}
    (more,) = _of_grid(now | {"lost": {}}, half, "experiments/g.toml")
    (back,) = _of_grid(half, now | {"lost": {}}, "experiments/g.toml")
    assert (str(more), str(back)) == ("cells missing: seed=0", "cells missing at the last report: seed=0")


def test_failed_and_missing_cells_are_shown(project):
    project.write("abl/lr.toml", GRID.replace("[4, 8]", "[4]").replace("[1e-5, 3e-5, 1e-4]", "[1e-5, 3e-5]"))
    cell = "abl/lr/lr=3e-5,group_size=4,seed=1"
    project.build(f"outputs/{cell.replace('seed=1', 'seed=0')}/weights")
    code, _ = project.snakemake("-c", "2", f"outputs/{cell}/weights", TOY_DIVERGE=f"{cell} 3")
    assert code == 1
    assert project.plan(REPORT) == {"train": 2, "grid": 1, "publish_report": 1}, "the failed one is not tried again"
    assert project.document(REPORT)["failed"] == [{"run": cell, "why": "diverged at step 3: loss nan"}]
    results = "outputs/abl/lr/results.json"
    with pytest.raises(UserError, match=r"2 jobs are to be done first.*--allow-missing"):
        verbs.load("report")(["abl/lr"])
    assert project.plan(REPORT, allow_missing=1) == {"grid": 1, "publish_report": 1}
    begun = "abl/lr/lr=1e-5,group_size=4,seed=0"
    assert project.snakemake("-c", "2", f"outputs/{begun}/weights", TOY_KILL=f"{begun} 3", TOY_SECONDS="2.1")[0] == 1
    (row,) = [row for row in project.document(REPORT)["jobs"] if row["run"] == begun]
    assert row["reason"] == "unfinished: step 2 of 4" and "its own" in row["rate"], "by the beats of the killed attempt"
    assert verbs.load("report")(["abl/lr", "--allow-missing"]) == 0
    half = together()
    found = {cell["name"]: cell for cell in json.loads(Path(results).read_text())["cells"]}
    states = [cell["state"] for cell in found.values()]
    assert states == ["missing", "missing", "done", "failed"]
    assert [cell["why"] for cell in found.values()][:2] == ["unfinished: step 2 of 4", "not built"]
    assert "unfinished: step 2 of 4" in Path(REPORT).read_text()
    beats = lease.read(Registry.load().work(begun).artefact("checkpoint", 4).folder)["beat"]
    assert beats and [cell["hours"] for cell in found.values()][:2] == [beats * lease.BEAT_EVERY / 3600, None]
    with lease.acquire(Registry.load().work(begun).artefact("checkpoint", 4).folder):
        grid = Registry.load(allow_missing=True).reports.of_grid("abl/lr")
        assert grid.facts["missing"][begun.rpartition("/")[2]] == "in training: step 2 of 4"
    (told,) = [row["changes"] for row in project.document(REPORT)["jobs"] if row["rule"] == "grid"]
    assert [change["key"] for change in told] == ["cells missing at the last report"]
    assert "diverged at step 3: loss nan" in found["lr=3e-5,group_size=4,seed=1"]["why"]
    assert "diverged at step 3" in Path(REPORT).read_text()
    done = [line for line in project.build(REPORT) if line.startswith("train")]
    assert len(done) == 2, "the report is made anew when its missing cells are there"
    assert together() == half == {"report.html", "results.csv", "results.json"}
    assert [cell["state"] for cell in json.loads(Path(results).read_text())["cells"]] == ["done"] * 3 + ["failed"]
    Path(results).unlink()
    assert project.plan(REPORT) == {"publish_report": 1}
    project.build(REPORT)
    assert together() == half and project.plan(REPORT, results) == {}
    Path(results).unlink()
    Path(results).write_text("mine")
    assert "results.json is a real file" in project.refused(REPORT)[0]


def test_a_cell_that_diverges_costs_the_grid_neither_other_cells_nor_its_report(project):
    project.write("abl/lr.toml", GRID.replace("[4, 8]", "[4]").replace("[1e-5, 3e-5, 1e-4]", "[1e-5, 3e-5]"))
    cell = "abl/lr/lr=1e-5,group_size=4,seed=0"
    code, output = project.snakemake("-c", "1", REPORT, TOY_DIVERGE=f"{cell} 3")
    assert code == 1 and f"without the cells that failed: {REPORT}" in output
    found = json.loads(Path("outputs/abl/lr/results.json").read_text())
    assert [one["state"] for one in found["cells"]] == ["failed", "done", "done", "done"]
    assert project.plan(REPORT) == {} and project.document(REPORT)["failed"][0]["run"] == cell


def test_parity_of_trainer_and_engine(project):
    """A target of its own, not part of `all`: it rests on the weights and on the data that prompts are taken from."""
    target = "outputs/t/sft/parity/report.json"
    made = {"data": 1, "model": 1, "train": 1, "export": 1, "parity": 1, "publish_parity": 1}
    assert project.plan(target) == made
    assert project.build(target)[-1] == "parity t/sft"
    report = json.loads(Path(target).read_text())
    assert (report["run"], report["weights"], report["model_step"]) == ("t/sft", "sft 4", 4)
    assert project.plan(target) == {}
    assert project.plan("outputs/t/rl/parity/report.json")["parity"] == 1
    assert "parity" not in project.plan("all")
    project.edit("t/sft.toml", "lr = 1e-3", "lr = 3e-3")
    (job,) = [row for row in project.document(target)["jobs"] if row["rule"] == "parity"]
    assert job["target"] == target and [change["key"] for change in job["changes"]] == ["model"]
    project.edit("t/sft.toml", "lr = 3e-3", "lr = 1e-3")
    Path(target).resolve().unlink()
    assert project.plan(target) == {"parity": 1, "publish_parity": 1}, "lost"
    for target, why in (
        ("outputs/t/model/parity/report.json", "has none"),
        ("outputs/t/rl/parity", "no target; a run yields"),
        ("outputs/t/rl/parity@step_2/report.json", "no target"),
    ):
        (line,) = project.refused(target)
        assert why in line
    project.edit("t/rl.toml", '"outputs/t/sft/weights"', '"outputs/t/sft/parity/report.json"')
    (line,) = project.refused("outputs/t/rl/weights")
    assert "expected a target of weights, not outputs/t/sft/parity/report.json" in line


def test_best_checkpoint_and_other_formats(project):
    """The best of the checkpoints by an evaluation; FP8 as a target; an adapter only of a LoRA run."""
    project.edit("t/sft.toml", 'evals = ["held"]', 'evals = ["held"]\nbest = {suite = "held"}')
    target = "outputs/t/sft/exports/best/weights"
    assert project.plan(target)["evaluate"] == 2, "at steps 2 and 4"
    project.build(target)
    assert (Path(target) / "model.safetensors").read_text() == "sft 2"
    card = json.loads((Path(target) / "card.json").read_text())
    assert [(row["stage"], row["step"]) for row in card["lineage"][2:]] == [("train", 2), ("best", None)]
    assert [entry["suite"] for entry in card["evaluations"]] == ["held"]
    said = "chosen by its evaluation, step 2, the best of 2 checkpoints: reward 0.5 on held. Format: safetensors"
    assert said in (Path(target) / "README.md").read_text()
    assert project.plan(target) == {}
    project.edit("t/sft.toml", '"held"}', '"held", goal = "min"}')
    (told,) = project.document(target)["jobs"][0]["changes"]
    assert (told["key"], told["file"]) == ("experiment.best.goal", "experiments/t/sft.toml")
    project.edit("t/sft.toml", ', goal = "min"}', "}")
    assert project.plan("outputs/t/sft/weights-FP8") == {"export_fp8": 1, "publish_fp8": 1}
    assert project.plan("outputs/t/sft/exports/step_2/weights-FP8") == {"export_fp8": 1, "publish_fp8_of_step": 1}
    (line,) = project.refused("outputs/t/sft/adapter")
    assert "trains all weights; only a run with model.lora has an adapter" in line
    (line,) = project.refused("outputs/t/rl/exports/best/weights")
    assert "give it a table [experiment.best]" in line
    for best, why in (
        (
            'metric = "rewrd"',
            "best.metric: suite held has no number 'rewrd' of reverse-text; did you mean 'reward'?; there are",
        ),
        ('metric = "pass@4"', "best.metric: suite held has no number 'pass@4' of reverse-text"),
        ('env = "reverse-txt"', "best.env: suite held has no environment 'reverse-txt'; did you mean 'reverse-text'?"),
    ):
        project.edit("t/sft.toml", '"held"}', f'"held", {best}}}')
        (line,) = project.refused(target)
        assert f"experiments/t/sft.toml: experiment.{why}" in line
        project.edit("t/sft.toml", f'"held", {best}}}', '"held"}')
    project.edit("t/sft.toml", 'suite = "held"', 'suite = "hold"')
    (line,) = project.refused(target)
    assert "there is no suite experiments/evals/hold.toml; did you mean 'held'?" in line
