"""A real env server process and its client: what an episode holds, faults, cancellation, strangers."""

import asyncio
import dataclasses
import json
import socket
import struct
from types import SimpleNamespace

import pytest
import verifiers.v1 as vf

from rlmake.core.errors import RunFailed, UserError
from rlmake.envs import address
from rlmake.envs.client import EnvHandle, engine_client
from rlmake.envs.server import _check_free
from rlmake.evals.records import of_episode

CLIENT = SimpleNamespace(api_key_var="NO_KEY", headers={}, headers_from_env={})
QWEN3 = SimpleNamespace(name="qwen3", import_path=None, options={"enable_thinking": False})
SAMPLING = {"temperature": 1.0, "max_completion_tokens": 128, "seed": 7, "cache_salt": "3"}


async def connected(env_server, **kwargs):
    return await EnvHandle.connect(env_server.source, env_server.address_file, 240, run_id="run-1", **kwargs)


async def test_an_episode_holds_what_the_engine_saw_and_sent(env_server, engine, base_url, tokenizer_dir, tokenizer):
    env = await connected(env_server)
    assert (env.name, env.num_tasks()) == ("rev", 24)
    task = env.task(3)
    assert (task.index, task.key, task.data["target"]) == (3, "r3", "3 rebmun esarhp fo sdrow eht")
    episode = await env.run(task, engine_client(CLIENT, base_url, QWEN3, tokenizer_dir), "m", SAMPLING)
    await env.close()
    assert episode.ok and episode.env.name == "rev" and episode.task.key == "r3"
    (trace,) = episode.traces
    assert trace.reward == 1.0 and trace.metrics == {"exact_match": 1.0} and trace.num_turns == 1
    (request,) = engine.requests
    assert request["cache_salt"] == "3" and request["sampling_params"]["seed"] == 7
    assert request["sampling_params"]["max_tokens"] == 128
    # Token by token what the engine was given, then what it returned.
    reply = [*tokenizer.encode(task.data["target"], add_special_tokens=False), tokenizer.eos_token_id]
    (branch,) = trace.branches
    assert branch.token_ids == request["token_ids"] + reply
    assert branch.sampled_mask == [False] * len(request["token_ids"]) + [True] * len(reply)
    # Logprobs to the last bit: float32 values survive as they are, nothing is rounded to four decimals.
    expected = [engine.logprob(position) for position in range(len(reply))]
    assert branch.logprobs[-len(reply) :] == expected
    assert branch.logprobs[-1] != round(branch.logprobs[-1], 6)
    assert struct.pack("<f", branch.logprobs[-1]) == struct.pack("<f", expected[-1])


async def test_chat_completions_serve_without_a_tokenizer(env_server, engine, base_url):
    env = await connected(env_server)
    episode = await env.run(env.task(0), engine_client(CLIENT, base_url), "m", {"temperature": 0.0, "seed": 1})
    await env.close()
    assert episode.ok and episode.traces[0].reward == 1.0
    (request,) = engine.requests
    assert request["messages"] == [{"role": "user", "content": "the words of phrase number 0"}]
    assert request["temperature"] == 0.0 and request["seed"] == 1


async def test_text_of_many_bytes_a_character_comes_back_whole(env_server, engine, base_url, tokenizer_dir):
    text = "naïve 🧪 👩‍🚀 e\u0301"
    engine.reply = lambda prompt: text
    env = await connected(env_server)
    episode = await env.run(env.task(0), engine_client(CLIENT, base_url, QWEN3, tokenizer_dir), "m", SAMPLING)
    await env.close()
    assert episode.traces[0].last_reply == text


async def test_many_at_once_are_each_their_own(env_server, engine, base_url, tokenizer_dir):
    env = await connected(env_server)
    client = engine_client(CLIENT, base_url, QWEN3, tokenizer_dir)
    runs = (env.run(env.task(index % 24), client, "m", SAMPLING) for index in range(48))
    episodes = await asyncio.gather(*runs)
    await env.close()
    assert [episode.errors or episode.traces[0].errors for episode in episodes] == [[]] * 48
    assert [episode.task.key for episode in episodes] == [f"r{index % 24}" for index in range(48)]
    assert all(episode.traces[0].reward == 1.0 for episode in episodes)


async def test_a_failure_is_an_episode_with_its_error(env_server, engine, base_url, tokenizer_dir):
    def fail(prompt):
        raise ValueError("no memory left")

    engine.reply = fail
    env = await connected(env_server)
    client = engine_client(CLIENT, base_url, QWEN3, tokenizer_dir)
    failed = await env.run(env.task(0), client, "m", SAMPLING)
    assert not failed.ok and "no memory left" in failed.traces[0].errors[-1].message
    engine.max_model_len = 4
    engine.reply = lambda prompt: prompt[::-1]
    wrong = await env.run(env.task(0), client, "m", {"temperature": "hot"})
    assert not wrong.ok and wrong.errors[-1].type == "ValidationError" and wrong.task.key == "r0"
    nobody = engine_client(CLIENT, "http://127.0.0.1:9/v1", QWEN3, tokenizer_dir)
    unreached = await env.run(env.task(1), nobody, "m", SAMPLING)
    await env.close()
    assert not unreached.ok and unreached.traces[0].errors


