"""Components by themselves: the command becomes the process, in the foreground, with no supervision.

Components with one run directory (`output_dir`) belong together: they share an attempt, in which they find one another.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from rlmake.config import EnvServerConfig, InferenceConfig, OrchestratorConfig, TrainerConfig, dump
from rlmake.config.names import auto_name
from rlmake.config.shared import default_output_dir
from rlmake.core.errors import ConfigError, Fault
from rlmake.core.rundir import ATTEMPT_CONFIGS, ATTEMPT_LOGS
from rlmake.launch import door, rundir, serve
from rlmake.launch.attempt import Attempt, allocate, join, record
from rlmake.launch.components import check_port
from rlmake.launch.inputs import check_inputs
from rlmake.launch.interpreter import check_python, python_of
from rlmake.launch.placement import DEFAULTS, INFERENCE_DEFAULTS, TRAINER_DEFAULTS, torchrun

Component = InferenceConfig | TrainerConfig | OrchestratorConfig | EnvServerConfig


def inference(cfg: InferenceConfig, argv: Sequence[str], files: Sequence[Path]) -> None:
    """Become the inference server. With `output_dir` the attempt is recorded there, without it nothing is written."""
    if cfg.slurm is not None:
        _on_slurm(cfg, argv, files)
        return
    check_inputs(cfg, files, built=not cfg.dry_run)
    if cfg.dry_run:
        name = cfg.run.dir or cfg.run.name or auto_name(["inference"], cfg.vllm.model, rundir.short_id())
        folder = Path(cfg.output_dir or Path(default_output_dir()) / name)
        _, config = _recorded("inference", cfg, folder, argv, files)
        print(f"dry run: nothing was started; resolved configuration: {config.parent}")
        return
    check_port(cfg.server.host, cfg.server.port, "server.port")
    check_python(cfg)
    marks: Mapping[str, str] = {}
    if cfg.output_dir:
        attempt, config = _recorded("inference", cfg, Path(cfg.output_dir), argv, files)
        marks = _marks(attempt)
    else:
        config = _in_memory(cfg)
    command = [python_of(cfg), "-m", "rlmake.inference.server", "@", str(config)]
    _become(command, INFERENCE_DEFAULTS, cfg.env_vars, marks, threads=cfg.cpu_threads if cfg.device == "cpu" else None)


def _on_slurm(cfg: InferenceConfig, argv: Sequence[str], files: Sequence[Path]) -> None:
    """Submit the server; in its job, over several nodes, start its engines and their router."""
    name = cfg.run.name or auto_name(["inference"], cfg.vllm.model, rundir.short_id())
    run_dir = Path(cfg.output_dir or Path(default_output_dir()) / (cfg.run.dir or name)).resolve()
    if door.in_own_job(run_dir):
        serve.over_nodes(cfg, run_dir, argv, files)
        return
    door.check_not_queued(run_dir)
    options = door.check(cfg, "inference")
    run_dir.mkdir(parents=True, exist_ok=True)
    attempt = allocate(run_dir)
    record(attempt, "inference", argv, files)
    door.submit("inference", cfg, run_dir, name, attempt, options, dry_run=cfg.dry_run)


def trainer(cfg: TrainerConfig, argv: Sequence[str], files: Sequence[Path]) -> None:
    """Become the RL trainer: a rank under torchrun, else torchrun over the visible GPUs (on a CPU: one rank)."""
    if not cfg.output_dir:
        raise ConfigError(Fault("is needed: the run directory that the orchestrator uses too", "output_dir"))
    threads = cfg.cpu_threads if cfg.device == "cpu" else None
    if "RANK" in os.environ:
        config = _in_memory(cfg)
        _become([sys.executable, "-m", "rlmake.trainer.rl", "@", str(config)], cfg.env_vars, threads=threads)
    attempt, config = _recorded("trainer", cfg, Path(cfg.output_dir), argv, files)
    visible = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",") if gpu.strip()]
    ranks = 1 if cfg.device == "cpu" else max(1, len(visible))
    command = torchrun(ranks, cfg.log.ranks_filter, attempt.log_dir, "rlmake.trainer.rl", config)
    _become(command, TRAINER_DEFAULTS, cfg.env_vars, _marks(attempt), threads=threads)


def orchestrator(cfg: OrchestratorConfig, argv: Sequence[str], files: Sequence[Path]) -> None:
    """Become the orchestrator, beside an inference server, env servers and a trainer that were started by hand."""
    if not cfg.output_dir:
        raise ConfigError(Fault("is needed: the run directory that the trainer uses too", "output_dir"))
    if not cfg.train.source:
        raise ConfigError(Fault("needs at least one source", "train.source"))
    attempt, config = _recorded("orchestrator", cfg, Path(cfg.output_dir), argv, files)
    command = [sys.executable, "-m", "rlmake.orchestrator.main", "@", str(config)]
    _become(command, cfg.env_vars, _marks(attempt), threads=None)


def env_server(cfg: EnvServerConfig, argv: Sequence[str], files: Sequence[Path]) -> None:
    """Become the server of one environment. With `output_dir` the run's orchestrator finds it by itself, else its
    address must be given there as `serve.address`."""
    if not (cfg.output_dir or cfg.address_file) and cfg.address.endswith(":0"):
        fault = "give a port (tcp://host:port), or output_dir, the run directory in which the address is published"
        raise ConfigError(Fault(fault, "address"))
    marks: Mapping[str, str] = {}
    if cfg.output_dir:
        attempt, config = _recorded(f"envs/{cfg.split}/{cfg.name}", cfg, Path(cfg.output_dir), argv, files)
        marks = _marks(attempt)
    else:
        config = _in_memory(cfg)
    _become([sys.executable, "-m", "rlmake.envs.server", "@", str(config)], cfg.env_vars, marks, threads=None)


def _recorded(
    entry: str, cfg: Component, folder: Path, argv: Sequence[str], files: Sequence[Path]
) -> tuple[Attempt, Path]:
    """The attempt of the run directory, with the command, its inputs and the resolved configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    attempt = join(folder, entry)
    record(attempt, entry, argv, files)
    cfg = cfg.model_copy(update={"output_dir": str(folder.resolve())})
    return attempt, attempt.write_resolved(entry, dump(cfg))


def _in_memory(cfg: Component) -> Path:
    """The resolved configuration as a file without a place on disk, inherited by what this process becomes."""
    descriptor = os.memfd_create("resolved.json", 0)
    os.write(descriptor, json.dumps(dump(cfg)).encode())
    return Path(f"/proc/self/fd/{descriptor}")


def _marks(attempt: Attempt) -> dict[str, str]:
    return {ATTEMPT_CONFIGS: str(attempt.config_dir), ATTEMPT_LOGS: str(attempt.log_dir)}


def _become(command: list[str], *layers: Mapping[str, str], threads: int | None) -> NoReturn:
    env = {**os.environ, **DEFAULTS}
    for layer in layers:
        env |= layer
    if threads is not None:
        env["OMP_NUM_THREADS"] = env["MKL_NUM_THREADS"] = str(threads)
    os.execve(command[0], command, env)
