"""The page that joins several runs: what counts as learned, and that everything is on it."""

from pathlib import Path

import pytest

from rlmake.core.errors import UserError
from rlmake.report.overview import Learned, Score, find, render

ROOT = Path(__file__).parents[2]


def learned(before, after, interval, curve=("Reward in training", [(1, 0.2), (2, 0.5)])):
    first = Score("a/sft", before, [before - 0.1, before + 0.1] if interval else None)
    return Learned("a/rl", "echo", "env<1>", 10, first, Score("a/rl", after, interval), curve)


@pytest.mark.parametrize(
    ("before", "after", "interval", "shown"),
    [
        (0.5, 0.7, [0.6, 0.8], True),
        (0.5, 0.6, [0.45, 0.75], False),  # better, and not shown to be
        (0.5, 0.4, [0.3, 0.5], False),
        (-0.46, -0.2, None, True),  # exact
        (-0.2, -0.46, None, False),
    ],
)
def test_learned_means_that_the_interval_ends_above_the_start(before, after, interval, shown):
    assert learned(before, after, interval).shown == shown


def test_the_page_has_every_run_and_stands_alone():
    runs = [learned(0.5, 0.7, [0.6, 0.8]), learned(-0.4, -0.5, None, ("Evaluation of kuhn", [(0, -0.4), (5, -0.5)]))]
    text = render("algorithms", runs)
    assert "1 of 2 evaluations show learning" in text and "0.700 (0.600 to 0.800)" in text
    assert "env&lt;1&gt;" in text and "Evaluation of kuhn" in text and "Reward in training" in text
    assert "http" not in text.replace("http://www.w3.org", "")


def test_a_wrong_name_is_one_line(monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match="nowhere: no run or folder below experiments/ has this name"):
        find(["nowhere"])
