"""What a configuration may say, and hardly means."""

from config_samples import parsed, source


def test_lag_without_deterministic_is_said():
    (text,) = parsed("RLConfig", orchestrator__lag=1, deterministic=False).orchestrator.warnings()
    assert "orchestrator.lag = 1 counts with" in text
    assert not parsed("RLConfig", orchestrator__lag=1, deterministic=True).orchestrator.warnings()


def test_a_gate_that_sees_no_advantages_is_said():
    gated = source(curriculum={"gates": {"signal": {"type": "advantage_range"}}})
    teacher = {"type": "opd", "teacher": {"name": "a", "base_url": "http://127.0.0.1:9/v1"}}
    changes = {"orchestrator__train__source": [gated], "orchestrator__train__algo": teacher}
    (text,) = parsed("RLConfig", **changes).orchestrator.warnings()
    assert "has curriculum.gates, and 'opd' gives no advantage" in text
    assert not parsed("RLConfig", orchestrator__train__source=[gated]).orchestrator.warnings()


def test_group_size_1_is_said():
    """R01: legal, and nothing would be trained."""
    (text,) = parsed("RLConfig", orchestrator__train__group_size=1).orchestrator.warnings()
    assert "group_size = 1" in text and "nothing will be trained" in text
    for algo in ({"type": "rae"}, {"type": "echo"}):
        assert not parsed(
            "RLConfig", orchestrator__train__group_size=1, orchestrator__train__algo=algo
        ).orchestrator.warnings()
    assert not parsed("RLConfig").orchestrator.warnings()
