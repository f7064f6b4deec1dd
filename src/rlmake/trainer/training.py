"""What both loops share: sharded policy, optimizer and schedule, the update, checkpoints, leaving on request."""

import gc
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from loguru import logger

from rlmake import checkpoint as records
from rlmake.core.errors import RunFailed
from rlmake.core.jsonio import write_json
from rlmake.core.rundir import RunContext, step_dir
from rlmake.monitors import Monitors
from rlmake.trainer import checkpoint, gradients, optim, rng, schedule
from rlmake.trainer.experts import RouterStatistics
from rlmake.trainer.families import plan_of
from rlmake.trainer.ledger import Ledger
from rlmake.trainer.metrics import Clock, ckpt_disk
from rlmake.trainer.parallel import parallelise
from rlmake.trainer.policy import make_policy
from rlmake.trainer.saver import Saver
from rlmake.trainer.world import World
from rlmake.transport import ask_half

SAVED_AND_LEFT = 75


class Diverged(RunFailed):
    """Loss or gradient is not a number any more: the weights are those of the step before, nothing was saved.

    A terminal failure: the same configuration would diverge again.
    """

    exit_code = 76


class Training:
    """The state of a run in this rank. `step` is the last one finished; it continues with `step + 1`."""

    def __init__(
        self,
        config: Any,
        ctx: RunContext,
        world: World,
        model: torch.nn.Module,
        facts: dict[str, Any],
        rows: int = 1,
    ):
        """`model`: plain, on the CPU, weights loaded. `facts`: contents of `model.json`. `rows`: in a micro-batch."""
        self.config, self.ctx, self.world, self.facts = config, ctx, world, facts
        rng.seed_all(config.seed, world.rank)
        self.plan = plan_of(model.config.model_type)
        self.model_config = model.config
        self.policy = make_policy(model, config.model, config.model.seq_len * rows, world)
        self.policy.masters = parallelise(self.policy, self.plan, model, config.model, world)
        if routers := self.plan.routers(model):
            self.policy.routing = RouterStatistics(routers)
        self.optimizer = optim.build(config.optim, self.policy.named())
        optim.ensure_state(self.optimizer, config.model.optim_cpu_offload)
        self.factor = schedule.build(config.scheduler, config.optim.lr, config.max_steps)
        self.step = 0
        self.ledger = Ledger(ctx, None, write=world.master)
        self.clock = Clock()
        self.saver = Saver(ctx, world, config.ckpt)
        self._asked_to_leave = False
        signal.signal(signal.SIGUSR1, self._ask_to_leave)
        if config.gc is not None:
            gc.disable()

    def resume(self) -> dict[str, Any] | None:
        """Load the checkpoint that `resume` names; its `state.json`, or None when the run starts afresh.

        The folder's hashes are verified before anything of it is read.
        """
        if self.config.resume is None:
            return None
        asked, run_dir = self.config.resume, self.ctx.run_dir
        folder = Path(self.world.on_master(lambda: str(records.resume_point(run_dir, asked.step, asked.dir))))
        checkpoint.load(folder, self.policy.named(), None if self.skips("optimizer") else self.optimizer, self.world)
        self.policy.refresh()
        state = checkpoint.read_state(folder)
        self.step = state["step"]
        self.ledger = Ledger(self.ctx, state["ledger"], write=self.world.master)
        if self.world.rank < len(state["rng"]):
            rng.restore(state["rng"][self.world.rank])
        if state["world_size"] != self.world.size:
            logger.warning(
                f"{folder} was saved by {state['world_size']} ranks, there are {self.world.size}: the order of samples "
                "continues exactly, sums over ranks are rounded otherwise"
            )
        logger.info(f"resumed from {folder}, step {self.step}")
        return state

    def skips(self, what: str) -> bool:
        """Whether `ckpt.skip_<what>` counts: when forking, and when a run that was started directly is resumed.

        A run of the build that resumes itself after a kill loads everything, or it would not be the same run.
        """
        ours = self.config.resume is not None and self.config.resume.dir is None
        if self.config.ckpt is None or (ours and self.ctx.fingerprint is not None):
            return False
        return getattr(self.config.ckpt, f"skip_{what}")

    def update(self, loss: float, not_a_number: int) -> dict[str, float]:
        """Clip, check, take the optimizer's step `self.step + 1`. Raises `Diverged` on every rank, weights untouched.

        `loss` and `not_a_number` (tokens or rows whose value is none) are already summed over the ranks.
        """
        step = self.step + 1
        lr = self.config.optim.lr * self.factor(step)
        self.policy.sum_gradients()
        norm = gradients.clip((p for _, p in self.policy.named()), self.config.optim.max_norm, self.world)
        if not_a_number or not math.isfinite(norm) or not math.isfinite(loss):
            self._diverged(step, loss, norm, not_a_number)
        optim.set_lr(self.optimizer, lr)
        optim.step(self.optimizer, self.config.model.optim_cpu_offload)
        self.policy.refresh()
        self.optimizer.zero_grad(set_to_none=True)
        self.step = step
        if self.config.gc is not None and step % self.config.gc.interval == 0:
            gc.collect()
        routing = self.policy.routing.take(self.world) if self.policy.routing else {}
        return {"optim/lr": lr, "optim/grad_norm": norm, **routing}

    def record(self, samples: list[str]) -> None:
        """Note the samples of the step just taken in the ledger. Raises `RunFailed` on a full disk."""
        try:
            self.ledger.append(self.step, samples)
        except OSError as error:
            if not records.disk_full(error):
                raise
            self.saver.wait()  # which may be what filled it, and says so
            raise RunFailed(f"{error.filename or self.ctx.run_dir}: no space left on the disk") from error

    def _diverged(self, step: int, loss: float, norm: float, not_a_number: int) -> None:
        cause = f"{not_a_number} values are not a number" if not_a_number else f"loss {loss}, gradient norm {norm}"
        record = {"schema": 1, "step": step, "reason": cause, "attempt": self.ctx.attempt}
        self.world.on_master(lambda: write_json(self.ctx.run_dir / "diverged.json", record))
        self.saver.wait()
        raise Diverged(f"step {step} diverged: {cause}; the weights of step {step - 1} were not changed")

    def end_step(
        self,
        metrics: dict[str, float],
        start: float,
        monitors: Monitors,
        extra: Callable[[], dict[str, Any]],
        halves: tuple[str, ...],
    ) -> bool:
        """Report the step that began at `start`, and save it where that is due; whether to leave now, as asked."""
        metrics |= self.clock.take() | {"time/step": time.perf_counter() - start}
        monitors.log(self.step, metrics)  # before the save: a kill behind it must not lose the row
        leaving = self.leaving()
        if self.checkpoint_due(leaving):
            with self.clock.measure("save_ckpt"):
                self.save(extra(), halves)
            monitors.log(self.step, self.clock.take() | ckpt_disk(step_dir(self.ctx.run_dir, self.step).parent))
        if leaving and not self.done():
            self.saver.wait()
            logger.info(f"saved step {self.step} and leaving, as asked")
            return True
        return False

    def checkpoint_due(self, leaving: bool) -> bool:
        """Whether the step just finished is to be saved: by interval, the last one, or on request."""
        if self.config.ckpt is None:
            return leaving
        interval = self.config.ckpt.interval
        return leaving or self.step == self.config.max_steps or (interval is not None and self.step % interval == 0)

    def save(self, extra: dict[str, Any], halves: tuple[str, ...]) -> None:
        """Begin to save step `self.step` (see `Saver`), this half of it and the record of all. Every rank calls it."""
        folder = step_dir(self.ctx.run_dir, self.step)
        state = {
            "step": self.step,
            "world_size": self.world.size,
            "rng": self.world.gather(rng.capture()),
            "ledger": self.ledger.value,
            **extra,
        }
        if "orchestrator" in halves and self.world.master and not (folder / "orchestrator.json").exists():
            ask_half(self.ctx.run_dir, self.step)  # no interval foresaw this step
        self.saver.save(self.step, self.tensors(), state, self.facts, halves)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds, by its keys: the tensors themselves."""
        return checkpoint.tensors_of(self.policy.named(), self.optimizer)

    def leaving(self) -> bool:
        """Whether any rank was asked (SIGUSR1, or by the file for other nodes) to save now and leave with code 75.

        Every step asks, so this is also where a save that failed behind the training's back ends it.
        """
        asked = self._asked_to_leave or (self.world.master and self.ctx.leave_file.exists())
        if not self.world.any(asked or self.saver.failed):
            return False
        self.saver.wait()
        return True

    def _ask_to_leave(self, *_: object) -> None:
        self._asked_to_leave = True

    def done(self) -> bool:
        return self.config.max_steps is not None and self.step >= self.config.max_steps


def prepare(config: Any) -> None:
    """Process-wide settings of torch that must precede any computation."""
    torch.set_float32_matmul_precision(config.matmul_precision)
    if config.deterministic and config.device == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or products may differ from run to run
        torch.use_deterministic_algorithms(True)  # with warnings only, flash attention would stay as it is
        torch._inductor.config.deterministic = True  # no kernel of a compiled block is chosen by timing it
