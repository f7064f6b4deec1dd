"""Where the processes of a run are placed."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlmake.config.fields import Config, runtime
from rlmake.config.refused import Refused


class CpuThreads(Config):
    cpu_threads: int = runtime(2, "Threads of each trainer and engine process on the CPU.", ge=1)


class SingleNode(CpuThreads):
    """One host. `num_train_gpus = 0`: the trainer on the CPU; `num_infer_gpus = 0`: the embedded engine on the CPU."""

    type: Literal["single_node"] = runtime("single_node", "Kind of placement.")
    gpus_per_node: int = runtime(8, "GPUs of the host.", ge=0)
    num_train_gpus: int = runtime(1, "GPUs of the trainer; 0: CPU.", ge=0)
    num_infer_gpus: int = runtime(1, "GPUs of the inference server; 0: CPU.", ge=0)
    num_train_ranks: int = runtime(1, "Processes of the trainer on the CPU (gloo).", ge=1)

    @model_validator(mode="after")
    def _fits(self):
        total = self.num_train_gpus + self.num_infer_gpus
        if total > self.gpus_per_node:
            raise Refused(("gpus_per_node", f"{total} GPUs for trainer and inference exceed {self.gpus_per_node}"))
        return self


class MultiNode(Config):
    """Several hosts of a SLURM cluster."""

    type: Literal["multi_node"] = runtime("multi_node", "Kind of placement.")
    gpus_per_node: int = runtime(8, "GPUs of each host.", ge=1)
    num_train_nodes: int = runtime(..., "Hosts of the trainer.", ge=1)
    num_infer_nodes: int | None = runtime(None, "Hosts of the inference servers; derived when absent.", ge=0)
    num_infer_replicas: int = runtime(1, "Replicas of the inference servers.", ge=1)
    nodes_per_fsdp_group: int | None = runtime(None, "Hosts that shard one copy of the model; all when absent.", ge=1)
    orchestrator_on_inference: bool = runtime(False, "Place the orchestrator on the last inference host.")

    @model_validator(mode="after")
    def _groups(self):
        size = self.nodes_per_fsdp_group
        if size is not None and self.num_train_nodes % size:
            raise Refused(("nodes_per_fsdp_group", f"{size} does not divide num_train_nodes = {self.num_train_nodes}"))
        return self


class EvalDeployment(CpuThreads):
    """Placement of a managed inference server."""

    gpus_per_node: int = runtime(8, "GPUs of the host.", ge=0)
    num_infer_gpus: int = runtime(1, "GPUs of the inference server; 0: CPU.", ge=0)

    @model_validator(mode="after")
    def _fits(self):
        if self.num_infer_gpus > self.gpus_per_node:
            raise Refused(("num_infer_gpus", f"must be ≤ gpus_per_node = {self.gpus_per_node}"))
        return self


Deployment = Annotated[SingleNode | MultiNode, Field(discriminator="type")]
