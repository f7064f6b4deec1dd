"""Saving behind the training's back: the loop waits for a copy in memory, a thread writes and publishes it.

What is saved is the state of one moment, so a run that saves is bit for bit the run that doesn't. One save is in the
air at a time: the next one waits for it. A save that fails ends the run at the end of the step in progress, on every
rank, with the line that says why; what a full disk refused is removed first, earlier checkpoints stay.
"""

import copy
import dataclasses
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from loguru import logger
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from rlmake import checkpoint as records
from rlmake.core.rundir import RunContext, step_dir
from rlmake.trainer import checkpoint
from rlmake.trainer.world import World

Tensors = dict[str, Tensor]
Record = dict[str, Any]
TIMEOUT = timedelta(hours=2)  # of a collective among the writing threads: as slow as a disk may be


class Saver:
    """Every rank has one and calls the same methods in the same order; `ckpt` is the table of that name, or None."""

    def __init__(self, ctx: RunContext, world: World, ckpt: Any):
        self.ctx, self.ckpt = ctx, ckpt
        # Threads of their own talk through a group of their own: messages of the loop go on meanwhile.
        self.world = dataclasses.replace(world, control=dist.new_group(backend="gloo", timeout=TIMEOUT))
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def failed(self) -> bool:
        """Whether the save in the air has failed; `wait` raises it."""
        return self._failure is not None

    def save(
        self,
        step: int,
        tensors: dict[str, Tensor],
        state: dict[str, Any],
        facts: dict[str, Any],
        halves: tuple[str, ...],
    ) -> None:
        """Copy, then write this half of `step`, publish the whole and apply retention in the background.

        Raises what went wrong with the save before.
        """
        self.wait()
        staged, state = self._copy(tensors), copy.deepcopy(state)
        self._thread = threading.Thread(
            target=self._run, args=(step, staged, state, facts, halves), name=f"save-{step}", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Hold until nothing is in the air. Raises what went wrong with it, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _copy(self, tensors: Tensors) -> Tensors:
        """The tensors of this moment, in the host's memory; pinned while they are copied from a GPU.

        A stager is good for one copy: torch 2.11's forgets how to copy a dictionary after the first on a GPU.
        """
        pin = self.world.device.type == "cuda"
        options = StagingOptions(
            use_pinned_memory=pin, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=pin
        )
        return DefaultStager(options).stage(tensors)

    def _run(self, step: int, *what: Any) -> None:
        start = time.monotonic()
        try:
            self._write(step, *what)
            logger.info(f"checkpoint step_{step} complete, written in {time.monotonic() - start:.1f} s")
        except BaseException as error:
            self._failure = error

    def _write(
        self,
        step: int,
        tensors: dict[str, Tensor],
        state: dict[str, Any],
        facts: dict[str, Any],
        halves: tuple[str, ...],
    ) -> None:
        run_dir = self.ctx.run_dir
        checkpoint.save(step_dir(run_dir, step), tensors, state, facts, self.world)

        def publish() -> None:
            records.publish(
                run_dir, step, halves, policy_version=step, world_size=self.world.size, ledger=state["ledger"],
                ctx=self.ctx,
            )  # fmt: skip
            if self.ckpt is not None:
                records.retain(run_dir, self.ckpt.keep_last, self.ckpt.keep_interval)

        self.world.on_master(publish)
