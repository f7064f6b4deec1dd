"""The page of a run: what it says equals what lies in the files, it stands alone, nothing of a run becomes markup."""

import json
import math
import re
import statistics
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from report_synthetic import NASTY, make_facts

from rlmake.core.errors import UserError
from rlmake.report import charts, collect, numbers
from rlmake.report.html import Html, tag
from rlmake.report.run import make


class Reader(HTMLParser):
    """Collects text, attributes and the balance of tags."""

    VOID = {"meta", "br"}

    def __init__(self):
        super().__init__()
        self.open, self.words, self.attributes, self.tags = [], [], [], []

    def handle_starttag(self, name, attributes):
        self.tags.append(name)
        self.attributes += [(name, *pair) for pair in attributes]
        if name not in self.VOID:
            self.open.append(name)

    def handle_startendtag(self, name, attributes):
        self.tags.append(name)
        self.attributes += [(name, *pair) for pair in attributes]

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, data):
        self.words.append(data)


def read(path) -> Reader:
    reader = Reader()
    reader.feed(path.read_text())
    reader.close()
    assert reader.open == []
    return reader


@pytest.fixture
def facts(tmp_path):
    return make_facts(tmp_path)


def test_says_what_the_files_say(facts, tmp_path):
    made = make(tmp_path, facts)
    page = read(tmp_path / "report.html")
    text = " ".join(" ".join(page.words).split())
    found = collect.evaluations(facts.evals, [row["name"] for row in facts.lineage])
    before, after = found["reverse-text", "reverse-text"]
    assert (before.of, after.of) == ("reverse-text/sft", "reverse-text/rl")
    assert (
        f"{before.mean:.3f} →  {after.mean:.3f}" in " ".join(page.words)
        or f"{before.mean:.3f} → {after.mean:.3f}" in text
    )
    assert made["headline"]["after"] == after.mean and made["headline"]["before"] == before.mean
    for row in facts.lineage:
        assert row["name"] in text and row["fingerprint"] in text
    for word in (
        "Training",
        "Mismatch KL",
        "Lineage",
        "Provenance",
        "0123456789ab",
        "2.13.0",
        "AMD EPYC 9654",
        "2 min 36 s",
    ):
        assert word in text
    own = text[text.index("differ from their defaults") : text.index("All other settings")]
    assert "trainer.optim.lr" in own and "trainer.optim.betas" not in own
    rewards = [value for _, value in collect.find(collect.metrics(facts.run_dir, None), collect.RL_CURVES[0].keys)]
    assert made["headline"]["reward"] == (rewards[0], rewards[-1])


def test_stands_alone(facts, tmp_path):
    make(tmp_path, facts)
    page = read(tmp_path / "report.html")
    for name, key, value in page.attributes:
        assert key not in ("src", "href", "srcset", "onclick", "onload"), (name, key, value)
    assert "link" not in page.tags and "img" not in page.tags
    raw = (tmp_path / "report.html").read_text()
    assert "@import" not in raw and "url(" not in raw
    assert set(re.findall(r"https?://[^\s\"'<]+", raw)) == {"http://www.w3.org/2000/svg"}
    assert len(raw) < 300_000


def test_nothing_of_a_run_becomes_markup(facts, tmp_path):
    make(tmp_path, replace(facts, name=NASTY))
    page = read(tmp_path / "report.html")
    assert page.tags.count("script") == 1
    assert NASTY in "".join(page.words)


def test_paired_difference_against_float64(facts):
    before, after = collect.evaluations(facts.evals, ["reverse-text/sft", "reverse-text/rl"]).popitem()[1]
    differences = [b.reward - a.reward for a, b in zip(before.episodes, after.episodes, strict=True)]
    gain = collect.compared(before, after)
    half = 1.998341 * statistics.stdev(differences) / math.sqrt(64)  # t quantile 0.975 with 63 degrees of freedom
    assert gain.num_tasks == 64 and gain.difference == pytest.approx(statistics.fmean(differences), abs=1e-12)
    assert gain.ci95 == pytest.approx([gain.difference - half, gain.difference + half], abs=1e-6)
    assert collect.compared(replace(before, episodes=[]), after) is None


