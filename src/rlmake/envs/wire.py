"""verifiers' env client, for many episodes at once: little work per episode, hardly any of it on the event loop.

Same frames as `verifiers.v1.serve.EnvClient`, in whose place it stands. The socket is read when the loop sees its file
descriptor, and while it is busy at times, some frames a turn; deltas are decoded by msgspec, before the end only when
somebody watches; an episode is put together in a thread; an agent's configuration, equal in all episodes of a source,
is validated once. And a server that has gone away, or was started anew, costs the episodes that it had and is not
waited for without end.
"""

import asyncio
import functools
import itertools
import operator
import time
import uuid
from collections.abc import Callable
from typing import Any

import msgspec
import verifiers.v1 as vf
import zmq
from loguru import logger
from verifiers.v1.serve import EpisodeAssembly
from verifiers.v1.serve.delta import TraceSummary

from rlmake.core.offload import off_loop
from rlmake.envs.compact import CompactEpisode, decoded, keep, streams

HEALTH_SECONDS, GONE_SECONDS = 10.0, 120.0
START_POLL_SECONDS = 0.25
LINGER_MS = 500
CONFIGS = 64  # kept as they travel
FRAMES = 64  # read in one turn of the event loop; each may end an episode, which is work in the turn that follows
# Between two looks at a busy socket: a turn of the event loop costs more than reading a frame, and with many episodes
# in flight the end of one can wait a little for the next.
GATHER_SECONDS, GATHER_AT_MOST = 0.0001, 0.03  # for each request that is open; together

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode
_AgentConfig = vf.WireTrace.model_fields["agent"].annotation.model_fields["config"].annotation


