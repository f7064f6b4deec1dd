"""The list of metric names: each pattern is found again, and nothing is listed twice."""

import re
from pathlib import Path

import pytest

from rlmake.monitors import names


@pytest.mark.parametrize("metric", names.METRICS, ids=lambda metric: f"{metric.producer}:{metric.pattern}")
def test_each_name_leads_back_to_its_entry(metric):
    assert metric.section in names.SECTIONS and metric.text.endswith(".")
    for name in names.expand(metric, ["a", "b"], ["c"], ["agent"], [1, 8]):
        found = names.find(name, metric.producer)  # or a more literal one, where the list has both
        assert found is metric or found.pattern.count("{") < metric.pattern.count("{")


# What a user of the training page looks for, spelled out here once more: the list must not lose any of them.
PAGE = {
    "orch": """reward/all/mean reward/a/mean seq_len/all/mean seq_len/a/mean is_truncated/all/mean is_truncated/a/mean
        is_timeout/all/mean is_timeout/a/mean num_turns/all/mean num_turns/a/mean empty_rollouts/all empty_rollouts/a
        errored_rollouts/all errored_rollouts/a eval/c/avg@8 eval/c/pass@1 eval/c/pass@8 off_policy/mean off_policy/max
        off_policy/in_flight/mean off_policy/in_flight/max off_policy/in_queue/mean off_policy/in_queue/max
        off_policy/dropped time/wait_for_policy""",
    "trainer": """mismatch_kl/all/mean mismatch_kl/a/mean mismatch_kl/all/std mismatch_kl/a/std mismatch_kl/all/max
        mismatch_kl/a/max entropy/all/mean entropy/a/mean is_masked/mean optim/grad_norm time/wait_for_batch""",
}


def test_the_names_of_the_page_are_all_there():
    listed = [metric for metric in names.METRICS if metric.on_page]
    for producer, text in PAGE.items():
        mine = [metric for metric in listed if metric.producer == producer]
        expanded = {name for metric in mine for name in names.expand(metric, ["a"], ["c"], ks=[1, 8])}
        assert set(text.split()) - expanded == set()


def test_no_name_is_listed_twice():
    keys = [(metric.producer, metric.pattern) for metric in names.METRICS]
    assert len(keys) == len(set(keys))


def test_placeholders_are_filled():
    metric = names.find("eval/held-out/pass@4")
    assert metric.on_page and metric.pattern == "eval/{eval}/pass@{k}"
    assert names.expand(metric, [], ["x"], ks=[1, 2]) == ["eval/x/pass@1", "eval/x/pass@2"]
    assert names.expand(names.find("reward/math/mean"), ["math"]) == ["reward/all/mean", "reward/math/mean"]
    assert names.find("no/such/name") is None
    assert names.find("time/step", "trainer").producer == "trainer"


SFT = {"val/loss"}  # the list is that of an RL run


def test_the_runbook_names_what_there_is():
    text = (Path(__file__).parents[2] / "docs/runbooks/watch.md").read_text()
    told = {name.replace("<env>", "c") for name in re.findall(r"`([a-z]\w*/[\w/<>]+)`", text)}
    told = {name for name in told if not name.startswith(("logs/", "outputs/"))}
    assert len(told) > 15 and {name for name in told - SFT if names.find(name) is None} == set()
