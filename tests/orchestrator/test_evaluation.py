"""Online evaluations: when they are due, that each measures one version, and that the last one is never lost."""

from types import SimpleNamespace

import pytest

from rlmake.config.orchestrator import OnlineEvalConfig
from rlmake.monitors import setup
from rlmake.monitors.traces import Recorder
from rlmake.orchestrator.evaluation import Evaluator


def make(tmp_path, max_steps=10, resumed_at=None, monitors=None, **config):
    sources = [{"name": n, "env": {"taskset": {"id": n}}, "interval": i} for n, i in (("a", 2), ("b", 5))]
    table = OnlineEvalConfig(source=sources, **config)
    ctx = SimpleNamespace(run_dir=tmp_path, attempt=1)
    held = []
    evaluator = Evaluator(
        SimpleNamespace(eval=table, max_steps=max_steps), {"a": None, "b": None}, None, "m", monitors,
        Recorder((), "", 1), ctx, resumed_at, held.append, lambda: 8,
    )  # fmt: skip
    return evaluator, held


def due(evaluator, version):
    return [source.name for source in evaluator.due(version)]


def test_due_by_interval_first_and_last(tmp_path):
    evaluator, _ = make(tmp_path)
    assert [due(evaluator, v) for v in (0, 1, 2, 4, 5, 10)] == [["a", "b"], [], ["a"], ["a"], ["b"], ["a", "b"]]
    assert due(make(tmp_path, max_steps=7)[0], 7) == ["a", "b"]
    assert due(make(tmp_path, skip_first_step=True)[0], 0) == []
    assert due(make(tmp_path, max_steps=None)[0], 11) == []


def test_after_a_resume_only_what_was_missed(tmp_path):
    assert due(make(tmp_path, resumed_at=10, max_steps=20)[0], 10) == ["a", "b"]
    ctx = SimpleNamespace(run_dir=tmp_path, attempt=1)
    file = SimpleNamespace(path=None)
    monitors = setup(SimpleNamespace(file=file), "orch", ctx)
    monitors.log(10, {"eval/a/policy_version": 10})
    monitors.close()
    assert due(make(tmp_path, resumed_at=10, max_steps=20)[0], 10) == ["b"]
    assert due(make(tmp_path, resumed_at=10, max_steps=20, retrigger_on_resume=True)[0], 10) == ["a", "b"]
    assert due(make(tmp_path, resumed_at=3, retrigger_on_resume=True)[0], 3) == ["a", "b"]


async def test_engines_are_released_when_an_evaluation_fails(tmp_path):
    evaluator, held = make(tmp_path)

    async def broken(*_):
        raise RuntimeError("no")

    evaluator._run = broken
    with pytest.raises(RuntimeError):
        await evaluator.on_version(2)
    assert held == [True, False]
    await evaluator.on_version(3)
    assert held == [True, False]


@pytest.mark.parametrize("deterministic", [True, False])
async def test_evaluations_in_a_run(make_run, deterministic):
    """V03: the base model first, by interval, and the last version before the run ends; never two versions in one."""
    run = make_run(
        max_steps=3, deterministic=deterministic, rewards={"toy": (5, lambda task, ids: float(ids[0] % 2))},
        eval={"interval": 2, "group_size": 2, "sampling": {"temperature": 0.5}, "source": [
            {"name": "toy", "env": {"taskset": {"id": "toy"}}},
        ]},
    )  # fmt: skip
    _, trainer, engine, _ = await run.finish()
    rows = [row for row in run.rows() if "eval/toy/policy_version" in row]
    assert [row["step"] for row in rows] == [row["eval/toy/policy_version"] for row in rows] == [0, 2, 3]
    assert all(row["eval/toy/num_episodes"] == 10 and "eval/toy/pass@2" in row for row in rows)
    assert sorted(trainer.batches) == [1, 2, 3]
    asked = [request for request in engine.requests if request["temperature"] == 0.5]
    assert len(asked) == 30 and all(request["salt"] == str(request["version"]) for request in asked)
    assert {request["version"] for request in asked} == {0, 2, 3}
