"""The lock-step loop end to end: equal bytes whatever the order of arrival, and through kills and resumes."""

import asyncio
import random
from types import SimpleNamespace

import pytest

from rlmake import checkpoint
from rlmake.core.errors import UserError
from rlmake.monitors import names
from rlmake.orchestrator import checkpoints
from rlmake.orchestrator.lockstep import LockStep


async def test_two_runs_are_equal_and_a_seed_matters(make_run):
    weights = [(await make_run().finish())[0] for _ in range(2)]
    assert weights[0] == weights[1]
    assert (await make_run(seed=4).finish())[0] != weights[0]


async def test_steps_versions_and_evidence(make_run):
    run = make_run()
    _, trainer, engine, _ = await run.finish()
    assert engine.loaded == [0, 1, 2, 3, 4] and engine.busy_updates == 0
    assert sorted(trainer.batches) == [1, 2, 3, 4]
    for request in engine.requests:  # lag 0: every batch is collected with the version that it trains
        assert request["salt"] == str(request["version"])
        assert (request["temperature"], request["top_p"]) == (1.0, 1.0) and request["seed"] >= 0
    assert len({request["seed"] for request in engine.requests}) == len(engine.requests)
    ids = [name for step in sorted(trainer.batches) for name in trainer.batches[step][0].sample_ids]
    assert len(ids) == len(set(ids)) == 12 * 4  # zero-signal rollouts were replaced, nothing trains twice
    for batches in trainer.batches.values():
        for batch in batches:
            for row in batch.micro_batches:
                trained = row.loss_mask & (row.rl_weights != 0 if row.rl_weights is not None else True)
                assert (row.advantages[trained] != 0).all()
    assert checkpoints.load(run.folder / "checkpoints/step_4").state["totals"]["rollouts"] == 48
    assert checkpoint.newest(run.folder) == 4 and checkpoint.steps(run.folder) == [2, 4]


@pytest.mark.parametrize("lag", [0, 1, 2])
async def test_kill_and_resume_give_the_same_bytes(make_run, lag):
    straight = (await make_run(max_steps=5, lag=lag).finish())[0]
    run, resumed, number = make_run(max_steps=5, lag=lag), None, 1
    for kill_at in (1, 3):
        async with run.attempt(number=number, resume=resumed) as (task, trainer, _, _):
            while trainer.step < kill_at and trainer.error is None:
                await asyncio.sleep(0.002)
            await asyncio.sleep(random.random() * 0.05)
            assert not task.done() or task.exception() is None
        resumed, number = checkpoint.newest(run.folder), number + 1
    weights, trainer, engine, _ = await run.finish(number=number, resume=resumed)
    assert weights == straight
    assert engine.loaded[0] == (resumed or 0)


async def test_extending_a_finished_run_equals_the_longer_run(make_run):
    straight = (await make_run(max_steps=4, lag=1).finish())[0]
    run = make_run(max_steps=2, lag=1)
    await run.finish()
    run.max_steps = run.raw["max_steps"] = 4
    assert (await run.finish(number=2, resume=2))[0] == straight


async def test_an_asked_checkpoint_is_answered_between_intervals(make_run):
    straight = (await make_run(max_steps=4, interval=4).finish())[0]
    run = make_run(max_steps=4, interval=4)
    async with run.attempt(ask_at=2, until=2) as (_, trainer, _, _):
        await asyncio.to_thread(trainer.thread.join, 30)
        assert trainer.error is None, trainer.error
        while list(
            run.folder.glob("checkpoints/*/orchestrator.wanted")
        ):  # the answer is there before the question goes
            await asyncio.sleep(0.01)
    assert checkpoint.newest(run.folder) == 2
    assert (await run.finish(number=2, resume=2))[0] == straight


async def test_several_sources_keep_their_ratio_and_order_through_a_resume(make_run):
    """C08: two sources, ratios 3:1, 12 and 5 tasks, killed at step 2."""
    rewards = {"a": (12, lambda task, ids: float(ids[0] % 2)), "b": (5, lambda task, ids: float(ids[0] % 2))}

    def make():
        run = make_run(max_steps=5, rewards=rewards)
        run.raw["train"]["source"] = [run.source("a", ratio=3.0), run.source("b", ratio=1.0)]
        return run

    straight = make()
    weights, _, _, orchestrator = await straight.finish()
    draws = orchestrator.sources.state_dict()
    assert draws["sources"]["a"]["draws"] > 1.5 * draws["sources"]["b"]["draws"] > 0
    interrupted = make()
    async with interrupted.attempt() as (_, trainer, _, _):
        while trainer.step < 3 and trainer.error is None:
            await asyncio.sleep(0.002)
    resumed = checkpoint.newest(interrupted.folder)
    again, _, _, other = await interrupted.finish(number=2, resume=resumed)
    assert again == weights and other.sources.state_dict() == draws


