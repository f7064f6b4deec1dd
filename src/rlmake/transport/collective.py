"""Weights from the trainer's master to the engines' workers by broadcast: NCCL between GPUs, gloo between CPUs.

Rank 0 sends, ranks 1 … N receive. They meet at a store that the sender hosts; a receiver whose NCCL differs from the
sender's says so before anything is joined. A version travels as flat byte buckets of whole tensors in the order of its
plan (`[{"name", "shape"}]`, one dtype for all), so both sides cut alike and nothing is described on the way. A transfer
that one side has left cannot be repeated: the group is spent, and the error names who is missing.
"""

import json
import math
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from rlmake.core.errors import RunFailed, UserError

BUCKET_BYTES = 256 << 20
POLL_S, SETTLE_S = 0.0005, 0.5
Plan = list[dict[str, Any]]


def nccl_version() -> str | None:
    """NCCL of this process's torch, as `2.28.9`; None where it has none."""
    if not torch.cuda.is_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def plan_of(named: Iterable[tuple[str, Tensor]]) -> Plan:
    return [{"name": name, "shape": list(tensor.shape)} for name, tensor in named]


def buckets(plan: Plan, itemsize: int, limit: int = BUCKET_BYTES) -> Iterator[Plan]:
    """Consecutive tensors of at most `limit` bytes together; a larger one stands alone."""
    held: Plan = []
    size = 0
    for entry in plan:
        more = math.prod(entry["shape"]) * itemsize
        if held and size + more > limit:
            yield held
            held, size = [], 0
        held.append(entry)
        size += more
    if held:
        yield held


class _Group:
    """A process group of its own beside whatever the process has, and how to wait on it with a deadline."""

    def __init__(self, backend: str, device: torch.device, timeout: float):
        self.backend, self.device, self.timeout = backend, device, timeout
        self.group: Any = None
        self.spent: str | None = None

    def _join(self, store: TCPStore, session: str, rank: int, world: int) -> None:
        """Make the group and prove it by one broadcast. Raises `RunFailed` after the timeout."""

        def join() -> None:
            try:
                prefix, limit = PrefixStore(f"{session}/group", store), timedelta(seconds=self.timeout)
                if self.backend == "nccl":
                    from torch.distributed import ProcessGroupNCCL

                    torch.cuda.set_device(self.device)
                    options = ProcessGroupNCCL.Options()
                    options._timeout = limit
                    self.group = ProcessGroupNCCL(prefix, rank, world, options)
                else:
                    self.group = ProcessGroupGloo(prefix, rank, world, limit)
                probe = torch.full((1,), rank, device=self.device)
                self.group.broadcast(probe, 0).wait()
                if probe.item() != 0:
                    raise RunFailed("the group of weight transfer does not transfer")
            except Exception as error:
                failures.append(error)

        failures: list[Exception] = []
        # Joining blocks in the library without a deadline of its own, so it does so elsewhere.
        thread = threading.Thread(target=join, daemon=True)
        thread.start()
        thread.join(self.timeout)
        if thread.is_alive():
            self._spend(f"not all of its {world} members joined within {self.timeout:g} s")
        if failures:
            self._spend(f"joining failed: {failures[0]}")

    def _done(self, work: Any, late: Callable[[], str]) -> None:
        """Wait for a transfer, or fail with what `late` says then."""
        deadline = time.monotonic() + self.timeout
        while not work.is_completed():
            if time.monotonic() > deadline:
                self._spend(late())
            time.sleep(POLL_S)
        try:
            work.wait()
        except RuntimeError as error:
            self._spend(f"{late()} ({_line(error)})")

    def _spend(self, reason: str) -> None:
        self.spent = f"weight transfer by {self.backend}: {reason}"
        raise RunFailed(self.spent)

    def _check(self) -> None:
        if self.spent:
            raise RunFailed(f"{self.spent}; the group is spent")


