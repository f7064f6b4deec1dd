"""The orchestrator's parts one by one: staleness, samples, sources, samplers, gates, engines, background tasks."""

import asyncio
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import verifiers.v1 as vf
from aiohttp import web
from blake3 import blake3

from rlmake.algorithms.traces import set_advantages, set_weights, trainable_nodes
from rlmake.config.curriculum import AdvantageRange as AdvantageRangeConfig
from rlmake.config.curriculum import DifficultyPoolSampler
from rlmake.config.shared import ClientConfig
from rlmake.config.sources import TrainSource
from rlmake.core.errors import RunFailed, UserError
from rlmake.core.jsonio import read_json
from rlmake.core.rundir import RunContext
from rlmake.envs import compact
from rlmake.orchestrator import samples
from rlmake.orchestrator.background import run_with
from rlmake.orchestrator.curriculum import AdvantageRange, DifficultyPool, Standard
from rlmake.orchestrator.engines import Engines, await_answer
from rlmake.orchestrator.metrics import off_policy, stats
from rlmake.orchestrator.queue import Queue
from rlmake.orchestrator.records import Unit
from rlmake.orchestrator.samples import prune, samples_of, trains
from rlmake.orchestrator.sources import Sources
from rlmake.orchestrator.watcher import Watcher
from rlmake.transport import TrainingSample, WeightReceiver, WeightSender, broadcast


def sample(advantages, name="s", **streams):
    n = len(advantages) + 1
    return TrainingSample(
        name, "env", np.arange(n, dtype=np.int32), np.arange(n) > 0, np.zeros(n, np.float32), np.ones(n, np.float32),
        advantages=np.array([0, *advantages], np.float32), **streams,
    )  # fmt: skip


def unit(start, end=None, frozen=False, tokens=3):
    return Unit([sample([0.5] * (tokens - 1))], "env", "agent", start, start, start if end is None else end, frozen, {})


def test_staleness_bound():
    """R10: the batch trains on version 12, so it is step 13."""
    queue = Queue(4, None, 8)
    queue.extend([unit(12), unit(5), unit(4), unit(3, end=5), unit(3, end=3), unit(0, frozen=True)])
    assert queue.sweep(13) == 2 and queue.dropped == 2
    assert [u.start for u in queue.units] == [12, 5, 4, 0]
    strict = Queue(1, None, 0)
    strict.extend([unit(12), unit(11)])
    strict.sweep(13)
    assert [u.start for u in strict.units] == [12]


def test_off_policy_metrics_split_flight_and_queue():
    row = off_policy([unit(12), unit(4, end=6), unit(10, end=20), unit(0, frozen=True)], 13)
    assert row["off_policy/mean"] == pytest.approx((0 + 8 + 2) / 3) and row["off_policy/max"] == 8
    assert (row["off_policy/in_flight/max"], row["off_policy/in_queue/max"]) == (2, 6)
    assert off_policy([], 1)["off_policy/max"] == 0


def test_queue_is_first_in_first_out_and_counts_tokens():
    queue = Queue(None, 7, 8)
    queue.extend([unit(0, tokens=3), unit(1, tokens=3)])
    assert queue.missing() == 1
    queue.extend([unit(2, tokens=3), unit(3, tokens=3)])
    assert queue.missing() == 0 and [u.start for u in queue.take()] == [0, 1, 2] and len(queue) == 1


def test_a_group_over_two_batches_keeps_its_credit():
    """Advantages are those of the whole group, also where a batch ends in its middle."""
    queue, credit = Queue(3, None, 8), (0.75, -0.25, -0.25, -0.25)
    for _ in range(3):
        queue.extend([Unit([sample([a, a])], "env", "agent", 0, 0, 0, False, {}) for a in credit])
    batches = [queue.take() for _ in range(4)]
    taken = [unit.samples[0].advantages[1] for batch in batches for unit in batch]
    assert [len(batch) for batch in batches] == [3] * 4 and taken == [*credit] * 3


def test_prune_removes_silent_tokens_only():
    left = prune(sample([0.5, 0.0, -0.25]))
    assert left.rl_weights.tolist() == [0, 1, 0, 1]
    assert prune(sample([0.0, 0.0])) is None and prune(sample([0.5])).rl_weights is None
    weighted = sample([0.0, 0.5], rl_weights=np.array([0, 0.25, 0.25], np.float32))
    assert prune(weighted).rl_weights.tolist() == [0, 0, 0.25] and weighted.rl_weights.tolist() == [0, 0.25, 0.25]
    kept = prune(sample([0.0, 0.0], ce_weights=np.array([0, 0.1, 0], np.float32)))
    assert kept is not None and kept.rl_weights.tolist() == [0, 0, 0]
    without = sample([0.0])
    without.advantages = None
    assert prune(without) is without