async def test_the_state_of_an_algorithm_survives(make_run):
    def make():
        run = make_run(max_steps=4)
        run.raw["train"]["algo"] = {"type": "rae"}
        return run

    straight, *_, orchestrator = await make().finish()
    run = make()
    async with run.attempt() as (_, trainer, _, _):
        while trainer.step < 3 and trainer.error is None:
            await asyncio.sleep(0.002)
    weights, *_, other = await run.finish(number=2, resume=checkpoint.newest(run.folder))
    assert weights == straight and other.algorithms["toy"].baselines == orchestrator.algorithms["toy"].baselines


async def test_variable_batches_prune_after_the_cut(make_run):
    run = make_run(constant_trainer_batch_size=False)
    _, trainer, _, _ = await run.finish()
    sizes = [len(batches[0].sample_ids) for batches in trainer.batches.values()]
    assert all(0 < size <= 12 for size in sizes) and min(sizes) < 12


async def test_token_batches_count_what_is_shipped(make_run):
    run = make_run(batch_size=None, token_batch_size=60)
    _, trainer, _, _ = await run.finish()
    for batches in trainer.batches.values():
        tokens = [
            n
            for batch in batches
            for row in batch.micro_batches
            for n in row.sequence_lengths
            if row.sample_ids != [""]
        ]
        assert 60 <= sum(tokens) < 60 + 16


def test_a_wave_counts_traces_not_episodes():
    """An episode of several agents fills more of a batch than one: nothing is collected to go stale in the queue."""

    def collector(agents, traces):
        made = LockStep.__new__(LockStep)
        made.config, made.traces = SimpleNamespace(seq_len=64), traces
        made.queue, made.watcher = SimpleNamespace(batch_size=64), SimpleNamespace(version=0)
        made.rollouts = SimpleNamespace(envs={"a": SimpleNamespace(agents=agents)})
        made.sources = SimpleNamespace(draw=lambda step, version: SimpleNamespace(env="a", size=4))
        return made

    assert len(collector(("agent",), {})._draw(64, 1)) == 16
    assert len(collector(("player0", "player1"), {})._draw(64, 1)) == 8
    known = collector(("proposer", "solver"), {"a": [10, 40]})
    assert len(known._draw(64, 1)) == 4
    again = collector(("proposer", "solver"), {})
    again.load_state_dict(known.state_dict())
    assert len(again._draw(64, 1)) == 4
    again.load_state_dict({})  # of a checkpoint from before
    assert len(again._draw(64, 1)) == 8


@pytest.mark.parametrize("seq_len, why", [(16, "12 have no signal"), (4, "reply beyond seq_len = 4, 0 have no signal")])
async def test_no_signal_at_all_warns_and_goes_on_asking(make_run, seq_len, why):
    """R10/R08: nothing to train on is said, and no empty batch is shipped."""
    from loguru import logger

    lines = []
    sink = logger.add(lambda message: lines.append(str(message)), level="WARNING")
    try:
        rewards = {"toy": (7, lambda task, ids: 1.0 if seq_len > 4 else float(sum(ids)))}
        run = make_run(rewards=rewards, seq_len=seq_len)
        async with run.attempt() as (task, trainer, _, _):
            while not any("gave nothing to train on" in line for line in lines):
                await asyncio.sleep(0.01)
            assert any(why in line for line in lines)
            assert trainer.step == 0 and not task.done() and not (run.folder / "batches").exists()
    finally:
        logger.remove(sink)


async def test_mistakes_are_one_line(make_run, slow_engine):
    with pytest.raises(UserError, match="belongs to run 'other', not to 'run'"):
        await make_run().finish(engine=slow_engine(run_id="other"))
    with pytest.raises(UserError, match=r"checkpoints/step_7/orchestrator/state\.json: no such file"):
        checkpoints.load(make_run().folder / "checkpoints/step_7")


async def test_metrics_have_the_pages_names(make_run):
    run = make_run()
    await run.finish()
    rows = [row for row in run.rows() if row["producer"] == "orch"]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    logged = set().union(*rows)
    mine = [metric for metric in names.METRICS if metric.producer == "orch" and metric.when in ("", "engine metrics")]
    assert [name for metric in mine for name in names.expand(metric, ["toy"]) if name not in logged] == []
    told = sorted(logged - {"step", "time", "producer", "attempt"})
    assert [name for name in told if names.find(name, "orch") is None] == []
    last = rows[-1]
    assert last["progress/total_rollouts"] == 48 and last["batch/trainable"] == 12
    assert last["batch/rollouts"] >= 12 and last["dispatcher/started/train"] == last["batch/rollouts"]
    assert last["dispatcher/finished/train"] + last["dispatcher/errored/train"] == last["dispatcher/started/train"]
