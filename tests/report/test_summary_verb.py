"""`rlmake summary`: all or nothing, and what to do."""

import json

import pytest

from rlmake.core.errors import UserError
from rlmake.report.summary import summary

ARGS = ["a/rl", "--before", "a/sft", "--suite", "words"]


@pytest.fixture
def built(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for run, mean in (("a/sft", 0.25), ("a/rl", 0.5)):
        folder = tmp_path / "outputs" / run / "evals/words"
        folder.mkdir(parents=True)
        reward = {"mean": mean, "ci95": [mean - 0.1, mean + 0.1]}
        (folder / "report.json").write_text(json.dumps({"schema": 1, "envs": {"words": {"reward": reward}}}))
    (tmp_path / "outputs/a/rl/weights").mkdir()
    return tmp_path / "outputs"


def test_three_lines(built, capsys):
    assert summary(ARGS) == 0
    assert capsys.readouterr().out.splitlines() == [
        "reward before   0.250 (95 % 0.150 to 0.350)   a/sft, held-out, suite words",
        "reward after    0.500 (95 % 0.400 to 0.600)   a/rl, held-out, suite words",
        "weights         outputs/a/rl/weights",
    ]
    (built / "a/rl/report.html").touch()
    summary(ARGS)
    assert capsys.readouterr().out.startswith("report          outputs/a/rl/report.html\n")


def test_nothing_is_printed_of_what_is_not_there(built, capsys):
    (built / "a/rl/weights").rmdir()
    with pytest.raises(UserError, match=r"^outputs/a/rl/weights: is not there; build it, or link what is in the store"):
        summary(ARGS)
    (built / "a/sft/evals/words/report.json").unlink()
    with pytest.raises(UserError, match=r"snakemake -c all outputs/a/sft/evals/words$"):
        summary(ARGS)
    (built / "a/rl/lr=1").mkdir()  # of what was a grid once
    with pytest.raises(UserError, match=r"outputs/a/sft/evals/words: is not there"):
        summary(ARGS)
    (built / "a/rl/evals").rename(built / "elsewhere")
    with pytest.raises(UserError, match=r"^a/rl: is a grid; name one of its cells, as a/rl/lr=1$"):
        summary(ARGS)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("report", "said"),
    [
        ([], "schema None is unknown, expected 1"),
        ({"envs": {}}, "schema None is unknown, expected 1"),
        ({"schema": 1}, "damaged: .*envs"),
        ({"schema": 1, "envs": []}, r"damaged: .*\$\.envs"),
        ({"schema": 1, "envs": {"words": {}}}, "damaged: .*reward"),
        ({"schema": 1, "envs": {"words": {"reward": {"mean": "x", "ci95": None}}}}, r"damaged: .*reward\.mean"),
        ({"schema": 1, "envs": {"words": {"reward": {"mean": 0.5, "ci95": [0.4]}}}}, r"damaged: .*reward\.ci95"),
    ],
)
def test_a_damaged_report_is_named(built, capsys, report, said):
    (built / "a/rl/evals/words/report.json").write_text(json.dumps(report))
    with pytest.raises(UserError, match=rf"^outputs/a/rl/evals/words/report\.json: {said}"):
        summary(ARGS)
    assert capsys.readouterr().out == ""


def test_a_reward_without_a_mean_or_an_interval(built, capsys):
    envs = {"one": {"reward": {"mean": 0.5, "ci95": None}}, "two": {"reward": {"mean": None, "ci95": None}}}
    (built / "a/rl/evals/words/report.json").write_text(json.dumps({"schema": 1, "envs": envs}))
    summary(ARGS)
    assert "reward after    0.500 (95 % 0.500 to 0.500), two –   a/rl" in capsys.readouterr().out


def test_a_wrong_name_of_a_run_is_told_from_one_that_is_not_built(built, capsys):
    for run in ("a/more", "a/grid"):
        path = built.parent / f"experiments/{run}.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for run in ("a/more", "a/grid/lr=1"):
        with pytest.raises(UserError, match=rf"snakemake -c all outputs/{run}/evals/words$"):
            summary([run, *ARGS[1:]])
    with pytest.raises(UserError, match=r"^a/mroe: no run; did you mean 'a/more'\?$"):
        summary(["a/mroe", *ARGS[1:]])
    with pytest.raises(UserError, match=r"^b: no run$"):
        summary([ARGS[0], "--before", "b", "--suite", "words"])
