"""What vLLM's workers do for us, as a worker extension: called by name through `collective_rpc`, an answer a worker."""

from collections.abc import Iterator
from typing import Any

import torch

from rlmake.inference.engines import vllm_versions
from rlmake.models import stream
from rlmake.models.digest import digest
from rlmake.transport.collective import Plan, Receiver, nccl_version

vllm_versions.patch_head()
vllm_versions.keep_given()
# vLLM's attention on a CPU with AMX uses it without having asked for it: an illegal instruction where nobody else has.
torch.cpu._init_amx()
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Extension:
    """Mixed into vLLM's worker class, whose names must not clash with these: `rlmake` is in each."""

    def rlmake_alive(self) -> bool:
        return True

    def rlmake_facts(self) -> dict[str, Any]:
        return {"nccl": nccl_version(), "device": str(self.device), "rank": self.rank}

    def rlmake_load_files(self, paths: list[str]) -> None:
        """Load a version from safetensors files that were checked before.

        A worker that holds a part of each tensor, or computes on the CPU, maps them and takes no more than it needs.
        """
        device = torch.device(self.device)
        ahead = device.type == "cuda" and self.parallel_config.world_size == 1
        self._rlmake_reload(stream.tensors(paths, device) if ahead else stream.mapped(paths))

    def rlmake_join(self, rendezvous: dict[str, Any], first: int, world: int, timeout: float) -> str | None:
        """Join the sender's group as rank `first` + this worker's; why not, as text."""
        try:
            device = torch.device(self.device)
            self.rlmake_receiver = Receiver(rendezvous, first + self.rank, world, device, timeout)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def rlmake_receive(self, version: int, plan: Plan, dtype: str) -> None:
        """Take a version from the sender's group."""
        source = self.rlmake_receiver.receive(version, plan, DTYPES[dtype])
        self._rlmake_reload(source)
        for _ in source:  # a loader that stops early leaves the sender waiting
            pass

    def _rlmake_reload(self, source: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.model_runner.reload_weights(weights_iterator=source)
        for layer in self.model_runner.get_model().modules():
            # A head tied to the embedding gets no weights: on the CPU it would go on with what it packed before.
            if hasattr(layer, "cpu_linear") and layer.weight.numel():
                layer.quant_method.process_weights_after_loading(layer)

    def rlmake_digests(self, plan: Plan) -> dict[str, str]:
        """Digests of the parameters as they are served (of those that the CPU packs: as they were given), by the names
        of `plan`; parts of fused ones by themselves."""
        model = self.model_runner.get_model()
        own = dict(model.named_parameters())
        for path, module in model.named_modules():
            own |= {f"{path}.{leaf}": value for leaf, value in getattr(module, "rlmake_given", {}).items()}
        own = {name.replace(".base_layer.", "."): value for name, value in own.items()}
        packed = getattr(model, "packed_modules_mapping", {})
        whole_of = {part: (whole, parts) for whole, parts in packed.items() for part in parts}
        rows_of = {entry["name"]: entry["shape"][0] for entry in plan}
        found = {}
        for name, rows in rows_of.items():
            module, _, leaf = name.rpartition(".")
            path, _, last = module.rpartition(".")
            start, place = 0, name
            if last in whole_of and name not in own:
                whole, parts = whole_of[last]
                place = f"{path}.{whole}.{leaf}"
                start = sum(rows_of[f"{path}.{part}.{leaf}"] for part in parts[: parts.index(last)])
            if place not in own:
                raise KeyError(f"{name}: the engine has no parameter {place}")
            found[name] = digest(own[place].data[start : start + rows])
        return found
