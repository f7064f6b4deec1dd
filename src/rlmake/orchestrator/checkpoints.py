"""The orchestrator's half of a checkpoint: all that is needed to collect the batch behind step n as if nothing was.

A snapshot is taken at every shipped batch and the last few are kept in memory. Written is the one of a step that is
due (by interval, or the last), or that the trainer asks for (`rlmake.transport.asks`).

    checkpoints/step_<n>/orchestrator/state.json      counters, cursors, states of samplers and algorithms, totals
    checkpoints/step_<n>/orchestrator/queue.msgpack   traces waiting, and batches collected ahead
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from loguru import logger

from rlmake import checkpoint
from rlmake.core.errors import UserError
from rlmake.core.jsonio import read_json, write_bytes, write_json
from rlmake.core.rundir import RunContext, step_dir
from rlmake.orchestrator.records import Ahead, Unit, Waiting
from rlmake.transport import answered, asked_halves
from rlmake.transport.types import decode_as, encode_any

SCHEMA = 1
HALF, STATE, QUEUE = "orchestrator", "state.json", "queue.msgpack"
KEPT, POLL_SECONDS = 3, 0.1


@dataclass(frozen=True)
class Snapshot:
    """The state behind step `step`; records in `waiting` are never changed afterwards."""

    step: int
    state: dict[str, Any]
    waiting: Waiting


class Checkpoints:
    """`capture()` gives `(state, queue)` of the moment. With a lag, step n's snapshot holds n+1 … n+lag as well."""

    def __init__(
        self, config: Any, ctx: RunContext, lag: int, capture: Callable[[], tuple[dict[str, Any], list[Unit]]]
    ):
        self.config, self.ctx, self.lag, self.capture = config, ctx, lag, capture
        self.ahead: list[Ahead] = []
        self.kept: dict[int, Snapshot] = {}
        self.seconds = 0.0  # spent writing since the last report
        self._writing = asyncio.Lock()

    def due(self, step: int) -> bool:
        every = self.config.ckpt.interval if self.config.ckpt else None
        last = self.config.ckpt is not None and step == self.config.max_steps
        return step >= 1 and (last or (every is not None and step % every == 0))

    async def after(self, step: int, units: list[Unit]) -> None:
        """Batch `step` was collected (and shipped, unless it lies beyond the last step): snapshot, write if due."""
        self.ahead = [*self.ahead, Ahead(step, units)][-self.lag :] if self.lag else []
        behind = step - self.lag
        state, queue = self.capture()
        waiting = Waiting(queue, [batch for batch in self.ahead if batch.step > behind])
        self.kept[behind] = Snapshot(behind, {"schema": SCHEMA, "step": behind} | state, waiting)
        for old in [kept for kept in self.kept if kept <= behind - KEPT]:
            del self.kept[old]
        if self.due(behind):
            await self.write(behind)

    async def answer(self) -> None:
        """In the background: write the halves that the trainer asks for."""
        while True:
            for step in asked_halves(self.ctx.run_dir):
                if step in self.kept:
                    await self.write(step)
                    answered(self.ctx.run_dir, step)
            await asyncio.sleep(POLL_SECONDS)

    async def write(self, step: int) -> None:
        """Write the half of a kept step, once."""
        async with self._writing:
            folder = step_dir(self.ctx.run_dir, step)
            if (folder / f"{HALF}.json").exists():
                return
            start = time.monotonic()
            await asyncio.to_thread(_write, folder, self.kept[step])
            self.seconds += time.monotonic() - start


def _write(folder: Path, snapshot: Snapshot) -> None:
    with checkpoint.writing(folder, HALF) as half:
        write_json(half / STATE, snapshot.state)
        write_bytes(half / QUEUE, encode_any(snapshot.waiting))


def resume_folder(config: Any, run_dir: Path) -> Path | None:
    """The checkpoint to continue behind; the launcher has verified it. None: a fresh start."""
    if config.resume is None:
        return None
    if config.resume.dir is not None:
        return Path(config.resume.dir)
    if config.resume.step is not None:
        return step_dir(run_dir, config.resume.step)
    return checkpoint.resume_point(run_dir)


def load(folder: Path) -> Snapshot:
    """The half in a checkpoint's folder; `UserError` naming what is missing, damaged or unknown."""
    state = read_json(folder / HALF / STATE)
    if state.get("schema") != SCHEMA:
        raise UserError(f"{folder / HALF / STATE}: schema {state.get('schema')}, this version reads {SCHEMA}")
    path = folder / HALF / QUEUE
    try:
        waiting = decode_as(path.read_bytes(), Waiting)
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(f"{path}: not readable: {error}") from None
    logger.info(f"resuming behind step {state['step']}: {len(waiting.queue)} traces waiting, {folder}")
    return Snapshot(state["step"], state, waiting)
