"""Batches over ZMQ: each rank asks for the step it wants (DEALER), the orchestrator answers when it has it (ROUTER).

Request and reply instead of publish and subscribe: nothing is dropped at a high-water mark, the answer is for the
asked step or an error, and a restarted side simply asks (or is asked) again.
"""

import contextlib
import threading
import time
from pathlib import Path

import msgspec
import zmq
from loguru import logger

from rlmake.core.errors import UserError
from rlmake.core.jsonio import read_json, write_json
from rlmake.core.rundir import RunContext
from rlmake.transport.batches import KEEP_STEPS, WARN_SECONDS, check_step
from rlmake.transport.types import Batch, decode_as, decode_batch, encode_any, encode_batch

ASK_AGAIN_SECONDS = 5.0


def address_file(ctx: RunContext) -> Path:
    """Where the port is published when the configuration leaves it to the system (port 0)."""
    return ctx.config_dir / "resolved" / "batches.address"


class ZmqSender:
    """Holds the last steps' batches and answers requests from a thread of its own; `send` never blocks.

    Frames of a reply: kind (`batch` or `error`), step, data.
    """

    def __init__(self, ctx: RunContext, host: str, port: int, keep: int = KEEP_STEPS):
        self.ctx, self.keep = ctx, keep
        self._held: dict[int, list[bytes]] = {}
        self._waiting: dict[tuple[bytes, int], tuple[int, int]] = {}  # (peer, step) -> (rank, world)
        self._unfetched: set[int] = set()  # ranks that have not had the newest step yet
        self._lock = threading.Lock()
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 2000
        where = "127.0.0.1" if host == "localhost" else "0.0.0.0"
        try:
            self._router.bind(f"tcp://{where}:{port or '*'}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise UserError(f"orchestrator.rollout_transport.port {port}: {error}") from None
        self.port = int(self._router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        if port == 0:
            write_json(address_file(ctx), {"run_id": ctx.run_id, "attempt": ctx.attempt, "port": self.port})
        self._wake_in, self._wake_out = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._wake_out.bind("inproc://batch-sender")
        self._wake_in.connect("inproc://batch-sender")
        self._thread = threading.Thread(target=self._serve, name="batch-sender", daemon=True)
        self._thread.start()

    def send(self, batches: list[Batch]) -> None:
        step = check_step(batches, self.ctx)
        encoded = [encode_batch(batch) for batch in batches]
        with self._lock:
            self._held[step] = encoded
            for old in [held for held in self._held if held <= step - self.keep]:
                del self._held[old]
            self._unfetched = set(range(len(batches)))
            self._wake_in.send(b"")

    def fetched(self) -> bool:
        with self._lock:
            return not self._unfetched

    def close(self) -> None:
        self._wake_in.send(b"stop")
        self._thread.join(timeout=5)
        self._context.destroy(linger=2000)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake_out, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._wake_out in ready and self._wake_out.recv() == b"stop":
                return
            if self._router in ready:
                peer, request = self._router.recv_multipart()
                self._register(peer, request)
            self._answer()

    def _register(self, peer: bytes, request: bytes) -> None:
        try:
            run_id, attempt, step, rank, world = decode_as(request, tuple[str, int, int, int, int])
        except msgspec.DecodeError:
            return  # not one of ours
        if (run_id, attempt) != (self.ctx.run_id, self.ctx.attempt):
            fault = (
                f"the orchestrator serves run {self.ctx.run_id}, attempt {self.ctx.attempt}, not {run_id}, {attempt}"
            )
            self._router.send_multipart([peer, b"error", str(step).encode(), fault.encode()])
            return
        self._waiting[peer, step] = (rank, world)

    def _answer(self) -> None:
        with self._lock:
            held = dict(self._held)
        for (peer, step), (rank, world) in list(self._waiting.items()):
            if step in held and world == len(held[step]) and 0 <= rank < world:
                kind, data = b"batch", held[step][rank]
            elif step in held:
                kind, data = b"error", f"packed for {len(held[step])} ranks, asked by rank {rank} of {world}".encode()
            elif held and step < min(held):
                kind, data = b"error", f"gone, the orchestrator holds steps {sorted(held)}".encode()
            else:
                continue  # not collected yet
            self._router.send_multipart([peer, kind, str(step).encode(), data])
            del self._waiting[peer, step]
            with self._lock:
                if kind == b"batch" and step == max(self._held):
                    self._unfetched.discard(rank)


class ZmqReceiver:
    """One trainer rank's side."""

    def __init__(self, ctx: RunContext, host: str, port: int, rank: int, world: int):
        self.ctx, self.host, self.port, self.rank, self.world = ctx, host, port, rank, world
        self._context = zmq.Context()
        self._dealer: zmq.Socket | None = None

    def _connect(self) -> bool:
        """Connect once the port is known; False while the orchestrator has not published it."""
        if self._dealer is None:
            port = self.port
            if port == 0:
                with contextlib.suppress(UserError):
                    record = read_json(address_file(self.ctx))
                    port = record["port"] if record["attempt"] == self.ctx.attempt else 0
            if port:
                self._dealer = self._context.socket(zmq.DEALER)
                self._dealer.linger = 0
                self._dealer.connect(f"tcp://{self.host}:{port}")
        return self._dealer is not None

    def receive(self, step: int, timeout: float | None = None) -> Batch:
        start = warned = time.monotonic()
        asked = -ASK_AGAIN_SECONDS
        request = encode_any((self.ctx.run_id, self.ctx.attempt, step, self.rank, self.world))
        origin = (
            f"batch of step {step} for rank {self.rank} from the orchestrator (tcp://{self.host}:{self.port or '?'})"
        )
        while True:
            now = time.monotonic()
            if timeout is not None and now - start > timeout:
                raise UserError(f"waited {timeout:g} s in vain for {origin}")
            if now - warned > WARN_SECONDS:
                logger.warning(f"waiting for {origin} since {now - start:.0f} s")
                warned = now
            if not self._connect():
                time.sleep(0.05)
                continue
            if now - asked >= ASK_AGAIN_SECONDS:
                self._dealer.send(request)
                asked = now
            if not self._dealer.poll(100):
                continue
            kind, answered, data = self._dealer.recv_multipart()
            if answered != str(step).encode():
                continue  # a second answer to a question that was asked again
            if kind == b"error":
                raise UserError(f"{origin}: {data.decode()}")
            return decode_batch(
                data,
                run_id=self.ctx.run_id,
                attempt=self.ctx.attempt,
                step=step,
                rank=self.rank,
                world=self.world,
                origin=origin,
            )

    def close(self) -> None:
        self._context.destroy(linger=0)
