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
        (folder / "report.json").write_text(json.dumps({"envs": {"words": {"reward": reward}}}))
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