def branching_trace():
    """user(2) → assistant(2 of 3) → two branches: tool(2) → assistant(2), and user(1) → assistant(1)."""

    def node(parent, role, ids, mask, logprobs=()):
        message = {"role": role, "content": "x"} | ({"tool_call_id": "t"} if role == "tool" else {})
        return {
            "parent": parent, "message": message, "sampled": any(mask), "token_ids": ids, "mask": mask,
            "logprobs": list(logprobs),
        }  # fmt: skip

    nodes = [
        node(None, "user", [1, 2], [False, False]),
        node(0, "assistant", [3, 4, 5], [False, True, True], [-0.1, -0.2]),
        node(1, "tool", [6, 7], [False, False]),
        node(2, "assistant", [8, 9], [True, True], [-0.3, -0.4]),
        node(1, "user", [10], [False]),
        node(4, "assistant", [11], [True], [-0.5]),
    ]
    task = {"type": "T", "data": {"idx": 0, "prompt": "p"}}
    agent = {"config": {}, "name": "agent"}
    return vf.WireTrace.model_validate({"task": task, "agent": agent, "nodes": nodes, "ok": True})


def test_shared_nodes_train_once():
    trace = branching_trace()
    set_advantages(trace, [1, 2, 3, 4, 5])
    set_weights(trace.nodes[1], "ce", [0, 0.5, 0.5])
    first, second = samples_of(trace, "env/0/0", "env", 0.7, 64)
    assert first.sample_id == "env/0/0#0" and second.sample_id == "env/0/0#1"
    assert first.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert first.mask.tolist() == [False] * 3 + [True] * 2 + [False] * 2 + [True] * 2
    assert first.advantages.tolist() == [0, 0, 0, 1, 2, 0, 0, 3, 4]
    assert second.token_ids.tolist() == [1, 2, 3, 4, 5, 10, 11]
    assert second.mask.tolist() == [False] * 6 + [True] and second.advantages.tolist() == [0] * 6 + [5]
    assert first.ce_weights.sum() == 1 and second.ce_weights.sum() == 0
    assert first.logprobs.dtype == np.float32 and first.logprobs[3] == np.float32(-0.1)
    assert second.temperatures.tolist() == pytest.approx([0.7] * 7)


def test_streams_are_those_of_verifiers_own_branches():
    trace = branching_trace()
    set_advantages(trace, [0.3, 0.0, -0.7, 2.5, 5])
    for sample, branch in zip(samples_of(trace, "n", "env", 1.0, 64), trace.branches, strict=True):
        assert sample.token_ids.tolist() == branch.token_ids
        assert sample.logprobs.tolist() == np.asarray(branch.logprobs, np.float32).tolist()
        expected = np.where(sample.mask, np.asarray(branch.advantages, np.float32), 0)
        assert sample.advantages.tolist() == expected.tolist()


def test_nodes_of_a_chain_and_of_a_tree_are_those_of_their_branches():
    tree = branching_trace()
    expected = list({id(node): node for branch in tree.branches for node in branch.nodes}.values())
    assert list(map(id, trainable_nodes(tree))) == list(map(id, expected))
    chain = tree.model_copy(update={"nodes": tree.nodes[:2]})
    assert list(map(id, trainable_nodes(chain))) == list(map(id, chain.branches[0].nodes))
    dropped = {"node": 0, "type": "compaction_attempt"}
    left = vf.MessageNode.model_validate(chain.nodes[1].model_dump() | {"semantic_parents": [dropped]})
    chain.nodes[1] = left
    assert trainable_nodes(chain) == [], "an attempt that the harness did not go on from trains nothing"


def test_truncation_keeps_what_still_trains():
    trace = branching_trace()
    set_advantages(trace, 1.0)
    first, second = samples_of(trace, "n", "env", 1.0, 7)
    assert len(first) == 7 and first.mask.sum() == 2 and second.mask.sum() == 1
    (only,) = samples_of(trace, "n", "env", 1.0, 4)
    assert len(only) == 4 and only.mask.tolist() == [False] * 3 + [True]
    assert samples_of(trace, "n", "env", 1.0, 3) == []


