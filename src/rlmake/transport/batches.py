"""Batches from the orchestrator to the trainer's ranks: by files, or by ZMQ.

Both are pull: a receiver asks for the step it wants, so nothing is dropped, and either side may be restarted.
"""

import shutil
import time
from pathlib import Path
from typing import Any, Protocol

from loguru import logger

from rlmake.core.errors import UserError
from rlmake.core.jsonio import write_bytes
from rlmake.core.rundir import RunContext, batch_dir, numbered
from rlmake.transport.types import Batch, decode_batch, encode_batch

POLL_SECONDS, WARN_SECONDS = 0.02, 60.0
KEEP_STEPS = 2  # batch s is shipped when v(s-2) exists, so batches up to s-2 have been trained; more with a lag


class BatchSender(Protocol):
    def send(self, batches: list[Batch]) -> None:
        """Hand over one step: one batch per rank, in rank order. Does not wait for the ranks to fetch it."""

    def fetched(self) -> bool:
        """Whether what was sent last can no longer be lost by closing."""

    def close(self) -> None: ...


class BatchReceiver(Protocol):
    def receive(self, step: int, timeout: float | None = None) -> Batch:
        """This rank's batch of `step`; blocks. `UserError` after `timeout` seconds or for a foreign batch."""

    def close(self) -> None: ...


def check_step(batches: list[Batch], ctx: RunContext) -> int:
    """The step of a full set of batches; raises ValueError when they do not belong together."""
    step, world = batches[0].step, len(batches)
    for rank, batch in enumerate(batches):
        if (batch.run_id, batch.attempt, batch.step, batch.rank, batch.world) != (
            ctx.run_id, ctx.attempt, step, rank, world,
        ):  # fmt: skip
            raise ValueError(f"batch of rank {batch.rank}, step {batch.step} in the place of rank {rank}, step {step}")
    return step


class FileSender:
    """`batches/step_<n>/rank_<r>.bin`, each renamed into place when whole; older steps are removed."""

    def __init__(self, ctx: RunContext, keep: int = KEEP_STEPS):
        self.ctx, self.keep = ctx, keep

    def send(self, batches: list[Batch]) -> None:
        step = check_step(batches, self.ctx)
        for batch in batches:
            write_bytes(batch_path(self.ctx.run_dir, step, batch.rank), encode_batch(batch))
        for old, folder in numbered(self.ctx.run_dir / "batches").items():
            if old <= step - self.keep:
                shutil.rmtree(folder, ignore_errors=True)

    def fetched(self) -> bool:
        return True  # files stay

    def close(self) -> None:
        pass


class FileReceiver:
    """Waits for its rank's file of a step."""

    def __init__(self, ctx: RunContext, rank: int, world: int):
        self.ctx, self.rank, self.world = ctx, rank, world

    def receive(self, step: int, timeout: float | None = None) -> Batch:
        path = batch_path(self.ctx.run_dir, step, self.rank)
        wait_for(path.exists, timeout, f"rank {self.rank}: batch of step {step} from the orchestrator ({path})")
        return decode_batch(
            path.read_bytes(),
            run_id=self.ctx.run_id,
            attempt=self.ctx.attempt,
            step=step,
            rank=self.rank,
            world=self.world,
            origin=str(path),
        )

    def close(self) -> None:
        pass


def batch_path(run_dir: Path, step: int, rank: int) -> Path:
    return batch_dir(run_dir, step) / f"rank_{rank}.bin"


def wait_for(ready: Any, timeout: float | None, what: str, poll: float = POLL_SECONDS) -> None:
    """Poll `ready()`; a warning each minute, a `UserError` naming `what` after `timeout` seconds."""
    start = time.monotonic()
    warned = start
    while not ready():
        now = time.monotonic()
        if timeout is not None and now - start > timeout:
            raise UserError(f"waited {timeout:g} s in vain for {what}")
        if now - warned > WARN_SECONDS:
            logger.warning(f"waiting for {what} since {now - start:.0f} s")
            warned = now
        time.sleep(poll)


def open_sender(transport: Any, ctx: RunContext, keep: int = KEEP_STEPS) -> BatchSender:
    """The sender that `rollout_transport` (`type` filesystem or zmq) names; it holds the last `keep` steps."""
    if transport.type == "filesystem":
        return FileSender(ctx, keep)
    from rlmake.transport.zmq import ZmqSender

    return ZmqSender(ctx, transport.host, transport.port, keep)


def open_receiver(transport: Any, ctx: RunContext, rank: int, world: int) -> BatchReceiver:
    """The receiver of one trainer rank for the same."""
    if transport.type == "filesystem":
        return FileReceiver(ctx, rank, world)
    from rlmake.transport.zmq import ZmqReceiver

    return ZmqReceiver(ctx, transport.host, transport.port, rank, world)
