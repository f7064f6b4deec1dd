"""The controller of the episodes in flight, poll by poll, and what it reads from an engine's /metrics."""

import asyncio
import math

import httpx
import pytest

from rlmake.core.errors import UserError
from rlmake.inference import metrics
from rlmake.inference.concurrency import CLEAR, GRACE_POLLS, HARD, SOFT, Controller, require, steer
from rlmake.inference.engines.base import Stats
from rlmake.inference.load import Load, LoadReader, Unreadable, parse


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def load(usage=0.1, running=10, waiting=0, preemptions=0, capacity=None, role=""):
    return Load(usage, running, waiting, preemptions, capacity, role)


def turn_over(controller, inflight=None, generated=True):
    """As many episodes end as are in flight, each replaced at once: all permits are in use, or `inflight` of them."""
    for _ in range(inflight or controller.max_inflight):
        controller.completed(inflight or controller.max_inflight, generated)


def test_it_starts_with_what_the_caches_hold():
    controller = Controller(1, 1024, None, episode_tokens=2048)
    assert controller.max_inflight == 1
    controller.poll([load(capacity=65536), load(capacity=32768), load(capacity=9999999, role="prefill")], 0)
    assert controller.max_inflight == 48
    controller.poll([load(capacity=9999999)], 0)
    assert controller.max_inflight == 48, "once"
    given = Controller(1, 1024, 100)
    given.poll([load(capacity=1 << 30)], 0)
    assert given.max_inflight == 100, "the user's number stands"
    assert Controller(1, 16, None, 1).poll([load(capacity=1 << 20)], 0) == 0


def test_it_grows_by_a_fifth_a_turnover_and_less_the_fuller_the_caches():
    clock = Clock()
    controller = Controller(1, 1000, 100, now=clock)
    turn_over(controller)
    assert controller.max_inflight == 100, "nothing was read yet: no room is known"
    controller.poll([load(usage=0.0)], 100)
    turn_over(controller)
    assert controller.metrics()["concurrency/capacity"] == pytest.approx(120, rel=0.02)
    controller.poll([load(usage=0.4)], 120)
    turn_over(controller)
    assert controller.metrics()["concurrency/capacity"] == pytest.approx(120 * 1.1, rel=0.02)
    clock.now += 15.1
    before = controller.cap
    turn_over(controller)
    assert controller.cap == before, "a reading of long ago authorises nothing"
    assert controller.turnover == pytest.approx(4, rel=0.2)


def test_small_numbers_grow_too_and_unused_room_does_not():
    controller = Controller(1, 100, 4)
    controller.poll([load()], 4)
    turn_over(controller, 3)
    assert controller.cap == 4.0, "3 of 4 permits in use: more would not be used either"
    for _ in range(4):
        turn_over(controller)
    assert controller.max_inflight > 4
    fixed = controller.cap
    turn_over(controller, generated=False)
    assert controller.cap == fixed, "episodes that failed at once say nothing about room"


@pytest.mark.parametrize(
    ("samples", "signals"),
    [
        ([load(usage=0.61)], [SOFT]),
        ([load(waiting=1), load(waiting=1)], [CLEAR, SOFT]),
        ([load(waiting=1), load(), load(waiting=1)], [CLEAR] * 3),
        ([load(preemptions=1)], [HARD]),
        ([load(waiting=6)] * 6, [CLEAR, *[SOFT] * 4, HARD]),
        ([load(waiting=5)] * 8, [CLEAR, *[SOFT] * 7]),
    ],
)
def test_signals(samples, signals):
    controller = Controller(1, 100, 20)
    seen = []
    for one in samples:
        controller.poll([one], 20)
        seen.append(controller.signal)
    assert seen == signals


def test_anything_queued_forbids_growth():
    controller = Controller(1, 100, 20)
    controller.poll([load(waiting=1)], 20)
    turn_over(controller)
    assert controller.cap == 20


def test_a_cut_does_not_cascade():
    """The engines work off a backlog for a while after a cut, and preempt meanwhile: that is the same overload."""
    controller = Controller(1, 2000, 1000)
    assert controller.poll([load(preemptions=3)], 1000) == 200
    assert controller.max_inflight == 800
    for _ in range(5):
        assert controller.poll([load(preemptions=3)], 800) == 0
    assert controller.max_inflight == 800
    controller.poll([load()], 800)  # settled: the grace begins
    assert controller.poll([load(preemptions=1)], 800) == 400, "again within the grace: by half"
    assert controller.max_inflight == 400
    for _ in range(1 + GRACE_POLLS):
        controller.poll([load()], 400)
    assert controller.poll([load(preemptions=1)], 400) == 80, "long after: by a fifth again"
    assert controller.max_inflight == 320


def test_a_lasting_queue_cuts_a_tenth():
    controller = Controller(1, 2000, 100)
    assert [controller.poll([load(running=50, waiting=40)], 100) for _ in range(6)] == [0, 0, 0, 0, 0, 10]
    assert controller.max_inflight == 90


def test_full_caches_trim_and_only_very_full_ones_cancel():
    controller = Controller(1, 2000, 100)
    assert controller.poll([load(usage=0.85)], 100) == 0
    assert controller.max_inflight == math.floor(100 * 0.7 / 0.85)
    for _ in range(5):
        assert controller.poll([load(usage=0.99)], 100) == 0, "the last trim has not worked yet"
    assert controller.poll([load(usage=0.95)], 82) == 82 - math.floor(82 * 0.7 / 0.95)


