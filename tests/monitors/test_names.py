"""The list of metric names: each pattern is found again, and nothing is listed twice."""

import pytest

from rlmake.monitors import names


@pytest.mark.parametrize("metric", names.METRICS, ids=lambda metric: f"{metric.producer}:{metric.pattern}")
def test_each_name_leads_back_to_its_entry(metric):
    assert metric.section in names.SECTIONS and metric.text.endswith(".")
    for name in names.expand(metric, ["a", "b"], ["c"], ["agent"], [1, 8]):
        found = names.find(name, metric.producer)  # or a more literal one, where the list has both
        assert found is metric or found.pattern.count("{") < metric.pattern.count("{")


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
