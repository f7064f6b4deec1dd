"""The env client against a server that is played: one that goes away, restarts, or talks nonsense."""

import asyncio

import msgspec
import pytest
import verifiers.v1 as vf
import zmq
import zmq.asyncio

from rlmake.envs import wire
from rlmake.envs.client import EnvHandle, EnvTask
from rlmake.envs.wire import Wire

CLIENT = vf.EvalClientConfig(base_url="http://127.0.0.1:9/v1", api_key_var="NONE")
TASK = EnvTask(0, "k0", "h", "T", {"idx": 0, "prompt": "p"})
pack, unpack = msgspec.msgpack.encode, msgspec.msgpack.decode


class Server:
    """Answers health; keeps the requests of episodes for the test to answer."""

    def __init__(self):
        self.instance, self.mute = "one", False
        self.socket = zmq.asyncio.Context.instance().socket(zmq.ROUTER)
        self.socket.bind("tcp://127.0.0.1:*")
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.seen: list[list[bytes]] = []
        self.task = asyncio.create_task(self.serve())

    async def serve(self):
        while True:
            frames = await self.socket.recv_multipart()
            if frames[2] == b"health":
                if not self.mute:
                    await self.answer(frames, {"success": True, "instance": self.instance})
            else:
                self.seen.append(frames)

    async def answer(self, request, body, kind=b"reply"):
        await self.socket.send_multipart([*request[:2], kind, pack(body) if isinstance(body, dict) else body])

    async def wait(self, number):
        async with asyncio.timeout(10):
            while len(self.seen) < number:
                await asyncio.sleep(0.01)


@pytest.fixture
async def server(monkeypatch):
    monkeypatch.setattr(wire, "HEALTH_SECONDS", 0.1)
    monkeypatch.setattr(wire, "GONE_SECONDS", 0.5)
    made = Server()
    yield made
    made.task.cancel()
    await asyncio.gather(made.task, return_exceptions=True)
    made.socket.close(0)


@pytest.fixture
async def env(server):
    client = Wire(server.address)
    await client.start(10)
    handle = EnvHandle("toy", iter([TASK]), True, client)
    yield handle
    await handle.close()


def start(env):
    return asyncio.create_task(env.run(TASK, CLIENT, "m", {"temperature": 1.0, "seed": 3}))


async def test_a_request_holds_what_the_server_needs(env, server):
    run = start(env)
    await server.wait(1)
    body = unpack(server.seen[0][3])
    assert body["task_data"] == TASK.data and body["model"] == "m" and body["client"]["type"] == "eval"
    assert body["sampling"]["temperature"] == 1.0 and "seed" in str(body["sampling"])
    await server.answer(server.seen[0], {"success": False, "error": "ValueError: no such task"})
    episode = await run
    assert not episode.ok and (episode.errors[0].type, episode.errors[0].message) == ("ValueError", "no such task")


async def test_a_server_started_anew_costs_the_episodes_that_it_had(env, server):
    lost = start(env)
    await server.wait(1)
    server.instance = "two"
    episode = await asyncio.wait_for(lost, 10)
    assert episode.errors[0].type == "EnvServerGone" and "started anew" in episode.errors[0].message
    run = start(env)
    await server.wait(2)
    await asyncio.sleep(0.3)
    assert not run.done(), "the new server has it"
    await server.answer(
        server.seen[1], {"success": True, "error": None, "head": {"task": head(), "ok": True}, "traces": []}
    )
    assert (await run).ok


async def test_a_server_that_is_gone_is_not_waited_for(env, server):
    run = start(env)
    await server.wait(1)
    server.mute = True
    episode = await asyncio.wait_for(run, 10)
    assert episode.errors[0].type == "EnvServerGone" and "no answer" in episode.errors[0].message


async def test_an_answer_beside_the_news_of_another_server_counts(env, server, monkeypatch):
    """Both are read in one turn of the loop, the news first."""
    monkeypatch.setattr(wire, "HEALTH_SECONDS", 5.0)
    monkeypatch.setattr(wire, "GATHER_SECONDS", 0.5)
    answered, lost = start(env), start(env)
    await server.wait(2)
    answer = server.answer

    async def both(request, body):
        server.answer, server.instance = answer, "two"
        await answer(request, body | {"instance": "two"})
        await answer(
            server.seen[0], {"success": True, "error": None, "head": {"task": head(), "ok": True}, "traces": []}
        )

    server.answer = both
    first, second = await asyncio.wait_for(asyncio.gather(answered, lost), 10)
    assert first.ok and second.errors[0].type == "EnvServerGone"


