"""The env server's broker: one address for the clients, worker processes behind it, each of which may fail alone.

Frames are verifiers' own (`verifiers.v1.serve`): `[request id, method, payload]` from a client, `[request id, kind,
data]` back, so its client and its server work at either end. A worker that dies, hangs or grows beyond its memory is
replaced; its episodes are answered as failed, those that it had not begun go to another. The broker itself runs none of
the user's code and imports no verifiers.
"""

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgpack
import zmq
import zmq.asyncio
from loguru import logger

from rlmake.core import procs
from rlmake.core.errors import RunFailed, UserError

PING_SECONDS = 1.0
START_SECONDS = 600.0  # importing an environment may fetch and build things
START_ATTEMPTS = 3  # a worker that never gets ready so often in a row can't be helped
BACKOFF_SECONDS, BACKOFF_MOST = 0.2, 10.0
STOP_SECONDS = 5.0
LAST_WORDS_SECONDS = 0.05  # what a worker sent before it died is still on its way
BUSY = 0.9  # share of all places taken at which another worker is started
GIB = 1 << 30


@dataclass
class Request:
    """An episode on its way; `frames` are what a worker is sent."""

    client: bytes
    frames: list[bytes]


@dataclass
class Worker:
    """One process and the requests that it has."""

    number: int
    process: asyncio.subprocess.Process
    socket: zmq.asyncio.Socket
    requests: dict[bytes, Request] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    answered: float | None = None  # when it last answered a ping; None: it never has
    asked: float | None = None  # when the ping was sent that it has not answered
    retiring: bool = False  # gets no new episodes, ends when it has none left
    doom: str | None = None  # why it was killed

    def rss(self) -> int:
        """Resident bytes; 0 when it is gone."""
        try:
            with open(f"/proc/{self.process.pid}/statm") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError, ValueError):
            return 0


