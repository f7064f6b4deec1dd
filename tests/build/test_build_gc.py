"""`rlmake gc` where experiment files can't be seen, and what links keep.

The store holds made-up directories: gc looks at names, specifications and links only.
"""

import os
import shutil
from pathlib import Path

import pytest

from rlmake.build import experiments, garbage
from rlmake.build.registry import Registry
from rlmake.cli import verbs
from rlmake.core.errors import UserError
from rlmake.core.jsonio import write_json

OLD, PARENT = Path("outputs/.store/train-0123456789abcdef"), Path("outputs/.store/model-00112233445566aa")


@pytest.fixture
def built(project):
    """A finished training that no experiment declares, with the model it rests on, published by hand."""
    for folder, stage, parents in (
        (PARENT, "model", []),
        (OLD, "train", [{"stage": "model", "kind": "weights", "step": None, "fingerprint": PARENT.name[6:]}]),
    ):
        (folder / "weights").mkdir(parents=True)
        empty = {name: {} for name in ("config", "semantic", "revisions", "defaults", "resources")}
        named = {"stage": stage, "kind": "x", "fingerprint": folder.name.partition("-")[2], "runs": ["gone/run"]}
        record = {"schema": 1, **named, **empty, "parents": parents, "planned_at": ""}
        write_json(folder / "spec.json", record)
        os.utime(folder / "spec.json", (0, 0))  # not "planned less than a week ago"
    return project


def link(path: str, to: Path) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    os.symlink(to, path)


def gc(capsys, *argv: str) -> list[str]:
    capsys.readouterr()
    assert verbs.load("gc")(list(argv)) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("state", ["missing", "empty", "fragments", "a file"])
def test_nothing_is_deleted_while_no_run_is_seen(built, state):
    shutil.move("experiments", "elsewhere")
    if state == "a file":
        Path("experiments").touch()
    elif state != "missing":
        Path("experiments").mkdir()
    if state == "fragments":
        Path("experiments/cpu.toml").write_text("max_steps = 1\n")
    for argv in ([], ["--dry-run"]):
        with pytest.raises(UserError, match=r"^experiments") as refused:
            verbs.load("gc")(argv)
        assert "\n" not in str(refused.value)
    assert OLD.is_dir() and PARENT.is_dir()
    if state in ("missing", "a file"):
        (line,) = built.refused("all")
        assert line.startswith("error: experiments: ")
        with pytest.raises(UserError, match=r"^experiments: "):
            verbs.load("plan")([])


def test_a_folder_that_cannot_be_read_is_a_fault(built, monkeypatch):
    """As root nothing is unreadable, so the system's refusal is put in its place."""
    real = os.scandir

    def scandir(path):
        if Path(path) == Path(locked):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    locked = "experiments/t"
    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(UserError, match=r"^experiments/t: cannot be read: Permission denied$"):
        verbs.load("gc")([])
    locked = "outputs/kept"
    link("outputs/kept/weights", Path("..", *OLD.parts[1:], "weights"))
    with pytest.raises(UserError, match=r"^outputs/kept: cannot be read: Permission denied$"):
        verbs.load("gc")([])
    assert OLD.is_dir() and PARENT.is_dir()


@pytest.mark.parametrize("kind", ["relative", "absolute", "chain"])
def test_a_link_keeps_what_it_shows_and_what_that_rests_on(built, capsys, kind):
    to = OLD / "weights"
    link("outputs/gone/run/weights", to.absolute() if kind == "absolute" else Path("../..", *to.parts[1:]))
    if kind == "chain":
        link("outputs/mine", Path("gone/run/weights"))
        shutil.move("outputs/gone/run/weights", "elsewhere")
        os.unlink("outputs/mine")
        os.symlink(OLD.absolute(), "elsewhere2")
        link("outputs/mine", Path("../elsewhere2/weights"))
    shown = "outputs/mine" if kind == "chain" else "outputs/gone/run/weights"
    lines = gc(capsys, "--dry-run")
    assert any(OLD.name in line and f"published: {shown}, until that link is deleted" in line for line in lines)
    assert any(PARENT.name in line and "gone/run rests on it" in line for line in lines)
    gc(capsys)
    assert Path(shown, ".").is_dir() and PARENT.is_dir()
    os.unlink(shown)
    gc(capsys)
    assert not OLD.exists() and not PARENT.exists()