def test_a_first_token_never_trains():
    trace = branching_trace()
    trace.nodes = trace.nodes[1:2]
    trace.nodes[0].parent, trace.nodes[0].mask = None, [True, True, True]
    trace.nodes[0].logprobs = [-1.0, -1.0, -1.0]
    set_advantages(trace, 1.0)
    (only,) = samples_of(trace, "n", "env", 1.0, 8)
    assert only.mask.tolist() == [False, True, True] and trains(only)


def make_sources(tasks=(12, 5), seed=0, **curriculum):
    configs = [
        TrainSource(
            name=name, env={"taskset": {"id": name}}, ratio=ratio, group_size=2, algo={"type": "grpo"},
            curriculum=curriculum,
        )
        for name, ratio in (("a", 3), ("b", 1))
    ]  # fmt: skip
    return Sources(configs, dict(zip("ab", tasks, strict=True)), seed)


def drawn(sources, number):
    return [(g.index, g.env, g.draw, g.task) for g in (sources.draw(1, 0) for _ in range(number))]


def test_sources_follow_ratios_and_continue():
    """C08: the sequence of tasks and the mix are the uninterrupted run's."""
    straight = drawn(make_sources(), 400)
    counts = [sum(env == name for _, env, _, _ in straight) for name in "ab"]
    assert 270 < counts[0] < 330
    assert [task for _, env, _, task in straight if env == "b"][:7] == [0, 1, 2, 3, 4, 0, 1]
    first, second = make_sources(), make_sources()
    head = drawn(first, 37)
    second.load_state_dict(first.state_dict())
    assert head + drawn(second, 363) == straight
    assert drawn(make_sources(seed=1), 400) != straight


def test_another_data_set_starts_at_its_first_task():
    first, second = make_sources(), make_sources(tasks=(9, 5))
    drawn(first, 10)
    second.load_state_dict(first.state_dict())
    draws = drawn(second, 40)
    assert next(task for _, env, _, task in draws if env == "a") == 0
    continued = first.state_dict()["sources"]["b"]["sampler"]["cursor"] % 5
    assert next(task for _, env, _, task in draws if env == "b") == continued
    assert len({(env, draw) for _, env, draw, _ in drawn(first, 0) + draws}) == 40


def test_an_endless_taskset_resumes_without_a_replay():
    sampler = Standard(None)
    sampler.load_state_dict({"cursor": 5000})
    assert [sampler.next(i) for i in range(3)] == [5000, 5001, 5002]


def test_difficulty_pools():
    sampler = DifficultyPool(4, DifficultyPoolSampler(unseen_weight=0.0), "env")
    for task, reward in enumerate((0.25, 0.5, 1.0, 7.0)):
        sampler.observe(task, [reward])
    counts = np.bincount([sampler.next(draw) for draw in range(4000)], minlength=4) / 4000
    np.testing.assert_allclose(counts, np.array([0.2, 1.0, 0.2, 0.2]) / 1.6, atol=0.03)
    again = DifficultyPool(4, DifficultyPoolSampler(unseen_weight=0.0), "env")
    again.load_state_dict(sampler.state_dict())
    assert [again.next(i) for i in range(50)] == [sampler.next(i) for i in range(50)]
    with pytest.raises(UserError, match="weight 0 or not tried yet, with unseen_weight = 0: there is none"):
        DifficultyPool(4, DifficultyPoolSampler(unseen_weight=0.0), "env").next(0)
    with pytest.raises(UserError, match="needs a taskset that ends"):
        DifficultyPool(None, DifficultyPoolSampler(), "env")


def test_gate():
    def episode(advantage):
        trace = branching_trace()
        if advantage is not None:
            set_advantages(trace, advantage)
        task = {"type": "T", "data": {"idx": 0, "prompt": "p"}}
        return vf.WireEpisode.model_validate({"task": task, "ok": True, "traces": [trace]})

    gate = AdvantageRange(AdvantageRangeConfig())
    assert not gate.admits([episode(0.0), episode(0.0)]) and gate.admits([episode(0.0), episode(0.1)])
    assert gate.admits([episode(None)])
    assert not AdvantageRange(AdvantageRangeConfig(reject_min=-1, reject_max=1)).admits([episode(-1.0), episode(1.0)])


