"""Adaptive concurrency in a run: engines that are full get fewer episodes, and nothing is lost or counted twice."""

import asyncio

from loguru import logger

from rlmake.orchestrator.health import advise


async def test_overload_cancels_the_youngest_groups_and_starts_them_again(make_run, monkeypatch, slow_engine):
    class Full(slow_engine):
        async def metrics(self, request):
            self.preempted += max(0, self.running - 2)
            return await super().metrics(request)

    monkeypatch.setattr("rlmake.inference.concurrency.POLL_SECONDS", 0.05)
    run = make_run(deterministic=False, max_steps=10, concurrency={"max_inflight": 32, "initial_inflight": 32})
    async with run.attempt(engine=Full(delay=0.1)) as (task, trainer, _, orchestrator):
        await asyncio.wait_for(task, 120)
        accounts = orchestrator.accounts
    rows = [row for row in run.rows() if row["producer"] == "orch"]
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert min(row["concurrency/max_inflight"] for row in rows) < 32
    overload = sum(row["dispatcher/cancelled/reason/overload"] for row in rows)
    assert overload > 0
    started = sum(row["dispatcher/started/train"] for row in rows) + accounts.started.total()
    ended = sum(row[f"dispatcher/{how}/train"] for row in rows for how in ("finished", "errored", "cancelled"))
    ended += accounts.finished.total() + accounts.failed.total() + accounts.cancelled.total()
    assert started == ended and accounts.total == 0
    ids = [name for step in sorted(trainer.batches) for name in trainer.batches[step][0].sample_ids]
    assert len(ids) == len(set(ids))
    assert all(row["inference/agg/num_requests_running/max"] >= 0 for row in rows)


async def test_an_engine_without_metrics_is_refused_unless_the_number_is_pinned(make_run, slow_engine):
    class Mute(slow_engine):
        async def metrics(self, _):
            from aiohttp import web

            return web.Response(status=404)

    run = make_run(deterministic=False, max_steps=1)
    async with run.attempt(engine=Mute()) as (task, *_):
        await asyncio.wait({task}, timeout=30)
        assert "orchestrator.concurrency" in str(task.exception()) and "min_inflight" in str(task.exception())
    pinned = make_run(deterministic=False, max_steps=1, concurrency={"min_inflight": 16, "max_inflight": 16})
    await pinned.finish(engine=Mute())
    (row,) = [row for row in pinned.rows() if row["producer"] == "orch"]
    assert row["concurrency/max_inflight"] == 16 and not any(key.startswith("inference/") for key in row)


def test_small_batches_and_groups_are_told(make_run):
    said = []
    sink = logger.add(lambda message: said.append(message.record["message"]), level="WARNING")
    advise(make_run().config)
    advise(make_run(batch_size=64, train={"group_size": 8}).config)
    logger.remove(sink)
    assert len(said) == 2 and "batch_size = 12 is small" in said[0] and "group_size = 4 is small" in said[1]
