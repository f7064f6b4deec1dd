"""Rollouts that give nothing: warned of, and an end when nothing but failures comes."""

from types import SimpleNamespace

import pytest
import verifiers.v1 as vf

from rlmake.core.errors import RunFailed
from rlmake.orchestrator import cut
from rlmake.orchestrator.cut import FATAL, Silence
from rlmake.orchestrator.records import Group

CONFIG = SimpleNamespace(batch_size=4, token_batch_size=None, seq_len=8)


def group(
    *oks: bool, message: str = "prompt of 40 tokens,\nlimit 16", kind: str = "ModelError", index: int = 0
) -> Group:
    found = Group(index, "a", 0, 0, len(oks), 1, 0)
    for sample, ok in enumerate(oks):
        errors = [] if ok else [vf.Error(type=kind, message=message)]
        found.episodes[sample] = SimpleNamespace(ok=ok, errors=errors, traces=[])
    return found


def test_failures_alone_end_the_run_with_their_reason(warnings):
    silence = Silence(CONFIG)
    for _ in range(2 * FATAL - 1):
        silence.note(group(False, False), 0, 1)
    with pytest.raises(RunFailed) as failed:
        silence.note(group(False, False, message="another"), 0, 1)
    line = str(failed.value)
    assert "the last 12 rollouts all failed, 10 of them with: ModelError: prompt of 40 tokens, limit 16" in line
    assert "\n" not in line and len(warnings) == 1, "not with each batch's worth"


def test_one_that_ends_well_starts_the_count_anew(warnings, monkeypatch):
    monkeypatch.setattr(cut, "REPEAT_SECONDS", 0.0)
    silence = Silence(CONFIG)
    for _ in range(5 * FATAL):
        silence.note(group(False, False), 0, 1)
        silence.note(group(True, False), 0, 1)  # equal rewards, say: silent, not hopeless
    rejected = group(True, True, False, True)
    rejected.rejected = True
    silence.note(rejected, 0, 1)
    last = "the last 64 rollouts gave nothing to train on: 46 failed, 3 were rejected by a gate, 15 have no signal"
    assert last in warnings[-1]
    beyond = group(True, True)
    beyond.cut = 2
    silence.note(beyond, 0, 1)
    assert "2 reply beyond seq_len = 8, 15 have no signal" in warnings[-1]
    before = len(warnings)
    for _ in range(8):
        silence.note(group(True, True), 2, 1)
    assert len(warnings) == before


def test_a_worker_that_dies_is_one_event_however_much_it_takes_along():
    silence = Silence(CONFIG)

    def died(index: int, opened: int) -> None:
        silence.note(group(False, False, kind="EnvWorkerDied", message="code 7", index=index), 0, opened)

    for death in range(FATAL - 1):
        for index in range(50):
            died(50 * death + index, 50 * death + 50)
    silence.note(group(True, True, index=0), 0, 100)  # one came to its end
    for death in range(2, FATAL + 1):
        for index in range(50):
            died(50 * death + index, 50 * death + 50)
    with pytest.raises(RunFailed, match=r"the last 202 rollouts all failed, 202 of them with: EnvWorkerDied: code 7"):
        died(50 * (FATAL + 1), 50 * (FATAL + 2))