def test_stats():
    row = stats("x", [1.0, 2.0, 3.0, 4.0, 10.0])
    assert row == {"x/mean": 4.0, "x/max": 10.0, "x/min": 1.0, "x/p10": 1.4, "x/p90": pytest.approx(7.6)}
    assert stats("x", []) == {} and not math.isnan(stats("x", [0.0])["x/p10"])


async def test_background_failure_ends_the_main_loop_with_its_own_error():
    ended = []

    async def forever():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("main")

    async def failing():
        await asyncio.sleep(0)
        raise UserError("the reason")

    async def quiet():
        return None

    with pytest.raises(UserError, match="the reason"):
        await run_with(forever(), [quiet(), failing()])
    assert ended == ["main"]

    async def grouped():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(failing())

    with pytest.raises(UserError, match="the reason"):
        await run_with(grouped(), [forever()])


@pytest.fixture
async def admin(monkeypatch):
    """An engine that answers with the scripted status codes in turn."""
    codes, calls = [], []

    async def update(request):
        calls.append(await request.json())
        status = codes.pop(0) if codes else 200
        said = {"message": "model.safetensors: missing"} if status == 400 else "out of luck"
        return web.json_response({"error": said}, status=status)

    app = web.Application()
    app.router.add_post("/update_weights", update)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"

    async def no_sleep(_):
        return None

    monkeypatch.setattr("rlmake.orchestrator.engines.asyncio", SimpleNamespace(sleep=no_sleep, gather=asyncio.gather))
    yield url, codes, calls
    await runner.cleanup()