class Wire:
    """The connection of one event loop to one env server."""

    def __init__(self, address: str):
        self.address = address
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, 0)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)  # for cancellations sent right before the end
        self._socket.connect(address)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._looking = False
        self._pending: dict[bytes, asyncio.Future[bytes]] = {}
        self._deltas: dict[bytes, Callable[[bytes], None]] = {}
        self.instance: str | None = None  # what the server calls itself; a new one has lost our episodes
        self.taskset: str | None = None  # id of what it runs, where it says so
        self._runs: dict[bytes, str | None] = {}  # request → the server that it was asked of
        self._configs: dict[int, tuple[vf.ClientConfig | vf.SamplingConfig, dict[str, Any]]] = {}
        self._agents: dict[bytes, Any] = {}
        self._watching: asyncio.Task | None = None
        self._name, self._numbers = f"{uuid.uuid4().hex}-", itertools.count()

    async def run(
        self,
        client: vf.ClientConfig,
        model: str,
        sampling: vf.SamplingConfig,
        task_data: dict[str, Any],
        on_delta: Callable[[bytes], None] | None = None,
    ) -> vf.WireEpisode:
        """One episode. Raises what went wrong with it; cancelling cancels it on the server."""
        identity, deltas = self._new_identity(), []
        payload = _pack(
            {
                "task_data": task_data,
                "client": self._dumped(client),
                "model": model,
                "sampling": self._dumped(sampling),
            }
        )

        def watch(data: bytes) -> None:
            deltas.append(data)
            on_delta(data)

        reply = await self._ask(identity, payload, deltas.append if on_delta is None else watch)
        return await off_loop(self._assembled, deltas, reply)

    def _new_identity(self) -> bytes:
        """Of a request: unique among all that a server may know."""
        return f"{self._name}{next(self._numbers):x}".encode()

    def _dumped(self, config: vf.ClientConfig | vf.SamplingConfig) -> dict[str, Any]:
        """As it travels; many episodes share one object."""
        known = self._configs.get(id(config))
        if known is None:
            if len(self._configs) >= CONFIGS:
                self._configs.clear()
            known = self._configs[id(config)] = (config, config.model_dump(mode="json"))
        return known[1]

    async def _ask(self, identity: bytes, payload: bytes, on_delta: Callable[[bytes], None]) -> bytes:
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        self._deltas[identity], self._runs[identity] = on_delta, self.instance
        try:
            return await self._request(identity, b"run", payload)
        except asyncio.CancelledError:
            self._send([self._new_identity(), b"cancel", _pack({"request_id": identity.decode()})])
            raise
        finally:
            del self._deltas[identity], self._runs[identity]

    async def _request(self, identity: bytes, method: bytes, payload: bytes) -> bytes:
        self._pending[identity] = future = asyncio.get_running_loop().create_future()
        try:
            self._send([identity, method, payload])
            return await future
        finally:
            self._pending.pop(identity, None)

    def _send(self, frames: list[bytes]) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket.send_multipart(frames, zmq.NOBLOCK)  # never full: there is no high-water mark
        # The descriptor tells of changes only, and sending may have seen one.
        self._look(self._pause())

    def _look(self, delay: float) -> None:
        """Receive after `delay` seconds, once however often it is asked for; until then nobody watches the socket."""
        if not self._looking:
            self._looking = True
            self._loop.remove_reader(self._socket.fileno())
            self._loop.call_later(delay, self._receive)

    def _pause(self) -> float:
        return min(GATHER_AT_MOST, GATHER_SECONDS * len(self._pending))

    def _receive(self) -> None:
        """What has arrived, `FRAMES` now and the rest in later turns. A frame that makes no sense is told and left."""
        self._looking = False
        for count in range(FRAMES):
            if self._socket.closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                if count:
                    self._look(self._pause())
                else:  # idle
                    self._loop.add_reader(self._socket.fileno(), self._receive)
                return
            try:
                identity, kind, data = frames
                if kind == b"delta":
                    if (on_delta := self._deltas.get(identity)) is not None:
                        on_delta(data)
                elif (future := self._pending.pop(identity, None)) is not None and not future.done():
                    future.set_result(data)
            except Exception as error:  # the other requests must not suffer
                logger.warning(f"env server {self.address}: a frame that cannot be read: {error}")
        self._look(0.0)

    def _assembled(self, deltas: list[bytes], reply: bytes) -> vf.WireEpisode:
        answer = _unpack(reply)
        if not answer["success"]:
            raise RuntimeError(answer.get("error") or "the env server refused the request")
        assembly = EpisodeAssembly()
        for delta in deltas:
            assembly.apply(decoded(delta))
        record = assembly.finish(answer["head"], [TraceSummary.model_validate(one) for one in answer["traces"]])
        taken = [[streams(node) for node in trace["nodes"]] for trace in record["traces"]]
        for trace in record["traces"]:
            if isinstance(config := trace["agent"].get("config"), dict):
                trace["agent"] = {**trace["agent"], "config": self._agent(config)}
        episode = CompactEpisode.model_validate(record)
        for trace, given in zip(episode.traces, taken, strict=True):
            for node, values in zip(trace.nodes, given, strict=True):
                keep(node, values)
        return episode

    def _agent(self, config: dict[str, Any]) -> Any:
        key = _pack(config)
        if key not in self._agents:
            self._agents[key] = _AgentConfig.model_validate(config)
        return self._agents[key]

    async def _watch(self) -> None:
        """While episodes run: is the server there, and is it still the same?"""
        heard = time.monotonic()
        while True:
            await asyncio.sleep(HEALTH_SECONDS)
            if not self._runs:
                heard = time.monotonic()
                continue
            answer = await self._health()
            if answer is None:
                if (silent := time.monotonic() - heard) > GONE_SECONDS:
                    self._give_up(f"no answer from {self.address} for {silent:.0f} s", lambda known: True)
                continue
            heard = time.monotonic()
            before, self.instance = self.instance, answer.get("instance")
            if before is not None and self.instance != before:
                self._give_up(f"{self.address} was started anew", functools.partial(operator.eq, before))

    async def _health(self, timeout: float | None = None) -> dict[str, Any] | None:
        """What the server says of itself; None when it says nothing in time, or nothing that makes sense."""
        try:
            async with asyncio.timeout(timeout or HEALTH_SECONDS):
                answer = _unpack(await self._request(self._new_identity(), b"health", _pack({})))
        except (TimeoutError, msgspec.DecodeError):
            return None
        return answer if isinstance(answer, dict) else None

    def _give_up(self, why: str, lost: Callable[[str | None], bool]) -> None:
        gone = [identity for identity, known in self._runs.items() if lost(known)]
        logger.warning(f"env server: {why}; {len(gone)} episodes are lost")
        error = _pack({"success": False, "error": f"EnvServerGone: {why}"})
        for identity in gone:
            future = self._pending.get(identity)  # absent: it was answered in this very turn of the loop
            if future is not None and not future.done():
                future.set_result(error)

    async def start(self, timeout: float) -> None:
        """Until the server answers. Raises TimeoutError."""
        async with asyncio.timeout(timeout):
            while (answer := await self._health(2.0)) is None:
                await asyncio.sleep(START_POLL_SECONDS)
        self.instance, self.taskset = answer.get("instance"), answer.get("taskset")

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        await asyncio.to_thread(self._context.term)
