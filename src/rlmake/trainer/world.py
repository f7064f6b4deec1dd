"""The ranks of the trainer: process group, device mesh, and the few collectives that the loops need.

Mesh axes are named as in spec rl-and-trainer.md 3.1: `dp_replicate` (copies of the model), `dp_shard` (shards of one).
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rlmake.core.errors import ConfigError, Fault, RunFailed, UserError


@dataclass(frozen=True)
class Context:
    """Neighbouring ranks that share rows."""

    group: Any
    rank: int
    size: int


@dataclass(frozen=True)
class World:
    """`control` is a gloo group of all ranks for small host-side messages.

    `context`: the ranks that share each row with this one, and this one's place among them; None where it has its own.
    """

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh
    control: Any
    context: "Context | None" = None

    @property
    def rows(self) -> tuple[int, int]:
        """(which share of the rows is this rank's, how many shares there are)."""
        size = self.context.size if self.context else 1
        return self.rank // size, self.size // size

    @property
    def unsharded(self) -> bool:
        """Each rank is a GPU that holds a whole copy of the model."""
        return self.device.type == "cuda" and self.mesh["dp_shard"].size() == 1

    @property
    def master(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Sum over all ranks, exactly equal on each."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def sum_over_shards(self, values: Tensor) -> Tensor:
        """Sum over the ranks that together hold one copy of the model."""
        group = self.mesh["dp_shard"].get_group()
        if dist.get_world_size(group) > 1:
            values = values.to(self.device)
            dist.all_reduce(values, group=group)
        return values

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        if self.size == 1:
            return flag
        value = torch.tensor(int(flag))
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.control)
        return bool(value.item())

    def gather(self, value: Any) -> list[Any]:
        """`[value of each rank]`, on every rank; small host-side objects."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.control)
        return found

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.control)

    def on_master(self, action: Callable[[], Any]) -> Any:
        """Run `action` on the master, hold every rank until it has ended; its result, or its failure, everywhere."""
        result, failure = None, None
        if self.master:
            try:
                result = action()
            except Exception as error:
                failure = error
        if self.size > 1:
            box = [(result, None if failure is None else f"{type(failure).__name__}: {failure}")]
            dist.broadcast_object_list(box, src=0, group=self.control)
            result, text = box[0]
            if failure is None and text is not None:
                raise RunFailed(f"the trainer's master failed: {text}")
        if failure is not None:
            raise failure
        return result

    def close(self) -> None:
        dist.destroy_process_group()


def start(*, gpu: bool, threads: int, dp_replicate: int = 1, cp: int = 1, timeout_s: float = 3600.0) -> World:
    """Join the process group that torchrun's environment names; started by hand, be a world of one.

    `threads` are this process's on a CPU. The ranks that share a row (`cp`) also share the model's shards. Raises
    `ConfigError` when the ranks do not fit `dp_replicate` and `cp`.
    """
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if size % dp_replicate:
        raise ConfigError(Fault(f"{dp_replicate} does not divide the {size} ranks", "model.dp_replicate"))
    if size // dp_replicate % cp:
        raise ConfigError(Fault(f"{cp} does not divide the {size // dp_replicate} ranks of a copy", "model.cp"))
    if gpu:
        if not torch.cuda.is_available():
            raise UserError("no GPU here that torch can use; deployment.num_train_gpus = 0 trains on the CPU")
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(threads)
        device = torch.device("cpu")
    backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
    limits = {"timeout": timedelta(seconds=timeout_s), "device_id": device if gpu else None}
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend, **limits)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **limits)
    mesh = init_device_mesh(
        device.type, (dp_replicate, size // dp_replicate), mesh_dim_names=("dp_replicate", "dp_shard")
    )
    control = dist.new_group(backend="gloo", timeout=limits["timeout"])
    return World(rank, size, device, mesh, control, _context(device, rank, size, cp))


def _context(device: torch.device, rank: int, size: int, cp: int) -> Context | None:
    if cp == 1:
        return None
    mesh = init_device_mesh(device.type, (size // cp, cp), mesh_dim_names=("rows", "cp"))
    return Context(mesh["cp"].get_group(), rank % cp, cp)