async def test_the_server_of_a_frozen_model_is_waited_for(unused_tcp_port):
    """Whatever it answers: what it serves is for the first request to find out."""
    url = f"http://127.0.0.1:{unused_tcp_port}/v1"
    with pytest.raises(RunFailed, match=rf"teacher\.base_url: no server answers at {url}"):
        await await_answer("teacher.base_url", url, 0.0)
    waiting = asyncio.create_task(await_answer("teacher.base_url", url, 600.0))
    runner = web.AppRunner(web.Application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", unused_tcp_port).start()
    await asyncio.wait_for(waiting, 30)
    await runner.cleanup()


async def test_engine_calls_are_repeated_while_that_can_help(admin, tmp_path):
    url, codes, calls = admin
    engines = Engines(ClientConfig(base_url=url), "m", RunContext(tmp_path, "r", "r", 1, None, tmp_path, tmp_path))
    codes += [503, 502]
    await engines.update_weights(tmp_path, 3)
    assert calls == [{"weight_dir": str(tmp_path), "version": 3}] * 3
    codes.append(422)
    with pytest.raises(RunFailed, match=r"/update_weights failed: .*out of luck"):
        await engines.update_weights(tmp_path, 4)
    assert len(calls) == 4
    codes.append(400)
    with pytest.raises(RunFailed, match=r"/update_weights failed: model\.safetensors: missing$"):
        await engines.update_weights(tmp_path, 4)
    engines.check_files = True  # by a server of ours, of which a checksum is demanded
    with pytest.raises(UserError, match=r"version\.json: no such file"):
        await engines.update_weights(tmp_path, 4)
    WeightSender(tmp_path, engines.ctx).offer(4)
    await engines.update_weights(tmp_path / "broadcasts/step_4", 4)
    assert calls[-1]["checksum"] == read_json(tmp_path / "broadcasts/step_4/version.json")["checksum"]
    assert len(calls) == 6
    await engines.close()
    with pytest.raises(UserError, match="base_url is missing"):
        Engines(ClientConfig.model_construct(base_url=None), "m", engines.ctx)


@pytest.mark.parametrize("ours", [True, False])
async def test_damaged_files_reach_an_engine_only_where_it_hashes_them_itself(ours, tmp_path, slow_engine):
    class Engine(slow_engine):
        async def models(self, _):
            card = {"id": "toy", "owned_by": "rlmake" if ours else "vllm"}
            return web.json_response({"data": [card], "run_id": "run"})

    def write(folder):
        (folder / "model.safetensors").write_bytes(b"weightz")
        return {"model.safetensors": blake3(b"weights").hexdigest()}

    async def nothing(version):
        pass

    engine, ctx = Engine(), RunContext(tmp_path, "run", "run", 1, None, tmp_path, tmp_path)
    await engine.start()
    engines = Engines(ClientConfig(base_url=engine.url), "toy", ctx)
    await engines.wait_ready()
    watcher = Watcher(WeightReceiver(tmp_path, ctx), engines, 20, -1, nothing, nothing)
    sent = asyncio.to_thread(broadcast, WeightSender(tmp_path, ctx), 0, write, lambda action: action(), timeout=20)
    try:
        if ours:
            await asyncio.gather(sent, watcher.next())
            assert engine.loaded == [0] and watcher.version == 0
        else:
            _, failure = await asyncio.gather(sent, watcher.next(), return_exceptions=True)
            assert "model.safetensors: missing or damaged, weights v0 cannot be served" in str(failure)
            assert engine.loaded == [] and watcher.version == -1
    finally:
        await engines.close()
        await engine.runner.cleanup()


async def test_an_engine_with_another_nccl_asks_for_the_same_version_by_files(tmp_path, slow_engine, warnings):
    def write(folder):
        (folder / "model.safetensors").write_bytes(b"weights")
        return {"model.safetensors": blake3(b"weights").hexdigest()}

    def send():
        meeting = {"session": "x", "backend": "nccl", "nccl": "2.29.7"}
        sender.offer(0, "nccl", group={"rendezvous": meeting, "plan": [], "dtype": "float32", "digests": None})
        said = sender.wait_receiver(60)
        broadcast(sender, 0, write, lambda action: action(), timeout=60)
        return said["refused"]

    async def nothing(version):
        pass

    engine, ctx = slow_engine(), RunContext(tmp_path, "run", "run", 1, None, tmp_path, tmp_path)
    sender = WeightSender(tmp_path, ctx)
    await engine.start()
    engines = Engines(ClientConfig(base_url=engine.url), "toy", ctx)
    await engines.wait_ready()
    watcher = Watcher(WeightReceiver(tmp_path, ctx), engines, 60, -1, nothing, nothing)
    try:
        refused, version = await asyncio.gather(asyncio.to_thread(send), watcher.next())
    finally:
        await engines.close()
        await engine.runner.cleanup()
    assert refused.endswith("has NCCL 2.28.9, the trainer 2.29.7") and refused.startswith("worker 0 of ")
    assert version == 0 and engine.loaded == [0] and any("asked for by files" in line for line in warnings)


async def test_waiting_for_weights_leaves_out_the_evaluations_within_it(monkeypatch):
    """Also one that began before; and nothing of an evaluation that ran while nobody waited."""
    clock, go = [1.0], asyncio.Event()
    monkeypatch.setattr("rlmake.orchestrator.watcher.time", SimpleNamespace(monotonic=lambda: clock[0]))

    class Receiving(Watcher):
        async def _by_files(self, version, record):
            clock[0] += 2
            return clock[0]

    async def nothing(version):
        pass

    async def evaluate(version):
        clock[0] += 10
        await go.wait()
        clock[0] += 100

    receiver = SimpleNamespace(poll=lambda version: version + 1, record=lambda version: {"transport": "filesystem"})
    watcher = Receiving(receiver, None, 1.0, -1, nothing, evaluate)
    first = asyncio.create_task(watcher.next())
    while watcher.version < 0:
        await asyncio.sleep(0)
    waiting = asyncio.create_task(watcher.wait(1))
    await asyncio.sleep(0)
    go.set()
    await first
    assert watcher.waited == 0
    await watcher.next()
    await waiting
    assert watcher.waited == 2
    await watcher.reach(2)
    assert watcher.waited == 4


@pytest.mark.parametrize("count", [0, 1, 15, 16, 300, 65_535, 65_536])
def test_arrays_of_samples_have_numpys_own_values(count):
    draw = random.Random(count)
    floats = [draw.gauss(0, 1) * 10.0 ** draw.randint(-40, 30) for _ in range(count)]
    ints, flags = [draw.randrange(1 << 31) for _ in range(count)], [draw.random() < 0.5 for _ in range(count)]
    assert compact.float32(floats).tobytes() == np.asarray(floats, np.float32).tobytes()
    assert np.array_equal(compact.int32(ints), ints)
    for mask in (flags, sorted(flags), [False] * count, [True] * count):
        assert np.array_equal(samples._flags(mask), np.asarray(mask, bool))


@pytest.mark.parametrize("values", [[1, 2.5], [2**40] * 3, [np.float32(1.5)], [math.nan, math.inf], [True] * 20])
def test_numbers_that_are_no_plain_floats_become_float32_too(values):
    assert compact.float32(values).tobytes() == np.asarray(values, np.float32).tobytes()
