"""The runner: fixed order and seeds, bounded concurrency, deadlines, failures, stopping half-way."""

import asyncio
import math
from types import SimpleNamespace

import pytest

from rlmake.config.sampling import EvalSamplingConfig
from rlmake.core.errors import UserError
from rlmake.core.seeds import derive
from rlmake.evals.runner import evaluate, wire_sampling

RUN = {"sampling": {"temperature": 0.5}, "seed": 3}


def reward_of(make):
    return lambda task, seed: make.episode([make.trace(seed % 1000 / 1000, str(seed))], task.data["prompt"])


async def test_every_task_and_sample_once_with_its_own_seed(make):
    env = make.env(5, reward_of(make))
    result = await evaluate(env, None, "m", group_size=3, max_inflight=4, **RUN)
    assert [(r.task, r.sample) for r in result.records] == [(t, s) for t in range(5) for s in range(3)]
    assert result.planned == 15 and not result.partial and env.most == 4
    for record in result.records:
        assert record.seed == derive(3, "eval", "rev", f"k{record.task}", record.sample)
        assert record.reply == str(record.seed) and record.error is None
    assert all(sampling == {"temperature": 0.5, "seed": sampling["seed"]} for _, sampling in env.calls)
    assert [index for index, _ in env.calls[:4]] == [0, 0, 0, 1]


async def test_the_result_does_not_depend_on_the_concurrency(make):
    async def slow(task, seed):
        await asyncio.sleep(seed % 7 / 1000)
        return make.episode([make.trace(seed % 1000 / 1000)], task.data["prompt"])

    one, many = [
        (await evaluate(make.env(6, slow), None, "m", group_size=2, max_inflight=n, **RUN)).records for n in (1, 12)
    ]
    assert one == many


async def test_a_hung_episode_is_scored_as_timed_out_and_the_rest_is_there(make):
    async def script(task, seed):
        if task.index == 2:
            await asyncio.sleep(60)
        return make.episode([make.trace(1.0)])

    result = await evaluate(make.env(6, script), None, "m", group_size=1, deadline=0.1, max_inflight=2, **RUN)
    assert len(result.records) == 6 and not result.partial and result.seconds < 5
    hung = result.records[2]
    assert (hung.timeout, hung.reward, hung.error) == (True, 0.0, "EpisodeTimeout: no result within 0 s")
    assert [record.reward for record in result.records if record.task != 2] == [1.0] * 5


async def test_failures_count_with_the_reward_they_have(make):
    error = SimpleNamespace(type="ProviderError", message="gone")

    def script(task, seed):
        return [
            make.episode([make.trace(0.25, errors=[error])], ok=False),
            make.episode([], ok=False, errors=[error]),
            make.episode([make.trace(math.nan)]),
            make.episode([make.trace(0.0, stop_condition="setup_timeout", is_timeout=True)], ok=False),
        ][task.index]

    records = (await evaluate(make.env(4, script), None, "m", group_size=1, **RUN)).records
    assert [record.reward for record in records] == [0.25, 0.0, 0.0, 0.0]
    assert [record.error for record in records] == [
        "ProviderError: gone", "ProviderError: gone", "RewardError: the reward is nan", "Stopped: setup_timeout",
    ]  # fmt: skip
    assert [record.timeout for record in records] == [False, False, False, True]


async def test_several_agents_count_by_those_that_train(make):
    judge = make.trace(0.0, agent=SimpleNamespace(trainable=False))
    players = [make.trace(1.0, "a"), make.trace(0.5, "b")]
    env = make.env(1, lambda task, seed: make.episode([judge, *players]))
    (record,) = (await evaluate(env, None, "m", group_size=1, **RUN)).records
    assert (record.reward, record.reply, record.rewards) == (0.75, "a", {"similarity": 0.75})


async def test_stopping_returns_what_there_is(make):
    stop, seen = asyncio.Event(), []

    def note(record):
        seen.append(record)
        if len(seen) == 5:
            stop.set()

    env = make.env(50, reward_of(make))
    result = await evaluate(env, None, "m", group_size=1, max_inflight=2, stop=stop, on_episode=note, **RUN)
    assert result.partial and result.planned == 50 and 5 <= len(result.records) <= 7
    assert result.records == sorted(seen, key=lambda record: record.task) and env.running == 0


async def test_a_fault_of_ours_is_raised_and_leaves_nothing_running(make):
    def bad(record):
        raise RuntimeError("bug")

    env = make.env(50, reward_of(make))
    with pytest.raises(RuntimeError, match="bug"):
        await evaluate(env, None, "m", group_size=1, max_inflight=8, on_episode=bad, **RUN)
    assert env.running == 0


async def test_endless_tasks_need_a_limit(make):
    with pytest.raises(UserError, match=r"select\.limit"):
        await evaluate(make.env(None, None), None, "m", group_size=1, **RUN)


def test_sampling_on_the_wire():
    config = EvalSamplingConfig(temperature=0.0, max_completion_tokens=8, extra_body={"top_k": 5})
    assert wire_sampling(config) == {"temperature": 0.0, "max_completion_tokens": 8, "top_k": 5}
