"""Asynchronous collection: pacing, staleness, exactly-once accounting, and a resume that loses no task."""

import asyncio
import json
import time
from collections import Counter

import pytest

from rlmake import checkpoint
from rlmake.core.errors import UserError
from rlmake.orchestrator.accounts import Accounts
from rlmake.orchestrator.pacing import Burst, TaskRate
from rlmake.transport import WeightReceiver


def live(make_run, **kwargs):
    return make_run(deterministic=False, **kwargs)


async def test_a_run_to_its_end(make_run):
    run = live(make_run, max_steps=5, max_off_policy_steps=2)
    _, trainer, engine, orchestrator = await run.finish()
    assert engine.loaded == [0, 1, 2, 3, 4, 5]
    ids = [name for step in sorted(trainer.batches) for name in trainer.batches[step][0].sample_ids]
    assert len(ids) == len(set(ids)) == 12 * 5
    rows = [row for row in run.rows() if row["producer"] == "orch"]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert all(row["off_policy/max"] <= 2 for row in rows)
    assert sum(orchestrator.accounts.inflight.values()) == rows[-1]["dispatcher/inflight/train"] == 0
    started = sum(row["dispatcher/started/train"] for row in rows)
    ended = sum(row[f"dispatcher/{how}/train"] for row in rows for how in ("finished", "errored", "cancelled"))
    cancelled = sum(row["dispatcher/cancelled/train"] for row in rows)
    assert not any(row["dispatcher/cancelled/reason/superseded"] for row in rows[:-1])
    assert started == ended and ended - cancelled <= len(engine.requests) <= ended  # some are cancelled before they ask


async def test_collection_runs_at_most_one_step_ahead(make_run, monkeypatch):
    """With no version beyond v0, batches 1 and 2 are shipped and then dispatch pauses."""
    poll = WeightReceiver.poll
    monkeypatch.setattr(WeightReceiver, "poll", lambda self, after: poll(self, after) if after < 0 else None)
    run = live(make_run, max_steps=9)
    async with run.attempt() as (task, trainer, engine, orchestrator):
        while not (run.folder / "batches/step_2").exists() and trainer.error is None:
            await asyncio.sleep(0.005)
        seen = -1
        while seen != len(engine.requests):  # what was in flight comes to its end
            seen = len(engine.requests)
            await asyncio.sleep(0.3)
        assert orchestrator.collector.step == 3 and orchestrator.watcher.version == 0 and not task.done()
        assert not (run.folder / "batches/step_3").exists()
        assert sum(orchestrator.accounts.inflight.values()) == 0


async def test_stale_groups_are_cancelled_before_the_engines_are_paused(make_run):
    """Bound 0: whatever is in flight when v1 is announced can't train step 2 any more."""
    run = live(make_run, max_steps=3, max_off_policy_steps=0, concurrency={"max_inflight": 64})
    _, trainer, engine, _ = await run.finish()
    rows = [row for row in run.rows() if row["producer"] == "orch"]
    assert all(row["off_policy/max"] == 0 for row in rows) and len(rows) == 3
    dropped = sum(row["off_policy/dropped"] + row["dispatcher/cancelled/reason/stale"] for row in rows)
    assert dropped > 0 and engine.loaded == [0, 1, 2, 3]
    assert sum(row[f"dispatcher/cancelled/reason/{why}"] for row in rows for why in ("stale", "superseded")) == sum(
        row["dispatcher/cancelled/train"] for row in rows
    )
    assert len(trainer.batches) == 3


async def test_a_resume_starts_open_groups_again(make_run):
    run = live(make_run, max_steps=6)
    async with run.attempt() as (_, trainer, _, _):
        while trainer.step < 3 and trainer.error is None:
            await asyncio.sleep(0.002)
    resumed = checkpoint.newest(run.folder)
    state = checkpoint_state(run, resumed)
    reopened = {(row["env"], row["draw"]) for row in state["collector"]["open"]}
    _, trainer, engine, orchestrator = await run.finish(number=2, resume=resumed)
    assert engine.loaded[0] == resumed and sorted(trainer.batches) == list(range(resumed + 1, 7))
    assert orchestrator.sources.draws >= state["sources"]["draws"]
    ids = [name for step in trainer.batches for name in trainer.batches[step][0].sample_ids]
    assert len(ids) == len(set(ids))
    drawn = {tuple(name.split("/")[:2]) for name in ids}
    fresh = {(env, int(draw)) for env, draw in drawn if int(draw) >= state["sources"]["draws"]}
    queued = {(env, int(draw)) for env, draw in drawn} - fresh - reopened
    assert len(queued) <= 12  # the rest of what trained was waiting in the checkpoint's queue


