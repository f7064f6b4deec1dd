"""The nodes of the SLURM job that this launcher runs in, which role is on which, and the srun that starts it there.

The first nodes are the inference servers', the next the trainer's; the orchestrator and the env servers stand beside
the trainer's rank 0, or on the last inference node. Every role is a step of its own, so its exit code and output are
its own; the steps share the nodes (`--overlap`).
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from rlmake.config.deployment import MultiNode
from rlmake.core import slurm
from rlmake.core.errors import RunFailed, UserError

FIRST_PORT, PORTS = 20000, 10000  # of the ranks' rendezvous: one for each job, since jobs may share a host


@dataclass(frozen=True)
class Allocation:
    """`inference` and `trainer`: names of the nodes, in order. `address`: where each of them is reached."""

    job: str
    inference: tuple[str, ...]
    trainer: tuple[str, ...]
    orchestrator: str
    gpus_per_node: int
    address: dict[str, str]

    @classmethod
    def of(cls, place: MultiNode, managed: bool, beside_engines: bool = False) -> "Allocation":
        """Place the roles on the nodes of this job; `beside_engines`: orchestrator and env servers on the first
        inference node, if there is one. Raises `UserError` outside of a job, or when it has too few."""
        job = slurm.own_job()
        if job is None:
            raise UserError("deployment.type = 'multi_node' runs in a SLURM job: submit it with [slurm], or use salloc")
        count, nodes = place.infer_nodes(managed), slurm.nodes_of(job)
        wanted = count + place.num_train_nodes
        if len(nodes) < wanted:
            text = f"{wanted} nodes are wanted ({count} for inference), SLURM job {job} has {len(nodes)}"
            raise UserError(f"deployment: {text}")
        inference, trainer = tuple(nodes[:count]), tuple(nodes[count:wanted])
        orchestrator = inference[-1] if place.orchestrator_on_inference and inference else trainer[0]
        if beside_engines and inference:
            orchestrator = inference[0]
        return cls(job, inference, trainer, orchestrator, place.gpus_per_node, slurm.addresses(nodes[:wanted]))

    @property
    def nodes(self) -> tuple[str, ...]:
        return (*self.inference, *self.trainer)

    @property
    def master(self) -> tuple[str, int]:
        """Address and port of the ranks' rendezvous, on the trainer's first node."""
        default = FIRST_PORT + int(self.job) % PORTS
        return self.address[self.trainer[0]], int(os.environ.get("MASTER_PORT") or default)

    def srun(self, node: str, command: list[str], gpus: list[int] | None = None) -> list[str]:
        """`command` on a node, with these of its GPUs (None: none)."""
        step = ["srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--mem=0", "--kill-on-bad-exit=1"]
        step += [f"--gres=gpu:{self.gpus_per_node}" if gpus else "--gres=none", "--export=ALL", "--input=none"]
        options = ["--gpus", ",".join(map(str, gpus))] if gpus else []
        return [*step, sys.executable, "-m", "rlmake.launch.node", *options, "--", *command]

    def check_sees(self, folder: Path) -> None:
        """Raise `RunFailed` unless every node sees the folder, before anything is started on them."""
        probe = 'test -d "$1" || { echo "$SLURMD_NODENAME"; exit 1; }'
        command = ["srun", "--overlap", f"--nodes={len(self.nodes)}", "--ntasks-per-node=1", "--mem=0", "--gres=none"]
        command += [f"--nodelist={','.join(self.nodes)}", "sh", "-c", probe, "sh", str(folder)]
        answer = slurm.ask(*command, timeout=60.0)
        if answer is None or answer.returncode != 0:
            blind = " ".join(answer.stdout.split()) if answer is not None else ""
            why = f"node {blind} does not see {folder}" if blind else f"the nodes do not answer: {_said(answer)}"
            raise RunFailed(f"{why}; all nodes must share the project's file system")


def _said(answer) -> str:
    return " ".join(answer.stderr.split())[-300:] if answer is not None else "srun timed out"
