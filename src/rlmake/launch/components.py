"""The components of a run as processes: the resolved configuration each reads, its command, environment and log."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
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
from rlmake.core.jsonio import read_json
from rlmake.core.rundir import RunContext
from rlmake.launch.attempt import Attempt
from rlmake.launch.interpreter import python_of
from rlmake.launch.placement import INFERENCE_DEFAULTS, TRAINER_DEFAULTS, engine_gpus, environment, gpu_ids, torchrun
from rlmake.launch.supervise import Supervisor

ADDRESS_TIMEOUT_S = 4200.0  # a big model on a slow disk; a server that dies is noticed at once


@dataclass(frozen=True)
class Components:
    """Writes the configurations of a run's processes and starts them under one supervisor."""

    ctx: RunContext
    attempt: Attempt
    _engines: dict[Path, list[Path]] = field(default_factory=dict)  # a router's address file → its engines'

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
        """Start a process that computes nothing: an env server, the orchestrator, an online evaluation."""
        supervisor.start(name, command, env, log, **options)

    def start_inference(
        self, supervisor: Supervisor, config: InferenceConfig, num_gpus: int, name: str = "inference"
    ) -> Path:
        """Start the engines that serve one model. Returns the file in which their common address will be published:
        the engine's own, or that of the router in front of several."""
        groups = engine_gpus(config, num_gpus)
        address_file = self.attempt.resolved / f"{name}.address"
        if len(groups) == 1:
            return self._start_engine(supervisor, config, groups[0], name)
        address_file.unlink(missing_ok=True)
        self.write(name, config)
        config = config.model_copy(update={"server": config.server.model_copy(update={"host": "127.0.0.1", "port": 0})})
        self._engines[address_file] = [
            self._start_engine(supervisor, config, gpus, f"{name}-{index}") for index, gpus in enumerate(groups)
        ]
        return address_file

    def _start_engine(self, supervisor: Supervisor, config: InferenceConfig, gpus: list[str], name: str) -> Path:
        address_file = self.attempt.resolved / f"{name}.address"
        address_file.unlink(missing_ok=True)
        command = [python_of(config), "-m", "rlmake.inference.server"]
        command += ["@", str(self.write(name, config)), "--address-file", str(address_file)]
        threads = config.cpu_threads if not gpus else None
        env = environment(self.ctx, INFERENCE_DEFAULTS, config.env_vars, gpus=gpus, threads=threads)
        supervisor.start(name, command, env, self.ctx.log_dir / f"{name}.log")
        return address_file

    def await_inference(self, supervisor: Supervisor, address_file: Path) -> str:
        """The server's base URL (with /v1), once it has bound its port; several engines get their router first."""
        if engines := self._engines.get(address_file):
            what = "addresses of the inference engines"
            supervisor.wait_until(lambda: all(file.exists() for file in engines), ADDRESS_TIMEOUT_S, what)
            urls = [file.read_text().strip() for file in engines]
            if len(urls) == 1 and address_file.name != "inference.address":  # a frozen model's only engine
                return urls[0] + "/v1"
            self._start_router(supervisor, address_file, urls)
        supervisor.wait_until(address_file.exists, ADDRESS_TIMEOUT_S, f"inference server's address {address_file}")
        return address_file.read_text().strip().rstrip("/") + "/v1"

    def _start_router(self, supervisor: Supervisor, address_file: Path, urls: list[str]) -> None:
        port = read_json(address_file.with_suffix(".json"))["server"]["port"]
        command = [sys.executable, "-m", "rlmake.inference.router", "--port", str(port)]
        command += ["--address-file", str(address_file), *urls]
        supervisor.start("router", command, environment(self.ctx), self.ctx.log_dir / "router.log")

    def engines(self, address_file: Path) -> list[str] | None:
        """URLs (with /v1) of the engines where a router stands before them; None: the server is the engine."""
        engines = self._engines.get(address_file)
        return engines and [file.read_text().strip() + "/v1" for file in engines]

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
        env = environment(self.ctx, config.env_vars)
        self._start(supervisor, "eval", command, env, self.ctx.log_dir / "eval.log", final=True)

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
