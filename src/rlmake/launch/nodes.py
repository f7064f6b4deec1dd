"""The components of a run over several nodes: the same processes, each a step of the SLURM job.

trainer/node_<i>.log, inference/node_<i>.log, inference/router.log; trainer.log and inference.log link to node 0.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from rlmake.config import InferenceConfig, RLConfig, SFTConfig, TrainerConfig
from rlmake.core.jsonio import read_json
from rlmake.core.rundir import RunContext
from rlmake.launch.allocation import Allocation
from rlmake.launch.attempt import Attempt
from rlmake.launch.components import Components
from rlmake.launch.interpreter import python_of
from rlmake.launch.placement import INFERENCE_DEFAULTS, TRAINER_DEFAULTS, environment, torchrun
from rlmake.launch.supervise import Supervisor


@dataclass(frozen=True)
class NodeComponents(Components):
    """Starts each component on its node."""

    allocation: Allocation = None  # type: ignore[assignment]  # always given; the parent's fields have no defaults

    @classmethod
    def of(cls, ctx: RunContext, attempt: Attempt, allocation: Allocation) -> "NodeComponents":
        allocation.check_sees(attempt.config_dir)
        return cls(ctx, attempt, allocation=allocation)

    def _start(self, supervisor: Supervisor, name: str, command: list[str], env: dict[str, str], log: Path, **options):
        """Orchestrator, or online evaluation, and env servers: beside one another."""
        node = self.allocation.orchestrator
        supervisor.start(f"{name} ({node})", self.allocation.srun(node, command), env, log, remote=True, **options)

    def start_inference(
        self, supervisor: Supervisor, config: InferenceConfig, num_gpus: int, name: str = "inference"
    ) -> Path:
        """One engine for each data-parallel rank of each node; the file is that of the router in front of them.

        Servers of frozen models are one engine on the first node.
        """
        router = self.attempt.resolved / f"{name}.address"
        router.unlink(missing_ok=True)
        gpus, parallel = self.allocation.gpus_per_node, config.gpus_per_engine
        frozen = name != "inference"
        each = max(1, gpus // parallel) if gpus and not frozen else 1
        engines = self._engines[router] = []
        for number, node in enumerate(self.allocation.inference[:1] if frozen else self.allocation.inference):
            log = self.ctx.log_dir / (f"{name}.log" if frozen else f"inference/node_{number}.log")
            for rank in range(each):
                mine = list(range(rank * parallel, (rank + 1) * parallel)) if gpus and not frozen else None
                engine = config.model_copy(deep=True)
                engine.server.host, engine.server.port = "0.0.0.0", 0
                engine.vllm.data_parallel_size = 1
                label = f"{name}-node_{number}" + (f"-{rank}" if each > 1 else "")
                address = self.attempt.resolved / f"{label}.address"
                address.unlink(missing_ok=True)
                engines.append(address)
                command = [python_of(config), "-m", "rlmake.inference.server"]
                command += ["@", str(self.write(label, engine)), "--address-file", str(address)]
                threads = config.cpu_threads if mine is None else None
                env = environment(self.ctx, INFERENCE_DEFAULTS, config.env_vars, threads=threads)
                step = self.allocation.srun(node, command, mine)
                supervisor.start(f"{name} {number} ({node})", step, env, log, remote=True)
        if not frozen:
            _link(self.ctx.log_dir / "inference.log", "inference/node_0.log")
        self.write(name, config)
        return router

    def _start_router(self, supervisor: Supervisor, address_file: Path, urls: list[str]) -> None:
        """On the first inference node."""
        port = read_json(address_file.with_suffix(".json"))["server"]["port"]
        command = [sys.executable, "-m", "rlmake.inference.router", "--port", str(port)]
        command += ["--address-file", str(address_file), *urls]
        step = self.allocation.srun(self.allocation.inference[0], command)
        env = environment(self.ctx)
        supervisor.start("router", step, env, self.ctx.log_dir / "inference" / "router.log", remote=True)

    def start_trainer(
        self, supervisor: Supervisor, config: TrainerConfig | SFTConfig, num_gpus: int, cpu_ranks: int, skip_gpus: int
    ) -> None:
        """torchrun on each of the trainer's nodes, `num_gpus` or `cpu_ranks` ranks on each; rank 0 on the first."""
        kind = "sft" if isinstance(config, SFTConfig) else "rl"
        path = self.write("sft" if kind == "sft" else "trainer", config)
        each, nodes = num_gpus or cpu_ranks, self.allocation.trainer
        threads = config.cpu_threads if num_gpus == 0 else None
        env = environment(self.ctx, TRAINER_DEFAULTS, config.env_vars, threads=threads)
        for number, node in enumerate(nodes):
            shown = [rank - number * each for rank in config.log.ranks_filter if rank // each == number]
            world = (number, len(nodes), *self.allocation.master, f"job_{self.allocation.job}")
            command = torchrun(each, shown or [0], self.ctx.log_dir, f"rlmake.trainer.{kind}", path, world)
            step = self.allocation.srun(node, command, list(range(num_gpus)) or None)
            log = self.ctx.log_dir / "trainer" / f"node_{number}.log"
            supervisor.start(f"trainer {number} ({node})", step, env, log, final=True, remote=True)
        _link(self.ctx.log_dir / "trainer.log", "trainer/node_0.log")


def over_nodes(cfg: RLConfig | SFTConfig, allocation: Allocation) -> None:
    """Tell the components of a resolved configuration where the others are, in place."""
    place, master = cfg.deployment, allocation.address[allocation.trainer[0]]
    trainer = cfg.trainer if isinstance(cfg, RLConfig) else cfg
    trainer.model.dp_replicate = place.dp_replicate
    if not isinstance(cfg, RLConfig):
        return
    for part in (cfg.trainer, cfg.orchestrator):
        if part.rollout_transport.type == "zmq":
            part.rollout_transport.host = allocation.address[allocation.orchestrator]
    for part in (cfg.trainer, cfg.orchestrator, cfg.inference):
        if part is not None and part.weight_broadcast.type == "nccl":
            part.weight_broadcast.host = master


def _link(link: Path, target: str) -> None:
    link.unlink(missing_ok=True)
    os.symlink(target, link)
