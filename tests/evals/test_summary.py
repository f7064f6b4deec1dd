"""The numbers of an evaluation, each against one computed by hand or by brute force."""

import itertools
import math

import numpy as np
import pytest

from rlmake.core.errors import UserError
from rlmake.evals import paired, report, summary
from rlmake.evals.records import EnvResult, EpisodeRecord, read


def record(task, sample, reward, env="rev", **given):
    values = {"prompt": "p", "reply": "r", "truncated": False, "timeout": False, "error": None, "output_tokens": 4}
    values |= {"seed": 1, "metrics": {"exact": float(reward >= 1)}}
    return EpisodeRecord(env=env, task=task, key=f"k{task}", sample=sample, reward=reward, **values | given)


def result(rewards, group_size, planned_tasks=None, **given):
    """`rewards[task]` is the list of that task's rewards."""
    records = [record(t, s, r, **given) for t, group in enumerate(rewards) for s, r in enumerate(group)]
    return EnvResult("rev", planned_tasks or len(rewards), group_size, {"temperature": 1.0}, records, 2.5)


def brute_pass_at_k(successes, k):
    draws = list(itertools.combinations(successes, k))
    return sum(any(draw) for draw in draws) / len(draws)


def test_pass_at_k_is_the_unbiased_estimate_averaged_over_tasks():
    groups = [[1, 1, 0, 0, 0, 0, 0, 0], [0] * 8, [1] + [0.5] * 7]
    entry = summary.summarise(result([[float(r) for r in group] for group in groups], 8))
    for k in (1, 2, 4, 8):
        expected = np.mean([brute_pass_at_k([r == 1 for r in group], k) for group in groups])
        assert math.isclose(entry[f"pass@{k}"], expected, rel_tol=1e-12)
    first = summary.summarise(result([groups[0]], 8))
    assert [round(first[f"pass@{k}"], 4) for k in (1, 2, 4, 8)] == [0.25, 0.4643, 0.7857, 1.0]
    assert summary.summarise(result([[1.0, 0.0, 0.0, 0.0]], 4))["pass@4"] == 1.0
    assert entry["success"] == "reward >= 1"


def test_a_task_with_too_few_episodes_leaves_pass_at_k_out():
    entry = summary.summarise(result([[0.0] * 8, [0.0] * 6], 8))
    assert entry["pass@4"] == 0.0 and "pass@8" not in entry and "avg@8" not in entry
    assert entry["partial"] and (entry["num_planned"], entry["num_episodes"]) == (16, 14)
    assert "pass@5" not in summary.summarise(result([[0.0, 0.0]], 2))


def test_partial_rewards_are_no_success_and_rounding_is_no_failure():
    entry = summary.summarise(result([[0.5, 0.999], [1 - 1e-12, 1.0]], 2))
    assert entry["pass@1"] == 0.5 and entry["avg@2"] == entry["reward"]["mean"]


def test_the_interval_is_over_tasks_not_over_episodes():
    rewards = [[0.2, 0.4], [0.6, 0.8], [1.0, 1.0]]
    entry = summary.summarise(result(rewards, 2))
    means = np.array(rewards).mean(1)
    half = 4.3027 * means.std(ddof=1) / math.sqrt(3)
    assert entry["reward"]["mean"] == pytest.approx(means.mean())
    assert entry["reward"]["ci95"] == pytest.approx([means.mean() - half, means.mean() + half], rel=1e-4)
    assert summary.summarise(result([[0.5]], 1))["reward"] == {"mean": 0.5, "ci95": None}


def test_flags_are_counted_and_nothing_is_left_of_nothing():
    flagged = result([[0.0], [0.0]], 1, truncated=True, timeout=True, error="ProviderError: gone: away")
    entry = summary.summarise(flagged)
    assert (entry["failed"], entry["timeouts"], entry["truncated"]) == (2, 2, 2)
    assert entry["errors"] == {"ProviderError": 2}
    empty = summary.summarise(EnvResult("rev", 4, 2, {}, [], 0.0))
    assert empty["reward"] == {"mean": None, "ci95": None} and empty["partial"] and "pass@1" not in empty
    assert "Reward –" in summary.line(EnvResult("rev", 4, 2, {}, [], 0.0), empty, 7)
    assert summary.metrics(EnvResult("rev", 4, 2, {}, [], 0.0), empty)["eval/rev/num_episodes"] == 0