def test_bounds_hold_and_equal_ones_pin():
    controller = Controller(10, 12, 12)
    controller.poll([load(preemptions=1)], 12)
    assert controller.max_inflight == 10
    pinned = Controller(64, 64)
    assert pinned.pinned and pinned.max_inflight == 64
    assert pinned.poll([load(usage=1.0, preemptions=9)], 64) == 0 and pinned.max_inflight == 64
    turn_over(pinned)
    assert pinned.max_inflight == 64 and pinned.metrics()["concurrency/signal"] == 0


VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m, \\"x\\""} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
vllm:num_preemptions_total{engine="0",model_name="m"} %d
vllm:generation_tokens_total{engine="0",model_name="m"} %d
vllm:cache_config_info{block_size="16",num_gpu_blocks="100",engine="0"} 1.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="None",engine="1"} 1.0
vllm:time_to_first_token_seconds_bucket{le="0.1",engine="0"} %d
vllm:time_to_first_token_seconds_bucket{le="0.3",engine="0"} %d
vllm:time_to_first_token_seconds_bucket{le="+Inf",engine="0"} %d
vllm:time_to_first_token_seconds_sum{engine="0"} %f
broken line
python_gc_objects_collected_total{generation="0"} NaN
"""


def client_of(pages):
    """An engine that answers with these pages in turn, the last one again and again; None: an error."""
    left = list(pages)

    def answer(request):
        page = left.pop(0) if len(left) > 1 else left[0]
        return httpx.Response(404) if page is None else httpx.Response(200, text=page)

    return httpx.AsyncClient(base_url="http://engine", transport=httpx.MockTransport(answer))


async def test_vllms_page_is_read():
    pages = [VLLM % (5, 100, 2, 4, 4, 1.0), VLLM % (7, 400, 2, 12, 14, 3.0), VLLM % (0, 10, 2, 12, 14, 3.0)]
    reader = LoadReader([client_of(pages)])
    (first,) = await reader.read()
    assert first == Load(0.375, 7, 2, 0, 1600, "")
    await asyncio.sleep(0.05)
    (second,) = await reader.read()
    assert second.preemptions == 2
    row = reader.report()
    assert row["inference/agg/num_requests_running/max"] == 7 and row["inference/agg/kv_cache_usage/mean"] == 0.375
    assert 0 < row["inference/agg/generation_tokens/rate"] <= 300 / 0.05
    # ten requests since the first reading: eight between 0.1 and 0.3 s, two later; 2.0 s in all
    assert row["inference/agg/time_to_first_token/mean"] == pytest.approx(0.2)
    assert row["inference/agg/time_to_first_token/p50"] == pytest.approx(0.1 + 0.2 * 5 / 8)
    assert row["inference/agg/time_to_first_token/p99"] == pytest.approx(0.3)
    (third,) = await reader.read()
    assert third.preemptions == 0, "the engine was restarted"


async def test_what_the_metrics_of_a_step_saw_is_not_hidden_from_the_controller():
    reader = LoadReader([client_of([VLLM % (count, 0, 0, 0, 0, 0.0) for count in (5, 8, 9, 9)])])
    await reader.read()
    await reader.look()
    assert [(await reader.read())[0].preemptions for _ in range(2)] == [4, 0]
    reader.report()


async def test_our_engines_page_is_read_and_engines_are_told_apart():
    stats = Stats(3, 1, 0.5, 4096, 2, 10, 20, {"stop": 4, "length": 1}, 7, False)
    page = metrics.render(stats, 'a "model"')
    assert parse(page)["rlmake:policy_version"][0][1] == 7
    reader = LoadReader([client_of([page]), client_of([page])], roles=["prefill"])
    loads = await reader.read()
    assert [one.role for one in loads] == ["prefill", ""] and loads[0].capacity == 4096
    row = reader.report()
    assert row["inference/agg/num_requests_waiting/mean"] == row["inference/engine_1/num_requests_waiting/mean"] == 1


async def test_an_engine_without_metrics_is_said_in_one_line():
    with pytest.raises(UserError, match=r"concurrency: .* /metrics.*pin the number with concurrency.min_inflight"):
        await require(LoadReader([client_of([None])]), "concurrency")
    with pytest.raises(Unreadable, match="has no vllm:num_requests_running"):
        await LoadReader([client_of(["up 1\n"])]).read()


async def test_steering_survives_an_engine_that_stops_answering(monkeypatch):
    monkeypatch.setattr("rlmake.inference.concurrency.POLL_SECONDS", 0.01)
    busy = "vllm:num_requests_running 4\nvllm:num_preemptions_total %d\n"
    reader, cuts = LoadReader([client_of([busy % 0, None, None, busy % 3])]), []
    controller = Controller(1, 100, 50)

    async def cut(excess):
        cuts.append(excess)

    task = asyncio.create_task(steer(controller, reader, lambda: 50, cut))
    while not cuts:
        await asyncio.sleep(0.01)
    task.cancel()
    assert cuts == [10] and controller.max_inflight == 40
