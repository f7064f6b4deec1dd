"""When an evaluation counts as failed although its report is there."""

import pytest

from rlmake.core.errors import RunFailed
from rlmake.evals.main import _check
from rlmake.evals.records import EnvResult, EpisodeRecord


def result(errors, planned):
    values = {"env": "rev", "sample": 0, "seed": 1, "prompt": "", "reply": "", "reward": 0.0}
    values |= {"truncated": False, "timeout": False}
    records = [EpisodeRecord(task=n, key=str(n), error=error, **values) for n, error in enumerate(errors)]
    return EnvResult("rev", planned, 1, {}, records, 1.0)


def test_stopped_half_way():
    with pytest.raises(RunFailed, match="stopped: 2 of 3 episodes of rev have ended"):
        _check([result([None, None], 2), result([None, None], 3)])


def test_nothing_worked():
    with pytest.raises(RunFailed, match="all 2 episodes of rev failed, the last with ProviderError: gone"):
        _check([result(["Timeout: x", "ProviderError: gone"], 2)])


def test_some_failures_are_a_result():
    _check([result(["ProviderError: gone", None], 2)])
