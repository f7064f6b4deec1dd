"""A real env server whose workers crash, hang, leak and print garbage: each costs its episodes and nothing else."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from troubled import SOURCE

from rlmake.core import procs
from rlmake.core.rundir import RunContext
from rlmake.envs.client import EnvHandle, engine_client

CLIENT = SimpleNamespace(api_key_var="NO_KEY", headers={}, headers_from_env={})
SAMPLING = {"temperature": 1.0, "max_completion_tokens": 128, "seed": 7}
WHATS = ["ok", "crash", "exit", "hang", "leak", "flood", "garbage", "slow", "exit2", "long"]
TASK = {what: index for index, what in enumerate(WHATS)}


def start(folder, **more):
    """A server of the troubled taskset in `folder`: `.source`, `.address_file`, `.process`, `.log`."""
    (folder / "trouble.py").write_text(SOURCE)
    env = {"taskset": {"id": "trouble", "whats": WHATS}}
    ctx = RunContext(folder, "run-1", "run", 1, None, folder / "configs/attempt_1", folder / "logs/attempt_1")
    config = ctx.config_dir / "resolved/envs/train/trouble.json"
    config.parent.mkdir(parents=True)
    config.write_text(json.dumps({"name": "trouble", "env": env, "output_dir": str(folder), **more}))
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    environ = os.environ | {"PRL_RUN_ID": "run-1", "PRL_ATTEMPT_CONFIG_DIR": str(ctx.config_dir), "PYTHONPATH": path}
    log = folder / "server.log"
    with open(log, "wb") as stream:
        command = [sys.executable, "-m", "rlmake.envs.server", "@", str(config)]
        process = subprocess.Popen(command, env=environ, stdout=stream, stderr=stream)
    source = SimpleNamespace(name="trouble", env=env)
    return SimpleNamespace(source=source, address_file=config.with_suffix(".address"), process=process, log=log)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trouble")
    sys.path.insert(0, str(folder))
    made = start(folder, worker_timeout=3.0, worker_max_memory=0.6)
    yield made
    sys.path.remove(str(folder))
    made.process.send_signal(signal.SIGTERM)
    assert made.process.wait(20) == 0, made.log.read_text(errors="replace")[-2000:]
    assert workers(made) == [], "a worker outlived its server"


def workers(server):
    mark = f"{server.process.pid}:"
    return procs.find(procs.LAUNCHER, lambda value: value.startswith(mark))


class Session:
    def __init__(self, env, client):
        self.env, self.client = env, client

    async def run(self, what):
        return await asyncio.wait_for(self.env.run(self.env.task(TASK[what]), self.client, "m", SAMPLING), 90)

    async def pid(self):
        """The worker that serves now."""
        episode = await self.run("ok")
        assert episode.ok, (episode.errors, [trace.errors for trace in episode.traces])
        return int(episode.traces[0].reward)


@pytest.fixture
async def session(server, engine, base_url):
    env = await EnvHandle.connect(server.source, server.address_file, 240, run_id="run-1")
    yield Session(env, engine_client(CLIENT, base_url))
    await env.close()


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("crash", "worker was killed by SIGSEGV"),
        ("exit", "worker ended with code 7"),
        ("exit2", "worker ended with code 2"),  # which says of one that starts that its environment is wrong
        ("hang", "did not answer for 3 s and was killed"),
        ("flood", "GiB and was killed"),
    ],
)
async def test_a_worker_that_fails_costs_its_episodes(session, what, why):
    before = await session.pid()
    failed, beside = await asyncio.gather(session.run(what), session.run("slow"))
    assert not failed.ok and failed.errors[-1].type == "EnvWorkerDied" and why in failed.errors[-1].message
    assert not beside.ok or beside.traces[0].reward == before
    assert await session.pid() != before


async def test_a_worker_that_leaks_is_replaced_when_its_episodes_are_done(session):
    before = await session.pid()
    for _ in range(12):
        episode = await session.run("leak")
        assert episode.ok, (episode.errors, [trace.errors for trace in episode.traces])
        if int(episode.traces[0].reward) != before:
            break
        await asyncio.sleep(0.4)
    assert await session.pid() != before


async def test_a_worker_that_dies_while_it_is_being_replaced_costs_its_episodes(session, server):
    before = await session.pid()
    running = asyncio.create_task(session.run("long"))
    async with asyncio.timeout(60):
        while (await session.run("leak")).traces[0].reward == before:
            await asyncio.sleep(0.4)
    assert not running.done()
    os.kill(before, signal.SIGKILL)
    episode = await running
    assert episode.errors[-1].type == "EnvWorkerDied" and "SIGKILL" in episode.errors[-1].message
    await session.pid()
    assert len(workers(server)) == 1, "its successor was there already"


async def test_garbage_on_its_output_harms_nobody(session, server):
    episode = await session.run("garbage")
    assert episode.ok and "not a log line" in server.log.read_text(errors="replace")


async def test_garbage_on_the_wire_harms_nobody(session, server):
    import zmq

    address = json.loads(server.address_file.read_text())["address"]
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 1000
    socket.connect(address)
    for frames in ([b"x"], [b"a", b"run", b"\xff"], [b"b", b"cancel", b"\xff"], [b"c", b"nonsense", b"\x80"]):
        socket.send_multipart(frames)
    await asyncio.sleep(0.3)
    assert await session.pid()
    socket.close()
    context.term()


@pytest.mark.parametrize(
    "taskset, said",
    [
        ({"id": "no-such-taskset"}, "no_such_taskset"),
        ({"id": "breaks-on-import"}, "RuntimeError: no weather today ("),
        ({"id": "reverse-text", "pth": "x"}, "env.taskset.path: is needed; env.taskset.pth: unknown key"),
    ],
)
async def test_an_environment_that_cannot_be_loaded_ends_the_server_with_the_reason(tmp_path, taskset, said):
    (tmp_path / "breaks_on_import.py").write_text("raise RuntimeError('no weather today')\n")
    made = start(tmp_path, env={"taskset": taskset})
    assert made.process.wait(120) == 1
    text = made.log.read_text()
    assert said in text
    assert "Traceback" not in text and "ended with code 2 before it was ready" in text


def test_workers_end_with_a_killed_server(tmp_path):
    made = start(tmp_path)
    deadline = time.monotonic() + 60
    while not workers(made) and time.monotonic() < deadline:
        time.sleep(0.1)
    left = workers(made)
    assert left, (os.environ.get(procs.LAUNCHER), made.log.read_text(errors="replace")[-2000:])
    made.process.kill()
    made.process.wait()
    assert procs.wait_gone(left, 15) == []