class Broker:
    """`run` serves until it is cancelled. Raises `RunFailed` when no worker can be started."""

    def __init__(self, config, command: list[str], env: Mapping[str, str]):
        """`command`: starts a worker; its ipc address is appended. `env`: its environment."""
        self.config, self.command, self.env = config, command, {**env}
        if procs.LAUNCHER not in self.env:
            self.env |= procs.launcher_mark() | procs.READABLE  # a worker ends with its broker, whatever kills that
        self.instance = os.urandom(8).hex()  # tells a client that this is not the server it knew
        self.workers: list[Worker] = []
        self.backlog: dict[bytes, Request] = {}  # between the death of the only worker and its successor
        self.context = zmq.asyncio.Context()
        self.clients = self._socket(zmq.ROUTER)
        self.clients.bind(config.address)
        self.address = self.clients.getsockopt_string(zmq.LAST_ENDPOINT)
        self.folder = procs.scratch("rlmake-env-", 12)
        self._generations = itertools.count()
        self._tasks: set[asyncio.Task] = set()
        self._failed_starts = self._deaths = 0
        self._failure: asyncio.Future[None] | None = None

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket = self.context.socket(kind)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            socket.setsockopt(option, 0)
        return socket

    async def run(self) -> None:
        self._failure = asyncio.get_running_loop().create_future()
        try:
            await self._start(0)
            self._spawn(self._from_clients())
            self._spawn(self._watch())
            await self._failure
        finally:
            await self._close()

    def _spawn(self, coroutine) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and not self._failure.done():
            self._failure.set_exception(task.exception())

    async def _start(self, number: int) -> None:
        address = f"ipc://{self.folder}/{number}.{next(self._generations)}"
        quiet = {"env": self.env, "stdin": asyncio.subprocess.DEVNULL}
        process = await asyncio.create_subprocess_exec(*self.command, address, **quiet)
        socket = self._socket(zmq.DEALER)
        socket.connect(address)  # before the worker has bound it: what is sent waits
        worker = Worker(number, process, socket)
        self.workers.append(worker)
        self._spawn(self._live(worker))
        await self._hand_out()

    async def _hand_out(self) -> None:
        """What waits for a worker, to those that are there."""
        waiting, self.backlog = self.backlog, {}
        for identity, request in waiting.items():
            await self._assign(identity, request)

    async def _live(self, worker: Worker) -> None:
        """Relay a worker's answers until it ends; then settle its requests and replace it."""
        relay = asyncio.create_task(self._from_worker(worker))
        code = await worker.process.wait()
        await asyncio.sleep(LAST_WORDS_SECONDS)
        relay.cancel()
        await asyncio.gather(relay, return_exceptions=True)
        worker.socket.close()
        self.workers.remove(worker)
        if worker.retiring and not worker.requests:
            return  # its successor is there
        ready, why = worker.answered is not None, worker.doom or ending(code)
        self._failed_starts = 0 if ready else self._failed_starts + 1
        if not ready and (code == UserError.exit_code or self._failed_starts >= START_ATTEMPTS):
            raise RunFailed(f"the worker of this environment {why} before it was ready; its own words are above")
        fate = "failed with it" if ready else "wait for the next one"
        logger.warning(f"worker {worker.number} {why}: {len(worker.requests)} episodes {fate}; it is replaced")
        if ready:
            for identity, request in worker.requests.items():
                await self._answer(request.client, identity, f"EnvWorkerDied: the environment's worker {why}")
        else:
            self.backlog |= worker.requests
        if worker.retiring:
            await self._hand_out()
            return
        await asyncio.sleep(min(BACKOFF_MOST, BACKOFF_SECONDS * 2**self._deaths))
        self._deaths = min(self._deaths + 1, 16)
        await self._start(worker.number)

    async def _from_clients(self) -> None:
        while True:
            frames = await self.clients.recv_multipart()
            if len(frames) != 4:
                logger.warning(f"a request of {len(frames)} frames, expected 4: dropped")
                continue
            client, identity, method, payload = frames
            if method == b"health":
                taskset = self.config.env["taskset"]["id"]
                reply = {"success": True, "error": None, "instance": self.instance, "taskset": taskset}
                await self._send([client, identity, b"reply", msgpack.packb(reply)])
            elif method == b"cancel":
                await self._cancel(client, identity, payload)
            else:
                await self._assign(identity, Request(client, [identity, method, payload]))

    async def _assign(self, identity: bytes, request: Request) -> None:
        """To the worker with the fewest episodes; another one is started when nearly all places are taken."""
        open_workers = [worker for worker in self.workers if not (worker.retiring or worker.doom)]
        if not open_workers:
            self.backlog[identity] = request
            return
        worker = min(open_workers, key=lambda worker: len(worker.requests))
        worker.requests[identity] = request
        await worker.socket.send_multipart(request.frames)
        busy = sum(len(worker.requests) for worker in open_workers)
        if len(open_workers) < self.config.max_workers and busy >= BUSY * len(open_workers) * self.config.multiplex:
            taken = {worker.number for worker in self.workers}
            await self._start(next(number for number in itertools.count() if number not in taken))
            logger.info(f"{busy} episodes in flight: {len(open_workers) + 1} of {self.config.max_workers} workers")

    async def _cancel(self, client: bytes, identity: bytes, payload: bytes) -> None:
        try:
            target = str(msgpack.unpackb(payload)["request_id"]).encode()
        except (ValueError, KeyError, TypeError):
            target = b""
        waiting = self.backlog.pop(target, None)
        worker = next((worker for worker in self.workers if target in worker.requests), None)
        if worker is not None:
            await worker.socket.send_multipart([identity, b"cancel", payload])
        reply = {"success": True, "error": None, "cancelled": worker is not None or waiting is not None}
        await self._send([client, identity, b"reply", msgpack.packb(reply)])

    async def _from_worker(self, worker: Worker) -> None:
        while True:
            frames = await worker.socket.recv_multipart(copy=False)
            if len(frames) != 3:
                logger.warning(f"worker {worker.number} sent {len(frames)} frames, expected 3: dropped")
                continue
            identity, kind, data = frames
            if identity.bytes == b"ping":
                worker.answered, worker.asked = time.monotonic(), None
                continue
            if (request := worker.requests.get(identity.bytes)) is None:
                continue
            if kind.bytes == b"reply":
                del worker.requests[identity.bytes]
                self._deaths = 0
            await self._send([request.client, identity, kind, data])

    async def _watch(self) -> None:
        """Ping the workers; end those that hang, and those that have grown too large."""
        ping = [b"ping", b"health", msgpack.packb({})]
        while True:
            now = time.monotonic()
            for worker in list(self.workers):
                if worker.asked is None:
                    worker.asked = now
                    await worker.socket.send_multipart(ping)
                patience = START_SECONDS if worker.answered is None else self.config.worker_timeout
                if now - worker.asked > patience:
                    self._kill(worker, f"did not answer for {patience:g} s and was killed")
                await self._weigh(worker)
                if worker.retiring and not worker.requests and worker.doom is None:
                    with contextlib.suppress(ProcessLookupError):
                        worker.process.terminate()
            await asyncio.sleep(PING_SECONDS)

    async def _weigh(self, worker: Worker) -> None:
        """Beyond its limit a worker gets nothing new and ends when it is free; far beyond, at once."""
        limit = (self.config.worker_max_memory or 0) * GIB
        if not limit or (size := worker.rss()) <= limit:
            return
        if size > 1.5 * limit:
            self._kill(worker, f"grew to {size / GIB:.2f} GiB and was killed")
        elif not worker.retiring:
            worker.retiring = True
            logger.info(
                f"worker {worker.number} has grown to {size / GIB:.2f} GiB: it ends with its episodes, replaced"
            )
            await self._start(worker.number)

    def _kill(self, worker: Worker, why: str) -> None:
        if worker.doom is None:
            worker.doom = why
            with contextlib.suppress(ProcessLookupError):
                worker.process.kill()

    async def _answer(self, client: bytes, identity: bytes, error: str) -> None:
        await self._send([client, identity, b"reply", msgpack.packb({"success": False, "error": error})])

    async def _send(self, frames: list) -> None:
        with contextlib.suppress(zmq.ZMQError):  # a client that has left
            await self.clients.send_multipart(frames, copy=False)

    async def _close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for worker in self.workers:
            with contextlib.suppress(ProcessLookupError):
                worker.process.terminate()
        ends = [asyncio.ensure_future(worker.process.wait()) for worker in self.workers]
        _, left = await asyncio.wait(ends, timeout=STOP_SECONDS) if ends else (set(), set())
        if left:
            for worker in self.workers:
                with contextlib.suppress(ProcessLookupError):
                    worker.process.kill()
            await asyncio.wait(left)
        self.context.destroy(linger=0)
        shutil.rmtree(self.folder, ignore_errors=True)


def ending(code: int) -> str:
    """How a process ended, for people."""
    if code < 0 and -code in set(signal.Signals):
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with code {code}"


def worker_command(config_file: str) -> list[str]:
    """Starts a worker by the configuration that this process has read, be it a file in its memory."""
    config_file = config_file.replace("/proc/self/", f"/proc/{os.getpid()}/")
    return [sys.executable, "-m", "rlmake.envs.worker", "@", config_file]