async def test_a_limit_ends_a_hanging_episode(env_server, engine, base_url, tokenizer_dir):
    async def hang(prompt):
        await asyncio.sleep(60)
        return "late"

    engine.reply = hang
    env = await connected(env_server)
    task = env.task(0)
    task = dataclasses.replace(task, data=task.data | {"timeout": {"agent": 0.5}})
    episode = await env.run(task, engine_client(CLIENT, base_url, QWEN3, tokenizer_dir), "m", SAMPLING)
    await env.close()
    assert episode.traces[0].is_timeout and of_episode(episode, "rev", task, 0, 1).timeout


async def test_a_cancelled_run_ends_on_the_server_too(env_server, engine, base_url, tokenizer_dir):
    arrived = asyncio.Event()

    async def hang(prompt):
        loop.call_soon_threadsafe(arrived.set)
        await asyncio.sleep(60)
        return "late"

    loop, engine.reply = asyncio.get_running_loop(), hang
    env = await connected(env_server)
    client = engine_client(CLIENT, base_url, QWEN3, tokenizer_dir)
    running = asyncio.create_task(env.run(env.task(0), client, "m", SAMPLING))
    await asyncio.wait_for(arrived.wait(), 10)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await env.close()
    for _ in range(100):
        if "cancelled run" in env_server.log.read_text():
            break
        await asyncio.sleep(0.05)
    else:
        pytest.fail("the server went on with a cancelled episode")


async def test_the_address_of_another_run_is_refused(env_server):
    await connected(env_server)  # the file is there
    with pytest.raises(UserError, match="belongs to run 'run-1', not to 'run-2'"):
        await EnvHandle.connect(env_server.source, env_server.address_file, 5, run_id="run-2")


async def test_the_server_of_another_taskset_is_refused(env_server):
    """Tasks are loaded here and scored there: it would score ours by its own rules."""
    source = SimpleNamespace(name="game", env={"taskset": {"id": "kuhn-poker"}})
    with pytest.raises(UserError, match=r"env 'game': the server at tcp://.* runs 'reverse-text', not 'kuhn-poker'"):
        await EnvHandle.connect(source, env_server.address_file, 240, run_id="run-1")


async def test_an_address_whose_server_has_ended_is_not_used(env_server, tmp_path):
    await connected(env_server)
    record = json.loads(env_server.address_file.read_text())
    record["pid_start"] += 1  # the pid has been given out again
    stale = tmp_path / "rev.address"
    stale.write_text(json.dumps(record))
    assert address.read(stale, "run-1") is None
    with pytest.raises(RunFailed, match="has not published"):
        await EnvHandle.connect(env_server.source, stale, 0.3, run_id="run-1")


async def test_only_some_tasks(env_server):
    source = SimpleNamespace(**vars(env_server.source), select={"limit": 5})
    env = await EnvHandle.connect(source, env_server.address_file, 240, run_id="run-1")
    assert env.num_tasks() == 5
    with pytest.raises(IndexError):
        env.task(5)
    await env.close()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"prompt": "a"}'], r"row 1: .*'target'"),
        (['{"prompt": "a", "target": "a"}', "nonsense"], "row 2: "),
        ([], "no tasks"),
        (['{"id": "x", "prompt": "a", "target": "a"}'] * 2, "tasks 0 and 1 have one key, 'x'"),
    ],
)
async def test_bad_rows_are_named(env_server, tmp_path, lines, message):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines))
    source = SimpleNamespace(name="rev", env={"taskset": {"id": "reverse-text", "path": str(path)}})
    with pytest.raises(UserError, match=message):
        await EnvHandle.connect(source, env_server.address_file, 5, run_id="run-1")


async def test_records_for_people_are_rounded_and_say_so(env_server, engine, base_url, tokenizer_dir):
    """The trap: `to_record` rounds. Training reads the episode itself."""
    env = await connected(env_server)
    episode = await env.run(env.task(0), engine_client(CLIENT, base_url, QWEN3, tokenizer_dir), "m", SAMPLING)
    await env.close()
    rounded = episode.to_record()["traces"][0]["nodes"][-1]["logprobs"]
    assert rounded[0] == -0.1235 != episode.traces[0].branches[0].nodes[-1].logprobs[0]
    assert isinstance(episode, vf.Episode)


def test_a_configured_port_in_use_is_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"^address: 127.0.0.1:{port} is already in use"):
            _check_free(f"tcp://127.0.0.1:{port}")
    _check_free("tcp://127.0.0.1:0")
    _check_free("ipc:///tmp/x")
