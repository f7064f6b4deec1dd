"""Publishing each new version of the policy: by a group of the master and the engines' workers, or by files."""

from collections.abc import Iterator
from pathlib import Path

import torch
from loguru import logger
from torch import Tensor

from rlmake import checkpoint as records
from rlmake.core.errors import RunFailed
from rlmake.models import lora
from rlmake.models.digest import digest
from rlmake.trainer.training import Training
from rlmake.trainer.weights import whole, write_adapter, write_weights
from rlmake.transport import WeightSender, broadcast


class Sender:
    """`send` publishes `v{training.step}` and waits until the receiver has it; every rank calls it.

    A receiver that cannot join the group is served by files from then on, with a warning: nothing was joined yet.
    """

    def __init__(self, training: Training):
        self.training, self.config = training, training.config.weight_broadcast
        self.sender = WeightSender(training.ctx.run_dir, training.ctx) if training.world.master else None
        adapter = training.facts["lora"]
        self.adapter = None if adapter is None else lora.Adapter(**adapter)
        self.by_group = self.config.type == "nccl"
        self.group = None
        self.dtype = torch.float32 if training.policy.exact else torch.bfloat16
        self.seconds: dict[str, float] = {}  # of the last version by files, by part; see `write_weights`

    def send(self) -> None:
        if self.by_group and self._by_group(self.training.step):
            return
        kind = "full" if self.adapter is None else "adapter"
        on_master, timeout = self.training.world.on_master, self.config.timeout
        broadcast(self.sender, self.training.step, self._write, on_master, timeout=timeout, kind=kind)

    def _write(self, folder: Path | None) -> dict[str, str] | None:
        """Raises `RunFailed` on a full disk; what was written is removed, and a save in the air ends first."""
        named = self.training.policy.named()
        try:
            if self.adapter is None:
                return write_weights(named, folder, self.dtype, self.seconds)
            return write_adapter(named, self.adapter, folder, self.dtype)
        except Exception as error:
            if folder is None or not records.disk_full(error, folder):
                raise
            freed = records.abort(folder)
            self.training.saver.wait()  # which may be what filled it, and says so
            raise RunFailed(
                f"{folder}: no space left on the disk while the weights were written; what was written is removed "
                f"({freed / 2**20:.1f} MiB freed), checkpoints are untouched; free some space and start again"
            ) from error

    def _by_group(self, version: int) -> bool:
        from rlmake.transport.collective import plan_of

        world = self.training.world
        plan = plan_of(self.training.policy.named())
        digests = None
        if getattr(self.training.config, "check_weights", False):
            digests = {name: digest(tensor) for name, tensor in self._gathered()}
        refused = world.on_master(lambda: self._meet(version, plan, digests))
        if refused:
            if world.master:
                logger.warning(f"weights go by files from here: {refused}")
            self.by_group = False
            return False
        gathered = self._gathered()
        if self.group is not None:
            self.group.send(version, gathered, plan, self.dtype)
        for _ in gathered:  # every rank takes part in the gathering
            pass
        world.on_master(lambda: self.sender.finish())
        return True

    def _meet(self, version: int, plan: list[dict], digests: dict[str, str] | None) -> str | None:
        """Offer a version and gather the receivers; why they do not come, if so."""
        from rlmake.transport import collective

        device, config = self.training.world.device, self.config
        group = self.group or collective.Sender(config.backend, device, config.host, config.port, config.timeout)
        offer = {"rendezvous": group.rendezvous, "plan": plan, "dtype": str(self.dtype).removeprefix("torch.")}
        self.sender.prepare(version)
        self.sender.offer(version, "nccl", group=offer | {"digests": digests})
        reply = self.sender.wait_receiver(config.timeout)
        if "refused" in reply:
            return reply["refused"]
        if self.group is None:
            group.form(reply["receivers"])
            self.group = group
        self.sender.start()
        return None

    def _gathered(self) -> Iterator[tuple[str, Tensor]]:
        for name, p in self.training.policy.named():
            yield name, whole(p, self.dtype)