def test_metrics_row_and_console_line():
    done = result([[1.0, 0.0], [0.5, 0.5]], 2)
    entry = summary.summarise(done)
    row = summary.metrics(done, entry, policy_version=4)
    assert row["eval/rev/reward/mean"] == 0.5 and row["eval/rev/policy_version"] == 4
    assert row["eval/rev/avg@2"] == 0.5 and row["eval/rev/pass@1"] == 0.25 and row["eval/rev/metrics/exact"] == 0.25
    assert all(isinstance(value, int | float) for value in row.values())
    assert summary.line(done, entry, 20).startswith("Evaluated rev (Step 20) | 2.50s | Reward 0.5000 | avg@2 0.5000 |")


def test_paired_difference_against_numpy():
    rng = np.random.default_rng(0)
    hard = rng.random(40)
    before, after = hard * 0.5, np.clip(hard * 0.5 + 0.2 + 0.05 * rng.standard_normal(40), 0, 1)
    found = paired.compare(result(before[:, None].tolist(), 1).records, result(after[:, None].tolist(), 1).records)[
        "rev"
    ]
    difference = after - before
    half = summary.mean_ci95(difference.tolist())[1][1] - difference.mean()
    assert found.difference == pytest.approx(difference.mean()) and found.excludes_zero and found.unpaired == 0
    assert found.ci95 == pytest.approx([difference.mean() - half, difference.mean() + half])
    # Unpaired, the spread of the tasks' difficulty would hide half of it.
    assert half < 0.3 * 2.02 * math.sqrt((before.var(ddof=1) + after.var(ddof=1)) / 40)


def test_paired_needs_tasks_in_common():
    one = [record(0, 0, 0.0), record(1, 0, 0.5)]
    found = paired.compare(one, [record(1, 0, 1.0), record(2, 0, 1.0)])["rev"]
    assert (found.num_tasks, found.unpaired, found.difference, found.ci95) == (1, 2, 0.5, None)
    assert not found.excludes_zero
    with pytest.raises(UserError, match="no task in common"):
        paired.compare(one, [record(9, 0, 1.0)])
    with pytest.raises(UserError, match="no environment in common"):
        paired.compare(one, [record(0, 0, 1.0, env="other")])


def test_files_hold_everything_and_escape_everything(tmp_path):
    nasty = "<script>alert(1)</script> & 🧪 \u2028 'x'"
    done = result([[0.5, 1.0], [0.0, 0.0]], 2, prompt=nasty, reply=nasty + "\ud800", error="E<b>: " + nasty)
    identity = {"suite": "s", "run": "<i>run</i>", "model_fingerprint": "f" * 16, "model_step": 20}
    made = report.make([done], identity=identity, sampling={"temperature": 1.0}, seed=0)
    report.write(tmp_path, made, [done])
    assert report.read(tmp_path) == made and made["schema"] == 1 and made["model_content"] is None
    assert made["envs"]["rev"]["num_episodes"] == 4
    page = (tmp_path / "report.html").read_text()
    assert "<script" not in page and "<i>" not in page and "&lt;script&gt;" in page and "src=" not in page
    clean = result([[0.5, 1.0], [0.0, 0.0]], 2, prompt=nasty)
    report.write(tmp_path / "again", report.make([clean], identity={}, sampling={}, seed=0), [clean])
    assert read(tmp_path / "again" / "episodes.jsonl") == clean.records
    same = paired.compare_reports(tmp_path / "again", tmp_path / "again" / "report.json")["rev"]
    assert same.difference == 0.0 and same.ci95 == [0.0, 0.0]


def test_records_of_another_kind_are_refused(tmp_path):
    (tmp_path / "episodes.jsonl").write_text('{"env": "rev"}\n')
    with pytest.raises(UserError, match="line 1: not a record of an episode"):
        read(tmp_path / "episodes.jsonl")
    (tmp_path / "report.json").write_text('{"schema": 99}')
    with pytest.raises(UserError, match="schema 1"):
        report.read(tmp_path)


def test_a_long_list_of_examples_shows_both_ends(tmp_path):
    done = result([[index / 100] for index in range(100)], 1)
    page = report.render(report.make([done], identity={}, sampling={}, seed=0), done.records)
    assert "60 episodes in between" in page and page.count("<td class='text'>") == 80