class Sender(_Group):
    """The trainer's master. `rendezvous` tells receivers where to come; `form` meets them, then `send` per version."""

    def __init__(self, backend: str, device: torch.device, host: str, port: int, timeout: float):
        super().__init__(backend, device, timeout)
        self.session = uuid.uuid4().hex
        address = "127.0.0.1" if host == "localhost" else host
        try:
            self.store = TCPStore(address, port, None, True, timedelta(seconds=timeout), wait_for_workers=False)
        except (RuntimeError, ValueError) as error:
            raise UserError(f"weight_broadcast.port: {host}:{port} cannot be listened on: {_line(error)}") from None
        self.rendezvous = {
            "host": address, "port": self.store.port, "session": self.session, "backend": backend,
            "nccl": nccl_version() if backend == "nccl" else None,
        }  # fmt: skip
        self.names: list[str] = []

    def form(self, names: list[str]) -> None:
        """Meet the receivers; `names[i]` is rank i + 1, for messages. Raises `RunFailed` naming who did not come."""
        self.names = names
        self._await("joined")
        self._join(self.store, self.session, 0, len(names) + 1)

    def send(self, version: int, tensors: Iterable[tuple[str, Tensor]], plan: Plan, dtype: torch.dtype) -> None:
        """Send the tensors of `plan`, in its order, as `dtype`; returns when every receiver has said that it has them.

        Raises `RunFailed` naming the receivers that did not within the timeout.
        """
        self._check()
        source = iter(tensors)
        for bucket in buckets(plan, dtype.itemsize):
            flat = torch.empty(sum(math.prod(entry["shape"]) for entry in bucket), dtype=dtype, device=self.device)
            at = 0
            for entry in bucket:
                name, tensor = next(source)
                if name != entry["name"]:
                    raise RunFailed(f"weight transfer: {name} comes where {entry['name']} was announced")
                flat[at : at + tensor.numel()].copy_(tensor.reshape(-1))
                at += tensor.numel()
            work = self.group.broadcast(flat.view(torch.uint8), 0)
            self._done(work, lambda: self._late(version))
        self._await(f"got/{version}")

    def _late(self, version: int) -> str:
        time.sleep(SETTLE_S)  # who has it is just saying so
        return f"v{version} was not taken within {self.timeout:g} s by {self._missing(f'got/{version}')}"

    def _await(self, what: str) -> None:
        keys = [f"{self.session}/{what}/{rank + 1}" for rank in range(len(self.names))]
        try:
            self.store.wait(keys, timedelta(seconds=self.timeout))
        except RuntimeError:
            self._spend(f"after {self.timeout:g} s '{what}' is missing from {self._missing(what)}")

    def _missing(self, what: str) -> str:
        """Names of the receivers that have not said `what`."""
        return ", ".join(
            name for rank, name in enumerate(self.names, 1) if not self.store.check([f"{self.session}/{what}/{rank}"])
        )


class Receiver(_Group):
    """An engine's worker; rank 1 … N of the group. The constructor meets the sender, `receive` takes one version.

    Raises `UserError` where this process's NCCL is not the sender's, before anything is joined.
    """

    def __init__(self, rendezvous: dict[str, Any], rank: int, world: int, device: torch.device, timeout: float):
        super().__init__(rendezvous["backend"], device, timeout)
        self.session, self.rank = rendezvous["session"], rank
        if self.backend == "nccl" and nccl_version() != rendezvous["nccl"]:
            raise UserError(f"NCCL {nccl_version()} here, {rendezvous['nccl']} in the trainer")
        where, limit = (rendezvous["host"], rendezvous["port"]), timedelta(seconds=timeout)
        try:
            self.store = TCPStore(*where, None, False, limit, wait_for_workers=False)
        except RuntimeError as error:
            raise UserError(f"the trainer is not at {where[0]}:{where[1]}: {_line(error)}") from None
        self.store.set(f"{self.session}/joined/{rank}", json.dumps({"nccl": nccl_version()}))
        self._join(self.store, self.session, rank, world)

    def receive(self, version: int, plan: Plan, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """`(name, tensor)` of a version, views of a buffer that holds until the next bucket."""
        self._check()
        for bucket in buckets(plan, dtype.itemsize):
            sizes = [math.prod(entry["shape"]) for entry in bucket]
            flat = torch.empty(sum(sizes), dtype=dtype, device=self.device)
            work = self.group.broadcast(flat.view(torch.uint8), 0)
            self._done(work, lambda: f"v{version} did not come from the trainer within {self.timeout:g} s")
            for entry, part in zip(bucket, flat.split(sizes), strict=True):
                yield entry["name"], part.view(entry["shape"])
        self.store.set(f"{self.session}/got/{version}/{self.rank}", "1")


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