async def test_a_resume_with_other_sources_and_algorithms(make_run, warnings):
    """What was drawn of tasks that are others now is not started; what has no state of its own begins anew."""
    rewards = {name: (9, lambda task, ids: 1.0 + sum(ids) % 2) for name in ("a", "b", "c", "gone")}
    run = live(make_run, max_steps=6, rewards=rewards, max_off_policy_steps=99)
    async with run.attempt() as (_, trainer, _, _):
        while trainer.step < 3 and trainer.error is None:
            await asyncio.sleep(0.002)
    resumed = checkpoint.newest(run.folder)
    path = run.folder / f"checkpoints/step_{resumed}/orchestrator/state.json"
    state = json.loads(path.read_text())
    rows = [{"index": 900 + n, "env": name, "draw": 900, "task": 8} for n, name in enumerate(rewards)]
    path.write_text(json.dumps(state | {"collector": {"open": rows}}))
    del run.rewards["gone"]
    run.rewards["a"] = (2, rewards["a"][1])
    run.raw["train"]["source"] = [
        run.source("a"),
        run.source("b", algo={"type": "rae"}, group_size=2),
        run.source("c", curriculum={"sampler": {"type": "difficulty_pool"}}),
    ]
    _, trainer, _, orchestrator = await run.finish(number=2, resume=resumed)
    assert sorted(trainer.batches) == list(range(resumed + 1, 7))
    names = {name for batch in trainer.batches.values() for name in batch[0].sample_ids}
    assert {"b/900/0", "b/900/1"} <= names and {name for name in names if "/900/" in name and name[0] == "a"} == set()
    assert orchestrator.algorithms["b"].baselines
    text = "\n".join(warnings)
    assert "'a': its taskset is not" in text and "'c': its sampler is not" in text and "'gone' of the" in text


async def test_a_resume_with_shorter_rows_than_what_waits(make_run):
    """Of a checkpoint in which something waits, which not every one has."""
    run = live(make_run, max_steps=400, rewards={"toy": (7, lambda task, ids: float(ids[0] % 7))})
    async with run.attempt() as (_, trainer, _, _):
        while (step := with_waiting(run)) is None and trainer.error is None:
            await asyncio.sleep(0.002)
    run.raw["seq_len"] = 2
    with pytest.raises(UserError, match=r"orchestrator\.seq_len: 2 is below the \d+ tokens of a rollout that waits"):
        await run.finish(number=2, resume=step)


def with_waiting(run):
    """The newest complete checkpoint, where rollouts wait in it."""
    from rlmake.orchestrator.checkpoints import load

    if (step := checkpoint.newest(run.folder)) is None:
        return None
    waiting = load(run.folder / f"checkpoints/step_{step}").waiting
    return step if waiting.queue or any(batch.units for batch in waiting.ahead) else None


def checkpoint_state(run, step):
    from rlmake.orchestrator.checkpoints import load

    return load(run.folder / f"checkpoints/step_{step}").state


async def test_a_failure_in_a_rollout_task_ends_the_run(make_run):
    run = live(make_run)
    async with run.attempt() as (task, _, _, orchestrator):

        def broken(group, version):
            raise RuntimeError("scoring failed")

        while not hasattr(orchestrator, "collector"):
            await asyncio.sleep(0.002)
        orchestrator.collector.groups.finish = broken
        done, _ = await asyncio.wait({task}, timeout=20)
        assert done and "scoring failed" in str(task.exception())


async def test_what_is_given_up_is_cancelled_a_group_a_turn(make_run, slow_engine):
    run = live(make_run, max_steps=3, max_off_policy_steps=0, concurrency={"min_inflight": 64, "max_inflight": 64})
    turn, dropped = 0, []
    async with run.attempt(engine=slow_engine(delay=0.3)) as (task, _, _, orchestrator):
        while not hasattr(orchestrator, "collector"):
            await asyncio.sleep(0.002)
        drop = orchestrator.collector._drop

        def noted(group, reason):
            dropped.append(turn)
            drop(group, reason)

        orchestrator.collector._drop = noted
        while not task.done():
            await asyncio.sleep(0)
            turn += 1
        await task
    assert len(dropped) > 3 and max(Counter(dropped).values()) <= 2, "two that give up may meet in a turn"


def test_accounts_always_add_up():
    accounts = Accounts(["a", "b"])
    for _ in range(4):
        accounts.start("a")
    accounts.end("a", True)
    accounts.end("a", False)
    accounts.cancel("a", "stale", running=2, finished=1, failed=1)
    row = accounts.report()
    assert (
        row["dispatcher/started/train"]
        == row["dispatcher/cancelled/a"]
        == row["dispatcher/cancelled/reason/stale"]
        == 4
    )
    assert row["dispatcher/finished/train"] == row["dispatcher/errored/a"] == row["dispatcher/inflight/train"] == 0
    assert row["dispatcher/cancelled/b"] == 0 and accounts.report()["dispatcher/started/train"] == 0


def test_burst_gives_back_what_finished(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("rlmake.orchestrator.pacing.time.monotonic", lambda: now[0])
    burst = Burst(2)
    burst.start()
    now[0] += 1
    burst.start()
    assert burst.wait() == 4.0
    burst.finish()
    assert burst.wait() == 0.0
    burst.start()
    assert burst.wait() == 4.0


def test_a_gate_that_was_closed_for_a_moment_leaves_no_gap(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("rlmake.orchestrator.pacing.time.monotonic", lambda: now[0])
    burst = Burst(2)
    now[0] += 60
    for _ in range(10):
        burst.finish()
    now[0] += 4
    for _ in range(12):  # the places of the ten, and a burst
        assert burst.wait() == 0.0
        burst.start()
    assert burst.wait() == 5.0
    for _ in range(10):
        burst.finish()
    now[0] += 5
    burst.start()
    burst.start()
    assert burst.wait() == 5.0, "places that were free for long are not kept"


async def test_tasks_per_minute():
    rate = TaskRate(1200)
    began = time.monotonic()
    for _ in range(11):  # the first at once, then 20 a second
        await rate.take()
    assert time.monotonic() - began >= 0.4
    began = time.monotonic()
    for _ in range(1000):
        await TaskRate(None).take()
    assert time.monotonic() - began < 1