def test_missing_pieces_are_left_out(facts, tmp_path):
    bare = replace(facts, lineage=[], evals=[], spec={"config": {"max_steps": 3}}, run_dir=tmp_path / "nowhere")
    make(tmp_path, bare)
    text = " ".join(read(tmp_path / "report.html").words)
    assert "reverse-text/rl" in text and "Evaluation reward" not in text and "Rollouts" not in text


def test_an_unreadable_evaluation_is_an_error(facts, tmp_path):
    facts.evals[0]["report"].write_text("{")
    with pytest.raises(UserError, match=r"report\.json"):
        make(tmp_path, facts)
    assert not (tmp_path / "report.html").exists()


def test_rows_behind_the_step_are_not_shown(facts, tmp_path):
    assert max(row.step for row in collect.metrics(facts.run_dir, 30)) == 30


def test_a_curve_carries_its_data_for_the_pointer():
    points = [(n, float(n) ** 2) for n in range(1, 31)]
    reader = Reader()
    reader.feed(charts.curve("Loss", [charts.Line("Loss", points)]))
    data = next(json.loads(value) for name, key, value in reader.attributes if key == "data-lines")
    assert [point[:2] for point in data[0]["points"]] == [[float(x), y] for x, y in points]
    label = next(value for name, key, value in reader.attributes if key == "aria-label")
    assert label == "Loss: 1 at step 1, 900 at step 30"


def test_one_point_and_flat_series_are_drawn():
    for points in ([(1, 0.0)], [(1, 2.0), (2, 2.0)], [(0, -1e-9), (1, 1e9)]):
        assert "NaN" not in charts.curve("x", [charts.Line("x", points)])


def test_thinning_keeps_ends_and_means():
    points = [(n, float(n)) for n in range(10_001)]
    short = charts.thin(points, 101)
    assert len(short) == 101 and short[0] == (0, 0.0) and short[-1] == (10_000, 10_000.0)
    assert all(abs(x - y) < 1e-9 for x, y in short)


def test_smoothing_does_not_lag():
    line = [(n, 3.0 * n) for n in range(200)]
    assert all(abs(y - 3.0 * x) < 1e-9 for x, y in charts.smooth(line))


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (0.8734, "0.873"), (12_400, "12.4k"), (5358.3, "5,358"), (3.1e-7, "3.1e-7"), (1e-4, "1e-4"),
     (1_234_567, "1.23M"), (None, "–"), (float("nan"), "–"), (60, "60"), (-0.25, "-0.25")],
)  # fmt: skip
def test_numbers(value, shown):
    assert numbers.number(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"), [(3.24, "3.2 s"), (48, "48 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")]
)
def test_durations(seconds, shown):
    assert numbers.duration(seconds) == shown


def test_times_of_records():
    assert numbers.between("2026-01-01T00:00:00+00:00", "2026-01-01T00:01:30Z") == 90
    assert numbers.between(10.0, 12.5) == 2.5 and numbers.between(None, 3) is None


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-0.031, 0.044), (3e-7, 6.1e-7), (5, 5), (0, 0), (-1e9, 1e9)])
def test_ticks_enclose_the_range(low, high):
    ticks = numbers.nice_ticks(low, high)
    assert ticks[0] <= low and ticks[-1] >= high and 2 <= len(ticks) <= 8 and ticks == sorted(set(ticks))


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [(6.2178, 6.2184, ["6.2178", "6.2180", "6.2182", "6.2184"]), (0, 1, ["0", "0.25", "0.50", "0.75", "1.00"]),
     (3e-7, 6.1e-7, ["3e-7", "4e-7", "5e-7", "6e-7", "7e-7"]), (0, 40_000, ["0", "10k", "20k", "30k", "40k"])],
)  # fmt: skip
def test_tick_labels_differ(low, high, labels):
    assert numbers.tick_labels(numbers.nice_ticks(low, high)) == labels


def test_markup_is_escaped_unless_it_is_markup():
    assert tag("p", "<b>", Html("<i>x</i>"), cls='a"b') == '<p class="a&quot;b">&lt;b&gt;<i>x</i></p>'
