"""Where the processes of a run are placed."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from rlmake.config.fields import Config, runtime
from rlmake.config.refused import Refused

MOST_RANKS = 256  # of a trainer on one host's CPU: each loads torch and a share of the model by itself


class CpuThreads(Config):
    cpu_threads: int = runtime(2, "Threads of each trainer and engine process on the CPU.", ge=1)


class SingleNode(CpuThreads):
    """One host. `num_train_gpus = 0`: the trainer on the CPU; `num_infer_gpus = 0`: the embedded engine on the CPU."""

    type: Literal["single_node"] = runtime("single_node", "Kind of placement.")
    gpus_per_node: int = runtime(8, "GPUs of the host.", ge=0)
    num_train_gpus: int = runtime(1, "GPUs of the trainer; 0: CPU.", ge=0)
    num_infer_gpus: int = runtime(1, "GPUs of the inference server; 0: CPU.", ge=0)
    num_train_ranks: int = runtime(1, "Processes of the trainer on the CPU (gloo).", ge=1, le=MOST_RANKS)
    share_gpus: bool = runtime(False, "Trainer and inference server use the same GPUs, each a part of their memory.")

    @model_validator(mode="after")
    def _fits(self):
        total = self.gpus
        if total > self.gpus_per_node:
            raise Refused(("gpus_per_node", f"{total} GPUs for trainer and inference exceed {self.gpus_per_node}"))
        return self

    @property
    def gpus(self) -> int:
        """GPUs of the run."""
        parts = (self.num_train_gpus, self.num_infer_gpus)
        return max(parts) if self.share_gpus else sum(parts)


class MultiNode(CpuThreads):
    """Several hosts of a SLURM cluster, all of a kind. `gpus_per_node = 0`: trainer and engines on the CPU."""

    type: Literal["multi_node"] = runtime("multi_node", "Kind of placement.")
    gpus_per_node: int = runtime(8, "GPUs of each host; 0: CPU.", ge=0)
    num_train_nodes: int = runtime(..., "Hosts of the trainer.", ge=1)
    num_infer_nodes: int | None = runtime(
        None, "Hosts of one replica of the inference servers; 1 with [inference] when absent.", ge=0
    )
    num_infer_replicas: int = runtime(1, "Replicas of the inference servers.", ge=1)
    nodes_per_fsdp_group: int | None = runtime(None, "Hosts that shard one copy of the model; all when absent.", ge=1)
    orchestrator_on_inference: bool = runtime(False, "Place the orchestrator on the last inference host.")
    num_train_ranks: int = runtime(1, "Processes of the trainer on each host's CPU (gloo).", ge=1, le=MOST_RANKS)

    @model_validator(mode="after")
    def _groups(self):
        size = self.nodes_per_fsdp_group
        if size is not None and self.num_train_nodes % size:
            raise Refused(("nodes_per_fsdp_group", f"{size} does not divide num_train_nodes = {self.num_train_nodes}"))
        return self

    @property
    def ranks_per_node(self) -> int:
        return self.gpus_per_node or self.num_train_ranks

    @property
    def dp_replicate(self) -> int:
        """Copies of the model that the trainer keeps."""
        return self.num_train_nodes // (self.nodes_per_fsdp_group or self.num_train_nodes)

    def infer_nodes(self, managed: bool) -> int:
        """Hosts of all inference servers that the launcher starts."""
        each = self.num_infer_nodes if self.num_infer_nodes is not None else 1
        return each * self.num_infer_replicas if managed else 0


class SFTMultiNode(MultiNode):
    """Several hosts of a SLURM cluster, all of a kind. `gpus_per_node = 0`: the CPU."""

    num_train_nodes: int = runtime(2, "Hosts of the trainer.", ge=1)
    num_infer_nodes: int | None = runtime(
        None, "Hosts of one replica of the evaluations' servers; 1 with [inference] when absent.", ge=0
    )


class EvalDeployment(CpuThreads):
    """Placement of a managed inference server."""

    gpus_per_node: int = runtime(8, "GPUs of the host.", ge=0)
    num_infer_gpus: int = runtime(1, "GPUs of the inference server; 0: CPU.", ge=0)

    @model_validator(mode="after")
    def _fits(self):
        if self.num_infer_gpus > self.gpus_per_node:
            raise Refused(("num_infer_gpus", f"must be ≤ gpus_per_node = {self.gpus_per_node}"))
        return self


class InferSingleNode(Config):
    """One host, and the GPUs that are visible there."""

    type: Literal["single_node"] = runtime("single_node", "Kind of placement.")
    gpus_per_node: int = runtime(8, "GPUs asked of SLURM for a server on GPUs.", ge=0)


class InferMultiNode(Config):
    """Several hosts of a SLURM cluster: one engine for each data-parallel rank behind one router."""

    type: Literal["multi_node"] = runtime("multi_node", "Kind of placement.")
    gpus_per_node: int = runtime(8, "GPUs of each host; 0: one engine on each host's CPU.", ge=0)
    num_nodes: int = runtime(2, "Hosts.", ge=1)


InferDeployment = Annotated[InferSingleNode | InferMultiNode, Field(discriminator="type")]


def world_fields(place: SingleNode | MultiNode) -> list[str]:
    """Keys that decide the trainer's world, and with it how sums are rounded."""
    on_cpu = place.num_train_gpus == 0 if place.type == "single_node" else place.gpus_per_node == 0
    names = ["num_train_gpus"] if place.type == "single_node" else ["type", *MULTI_NODE_WORLD]
    return [f"deployment.{name}" for name in (*names, *(["num_train_ranks"] if on_cpu else []))]


MULTI_NODE_WORLD = ("gpus_per_node", "num_train_nodes", "nodes_per_fsdp_group")
Deployment = Annotated[SingleNode | MultiNode, Field(discriminator="type")]
