"""Advantages against float64 references written from the formulas."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmake.algorithms import credit

REWARDS = st.lists(st.floats(-10, 10, allow_nan=False), min_size=1, max_size=16)


@given(REWARDS)
def test_group_mean(rewards):
    expected = np.asarray(rewards) - np.mean(rewards)
    np.testing.assert_allclose(credit.group_mean(rewards), expected, atol=1e-12)


@given(st.floats(-1e6, 1e6, allow_nan=False), st.integers(1, 40))
def test_equal_rewards_are_exactly_zero(reward, size):
    assert credit.group_mean([reward] * size) == [0.0] * size
    assert credit.group_mean([reward] * size, list(range(1, size + 1))) == [0.0] * size
    assert set(credit.max_rl([reward] * size)) == {0.0}


def test_one_sample_and_none():
    """R01: no standard deviation of one value, no raw reward as advantage."""
    assert credit.group_mean([1.0]) == [0.0] and credit.max_rl([1.0]) == [0.0]
    assert credit.group_mean([]) == credit.max_rl([]) == credit.penalised([], [], [], []) == []


def test_length_weighted_baseline():
    rng = random.Random(0)
    for _ in range(20):
        rewards = [rng.uniform(-2, 3) for _ in range(7)]
        lengths = [rng.randint(1, 500) for _ in range(7)]
        baseline = np.dot(lengths, rewards) / np.sum(lengths)
        np.testing.assert_allclose(credit.group_mean(rewards, lengths), np.asarray(rewards) - baseline, atol=1e-12)
    with pytest.raises(ValueError):
        credit.group_mean([1.0, 2.0], [0, 0])


def test_length_penalty():
    rewards, outputs, inputs, turns = [1.0, 0.5, 0.0], [10, 40, 20], [0, 0, 0], [1, 2, 4]
    mean = 0.5
    fractions = [0.25 * 10 / 40 + 0.1 * 1 / 4, 0.25 * 1 + 0.1 * 2 / 4, 0.25 * 20 / 40 + 0.1 * 1]
    expected = [r - mean * f for r, f in zip(rewards, fractions, strict=True)]
    np.testing.assert_allclose(credit.penalised(rewards, outputs, inputs, turns), expected, atol=1e-15)
    same = credit.penalised([0.3] * 3, [7] * 3, [2] * 3, [1] * 3)
    assert credit.group_mean(same) == [0.0] * 3


def test_max_rl_cases():
    """R08: nobody succeeds, everybody succeeds, negative mean."""
    assert credit.max_rl([1, 0, 0, 0]) == [3.0, -1.0, -1.0, -1.0]
    assert credit.max_rl([0, 0, 0, 0]) == credit.max_rl([1, 1, 1, 1]) == credit.max_rl([-1, 0, 0, 0]) == [0.0] * 4
    np.testing.assert_allclose(credit.max_rl([0.2, 0.7, 0.9]), (np.array([0.2, 0.7, 0.9]) - 0.6) / 0.6, atol=1e-15)


def test_peers():
    keys = [
        ("solver", 1),
        ("solver", 2),
        ("solver", 1),
        ("proposer", None),
        ("solver", 2),
        ("proposer", None),
        ("x", 0),
    ]
    rewards = [1.0, 0.25, 0.0, 0.75, 0.25, 0.25, 5.0]
    assert credit.peer_mean(keys, rewards) == [0.5, 0.0, -0.5, 0.25, 0.0, -0.25, 0.0]


def test_running_baseline():
    baseline, rewards, decay = 0.0, [1.0, -1.0, 0.5], 0.95
    for reward in rewards:
        expected = decay * baseline + 0.05 * reward
        advantage, new = credit.running_baseline(baseline, reward, decay)
        assert advantage == reward - baseline and math.isclose(new, expected, abs_tol=1e-14)
        baseline = new