def test_nothing_is_removed_while_it_is_not_known_what_rests_on_what(built):
    link("outputs/gone/run/weights", Path("../..", *OLD.parts[1:], "weights"))
    write_json(OLD / "spec.json", {"schema": 1, "runs": ["gone/run"]})
    with pytest.raises(UserError, match=r"spec\.json: damaged: .*nothing is removed"):
        verbs.load("gc")([])
    assert PARENT.is_dir()


def test_a_link_to_nothing_keeps_nothing_and_goes_too(built, capsys):
    link("outputs/gone/run/weights", Path("../..", *OLD.parts[1:], "exports/step_9/weights"))
    assert gc(capsys)[-1].endswith("and 1 link")
    assert not OLD.exists() and not Path("outputs/gone").exists()


def test_logs_alone_keep_nothing(built, capsys):
    """As a training that failed leaves them; a user's own link to them keeps all."""
    for leaf in ("logs", "monitors"):
        (OLD / leaf).mkdir()
        link(f"outputs/gone/run/{leaf}", Path("../..", *OLD.parts[1:], leaf))
    link("outputs/mine", Path(*OLD.parts[1:], "logs"))
    assert any("published: outputs/mine, " in line for line in gc(capsys, "--dry-run"))
    os.unlink("outputs/mine")
    assert gc(capsys)[-1].endswith("and 2 links")
    assert not OLD.exists() and not Path("outputs/gone").exists()


def test_links_among_experiment_files(project):
    """A linked folder is followed, one that holds itself is named; a file that links to itself is named too."""
    shutil.move("experiments/t", "elsewhere")
    os.symlink("../elsewhere", "experiments/t")
    os.symlink("experiments/base", "base")  # what its files extend from is relative to where the folder is
    assert "t/sft" in Registry.load().runs
    for at, to in (("elsewhere/up", ".."), ("experiments/loop", "."), ("elsewhere/back", "../experiments")):
        os.symlink(to, at)
        shown = at.replace("elsewhere", "experiments/t")
        assert [str(fault) for fault in experiments.load().faults] == [f"{shown}: a link to a folder that it lies in"]
        os.unlink(at)
    os.symlink("link.toml", "experiments/link.toml")
    (line,) = project.refused("all")
    assert line == "error: experiments/link.toml: leads nowhere, or in a circle"


def test_best_is_checked_when_files_are_read(project):
    project.edit("t/sft.toml", "evals =", 'best.suite = "hold"\nevals =')
    (line,) = project.refused("outputs/t/data/data")
    assert line == (
        "error: experiments/t/sft.toml:12: experiment.best.suite: there is no suite experiments/evals/hold.toml; "
        "did you mean 'held'?"
    )
    project.edit("t/sft.toml", '"hold"', '"held"')
    project.edit("t/sft.toml", "ckpt.interval = 2", "")
    (line,) = project.refused("outputs/t/data/data")
    assert "experiment.best: needs ckpt.interval" in line


def test_pins_and_surveys_of_an_empty_store(project):
    assert garbage.survey(Registry.load()) == []


def test_a_pin_is_the_reason_that_is_said_although_a_link_shows_it_too(built, capsys):
    link("outputs/gone/weights", (OLD / "weights").absolute())
    garbage.pin(("train", OLD.name.removeprefix("train-")), "outputs/gone/weights", "the paper's")
    (line,) = [line for line in gc(capsys, "--dry-run") if OLD.name in line]
    assert line.startswith("keep") and line.endswith("pinned: outputs/gone/weights, the paper's")


def test_pins_of_two_steps_of_a_training_are_two(project):
    unit = ("train", "0" * 16)
    first, second = (f"outputs/t/sft/checkpoints/step_{step}" for step in (10, 20))
    garbage.pin(unit, first, "")
    garbage.pin(unit, second, "the paper's")
    with pytest.raises(UserError, match="step_30: is not pinned; did you mean"):
        verbs.load("unpin")(["outputs/t/sft/checkpoints/step_30"])
    verbs.load("unpin")([first])
    assert [one["target"] for one in garbage.pins()] == [second]
    garbage.pin(unit, first, "")
    assert len(garbage.unpin("outputs/.store/train-" + "0" * 16, unit)) == 2 and not garbage.pins()