async def test_a_server_whose_news_make_no_sense_is_gone(env, server):
    run = start(env)
    await server.wait(1)
    answer, server.answer = server.answer, lambda request, body: answer(request, b"\xc1")
    await asyncio.sleep(0.3)
    server.answer = lambda request, body: answer(request, b"\x01")
    episode = await asyncio.wait_for(run, 10)
    assert episode.errors[0].type == "EnvServerGone" and "no answer" in episode.errors[0].message


async def test_nonsense_fails_the_episode_and_no_other(env, server):
    runs = [start(env), start(env), start(env)]
    await server.wait(3)
    await server.socket.send_multipart([server.seen[0][0], b"one frame too few"])
    await server.answer(server.seen[0], b"\xc1 not msgpack")
    await server.answer(server.seen[1], b"\xc1", b"delta")
    await server.answer(
        server.seen[1], {"success": True, "head": {"task": head(), "ok": True}, "traces": [{"id": "t"}]}
    )
    await server.answer(
        server.seen[2], {"success": True, "error": None, "head": {"task": head(), "ok": True}, "traces": []}
    )
    first, second, third = await asyncio.gather(*runs)
    assert not first.ok and not second.ok and third.ok


async def test_a_burst_of_replies_is_read_over_several_turns_of_the_loop(env, server, monkeypatch):
    monkeypatch.setattr(wire, "FRAMES", 4)
    runs, ends = [start(env) for _ in range(40)], []
    await server.wait(40)
    for frames in server.seen:
        await server.answer(frames, {"success": True, "head": {"task": head(), "ok": True}, "traces": []})
    client, count = env._client, len(env._client._pending)
    while client._pending:
        await asyncio.sleep(0)
        ends.append(count - len(client._pending))
        count = len(client._pending)
    assert max(ends) <= 8 and sum(ends) == 40  # the descriptor's turn and the one asked for may be the same
    assert all(episode.ok for episode in await asyncio.gather(*runs))


async def test_numbers_per_token_arrive_as_they_were_sent_and_are_checked(env, server):
    runs = [start(env), start(env)]
    await server.wait(2)
    reply = {"parent": 0, "message": {"role": "assistant", "content": "b"}, "sampled": True, "logprobs": [-0.1, -1e-9]}
    nodes = [
        {"message": {"role": "user", "content": "a"}, "token_ids": [7, 8], "mask": [False, False]},
        reply | {"token_ids": [9, 10, 11], "mask": [False, True, True], "is_content": [False, True, True]},
    ]
    agent, usage = {"name": "agent", "config": {}}, {"prompt_tokens": 3, "completion_tokens": 2}
    for request, ids in zip(server.seen, ([9, 10, 11], [9, "ten", 11]), strict=True):
        nodes[1]["token_ids"] = ids
        sent = {"trace": "t", "open": {"id": "t", "task": head()}, "set": {"agent": agent, "ok": True}, "nodes": nodes}
        await server.answer(request, sent | {"calls": [{"node": 1, "usage": usage}]}, b"delta")
        summary = {"id": "t", "nodes": 2, "calls": 1}
        await server.answer(
            request, {"success": True, "error": None, "head": {"task": head(), "ok": True}, "traces": [summary]}
        )
    good, bad = await asyncio.gather(*runs)
    (trace,) = good.traces
    assert good.ok and [node.token_ids for node in trace.nodes] == [[7, 8], [9, 10, 11]]
    assert trace.nodes[1].logprobs == [-0.1, -1e-9] and trace.nodes[0].logprobs == []
    assert trace.branches[0].sampled_mask == [False] * 3 + [True] * 2 and trace.nodes[1].is_content[0] is False
    assert good.to_record(None)["traces"][0]["nodes"][1]["token_ids"] == [9, 10, 11]
    assert type(trace.nodes[1].token_ids[0]) is int and type(trace.nodes[1].logprobs[0]) is float
    assert not bad.ok and bad.errors[0].type == "ValidationError" and "int" in bad.errors[0].message


async def test_cancelling_tells_the_server(env, server):
    run = start(env)
    await server.wait(1)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    await server.wait(2)
    assert server.seen[1][2] == b"cancel"
    assert unpack(server.seen[1][3])["request_id"].encode() == server.seen[0][1]


async def test_nobody_there_is_a_timeout():
    client = Wire("tcp://127.0.0.1:9")
    with pytest.raises(TimeoutError):
        await client.start(0.5)
    await client.close()


def head():
    return {"type": "T", "data": TASK.data}
