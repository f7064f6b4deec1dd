"""The components of a run as processes: the resolved configuration each reads, its command, environment and log."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmake.config import (
    EnvServerConfig,
    EvalConfig,
    InferenceConfig,
    OrchestratorConfig,
    SFTConfig,
    TrainerConfig,
    dump,
)
from rlmake.config.online import OnlineEvalProcessConfig
from rlmake.config.shared import ComponentLogConfig
from rlmake.config.sources import EvalSource, TrainSource
from rlmake.core import procs
from rlmake.core.rundir import RunContext
from rlmake.launch.attempt import Attempt
from rlmake.launch.placement import INFERENCE_DEFAULTS, TRAINER_DEFAULTS, environment, gpu_ids, torchrun
from rlmake.launch.supervise import Supervisor

ADDRESS_TIMEOUT_S = 4200.0  # a big model on a slow disk; a server that dies is noticed at once


@dataclass(frozen=True)
class Components:
    """Writes the configurations of a run's processes and starts them under one supervisor."""

    ctx: RunContext
    attempt: Attempt

    def write(self, name: str, config: object) -> Path:
        return self.attempt.write_resolved(name, dump(config))

    def write_env_servers(
        self,
        sources: Iterable[TrainSource | EvalSource],
        seed: int,
        log: ComponentLogConfig,
        env_vars: dict[str, str],
    ) -> list[tuple[EnvServerConfig, Path]]:
        """One configuration for each source whose server is ours to start."""
        written = []
        for source in sources:
            if source.serve.address is None:
                given = {"seed": seed, "log": log, "output_dir": str(self.ctx.run_dir), "env_vars": env_vars}
                config = EnvServerConfig.of_source(source, **given)
                written.append((config, self.write(f"envs/{config.split}/{config.name}", config)))
        return written

    def _start(self, supervisor: Supervisor, name: str, command: list[str], env: dict[str, str], log: Path, **options):
        """Start a process that computes nothing: an env server, the orchestrator."""
        supervisor.start(name, command, env, log, **options)

    def start_inference(
        self, supervisor: Supervisor, config: InferenceConfig, num_gpus: int, name: str = "inference"
    ) -> Path:
        """Start an inference server. Returns the file in which it will publish its address."""
        address_file = self.attempt.resolved / f"{name}.address"
        address_file.unlink(missing_ok=True)
        command = [config.python or sys.executable, "-m", "rlmake.inference.server"]
        command += ["@", str(self.write(name, config)), "--address-file", str(address_file)]
        cpu_threads = config.cpu_threads if num_gpus == 0 else None
        env = environment(self.ctx, INFERENCE_DEFAULTS, config.env_vars, gpus=gpu_ids(num_gpus), threads=cpu_threads)
        supervisor.start(name, command, env, self.ctx.log_dir / f"{name}.log")
        return address_file

    def await_inference(self, supervisor: Supervisor, address_file: Path) -> str:
        """The server's base URL (with /v1), once it has bound its port."""
        supervisor.wait_until(address_file.exists, ADDRESS_TIMEOUT_S, f"inference server's address {address_file}")
        return address_file.read_text().strip().rstrip("/") + "/v1"

    def engines(self, address_file: Path) -> list[str] | None:
        """URLs of the engines where a router stands before them; None: the server is the engine."""
        return None

    def start_env_servers(self, supervisor: Supervisor, servers: list[tuple[EnvServerConfig, Path]]) -> None:
        for config, path in servers:
            command = [sys.executable, "-m", "rlmake.envs.server", "@", str(path)]
            log = self.ctx.log_dir / "envs" / config.split / f"{config.name}.log"
            env = environment(self.ctx, config.env_vars)
            self._start(supervisor, f"env server {config.name}", command, env, log)

    def start_orchestrator(self, supervisor: Supervisor, config: OrchestratorConfig) -> None:
        command = [sys.executable, "-m", "rlmake.orchestrator.main", "@", str(self.write("orchestrator", config))]
        env = environment(self.ctx, config.env_vars)
        self._start(supervisor, "orchestrator", command, env, self.ctx.log_dir / "orchestrator.log", final=True)

    def start_evaluation(self, supervisor: Supervisor, config: EvalConfig, identity: Mapping[str, Any]) -> None:
        """Start the evaluation. `identity` stands beside its configuration, for the report."""
        self.attempt.write_resolved("identity", dict(identity))
        command = [sys.executable, "-m", "rlmake.evals.main", "@", str(self.write("eval", config))]
        env = environment(self.ctx, config.env_vars)
        supervisor.start("eval", command, env, self.ctx.log_dir / "eval.log", final=True)

    def start_online_evaluation(self, supervisor: Supervisor, config: OnlineEvalProcessConfig) -> None:
        """Start the evaluation beside an SFT trainer; the run ends when both have."""
        path = self.write("online_eval", config)
        command = [sys.executable, "-m", "rlmake.orchestrator.online", "@", str(path)]
        supervisor.start(
            "eval", command, environment(self.ctx, config.env_vars), self.ctx.log_dir / "eval.log", final=True
        )

    def start_trainer(
        self, supervisor: Supervisor, config: TrainerConfig | SFTConfig, num_gpus: int, cpu_ranks: int, skip_gpus: int
    ) -> None:
        """Start the trainer under torchrun: on `num_gpus` GPUs behind the first `skip_gpus`, or on the CPU."""
        kind = "sft" if isinstance(config, SFTConfig) else "rl"
        path = self.write("sft" if kind == "sft" else "trainer", config)
        ranks = num_gpus or cpu_ranks
        command = torchrun(ranks, config.log.ranks_filter, self.ctx.log_dir, f"rlmake.trainer.{kind}", path)
        threads = config.cpu_threads if num_gpus == 0 else None
        gpus = gpu_ids(num_gpus, skip_gpus)
        env = environment(self.ctx, TRAINER_DEFAULTS, config.env_vars, gpus=gpus, threads=threads)
        supervisor.start("trainer", command, env, self.ctx.log_dir / "trainer.log", final=True)


def check_port(host: str, port: int, key: str) -> None:
    """Fail before anything is started when a configured port is in use."""
    if port:
        procs.claim_port(host, port, key).close()
