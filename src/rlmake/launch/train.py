"""A training run on this host: `run` starts its processes, stays until they have ended and leaves nothing behind."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from loguru import logger

from rlmake import checkpoint, monitors
from rlmake.config import InferenceConfig, RLConfig, SFTConfig
from rlmake.config.shared import ResumeConfig
from rlmake.config.sources import OnlineEvalSource, TrainSource
from rlmake.core.errors import RunFailed, UserError
from rlmake.core.rundir import RunContext
from rlmake.launch import rundir
from rlmake.launch.allocation import Allocation
from rlmake.launch.attempt import Attempt, allocate, record
from rlmake.launch.components import Components, check_port
from rlmake.launch.inputs import check_frozen, check_rows
from rlmake.launch.interpreter import check_python
from rlmake.launch.nodes import NodeComponents, over_nodes
from rlmake.launch.placement import gpu_ids, require_gpus
from rlmake.launch.progress import Display
from rlmake.launch.resume import Resume, Start, link_checkpoints, starting_point
from rlmake.launch.supervise import GRACE_S, RunStopped, Supervisor, kill_leftovers
from rlmake.monitors.file import folder as file_folder

Kind = Literal["sft", "rl"]
TrainConfig = SFTConfig | RLConfig


def run(
    kind: Kind,
    cfg: TrainConfig,
    run_dir: Path,
    *,
    argv: Sequence[str],
    files: Sequence[Path],
    resume: Resume,
    fingerprint: str | None,
    run_name: str,
) -> None:
    """Train until `max_steps` in `run_dir`, with whatever a dead launcher left there cleared away first.

    `argv`: the whole command, `files`: its configuration files, both recorded. `resume`: see `starting_point`.
    `fingerprint`: of a run of the build; its processes' output is then shown briefly. Whether the directory may be
    used at all is the caller's to check (`rundir.check_free`, or the build's lease).

    Raises `RunFailed` when a process failed, `RunStopped` (exit code 75, or 128 + signal) when the run left before its
    end in order, `RunDiverged` (76), and `UserError` when there is nothing to resume from or a port is in use.
    """
    run_dir = Path(run_dir).resolve()
    with rundir.Held(run_dir), contextlib.ExitStack() as held:
        kill_leftovers(run_dir)
        if resume is not None:
            link_checkpoints(run_dir, checkpoint_folder(cfg))
        asked = asked_resume(cfg)
        start = starting_point(run_dir, resume, asked.dir if asked else None)
        if start.fork:  # the other run's retention must leave it, also for another start before our first checkpoint
            held.enter_context(checkpoint.reading(start.fork))
        if (last := max_steps(cfg)) is not None and start.step >= last:
            if resume != "auto":
                raise UserError(f"max_steps = {last}, and step {start.step} is trained already; raise it to go on")
            logger.info(f"{run_name}: step {start.step} is trained already")
            return
        preflight(cfg)
        link_checkpoints(run_dir, checkpoint_folder(cfg))
        attempt, ctx = open_attempt(kind, run_dir, argv, files, fingerprint, run_name)
        sink = logger.add(ctx.log_dir / "launcher.log", level="DEBUG")
        try:
            checkpoint.prune_future(run_dir, start.own_step, explicit=start.explicit)
            for folder in metrics_folders(cfg, ctx.run_dir):
                monitors.mark_attempt(ctx, start.step, folder)
            begins = f"continues behind step {start.step}" if start.step else "starts"
            logger.info(f"{run_name} {begins}, attempt {attempt.number}; logs: {ctx.log_dir}")
            allocation = place(cfg)
            components = NodeComponents.of(ctx, attempt, allocation) if allocation else Components(ctx, attempt)
            main_log = ctx.log_dir / ("trainer.log" if kind == "sft" else "orchestrator.log")
            with Display(run_name, main_log, start.step, last, brief=fingerprint is not None) as display:
                resolved = resolve(cfg, ctx, start)
                if allocation:
                    over_nodes(resolved, allocation)
                with supervisor_of(cfg, ctx, allocation) as supervisor:
                    (_start_sft if kind == "sft" else _start_rl)(supervisor, components, resolved)
                    supervisor.wait(display.tick)
            logger.success(f"{run_name} ended at step {last}; {run_dir}")
        except RunStopped as stopped:
            stopped.progressed = (checkpoint.newest(run_dir) or 0) > start.own_step
            raise
        except RunFailed as failed:
            step = None if fingerprint or type(failed) is not RunFailed else checkpoint.newest(run_dir, hashes=False)
            if step is None:
                raise
            given = cfg.run.name or cfg.run.dir  # without one, the same command makes another run
            how = "--resume" if given else f"--resume --run.name {run_dir.name}"
            raise RunFailed(f"{failed}\nthe same command with {how} goes on behind step {step}") from failed
        finally:
            logger.remove(sink)


def metrics_folders(cfg: TrainConfig, run_dir: Path) -> list[Path]:
    """Where processes of the run write `metrics.jsonl`: none without a file monitor, two when its paths differ."""
    parts = [cfg] if isinstance(cfg, SFTConfig) else [cfg.trainer, cfg.orchestrator]
    files = [part.monitors.file for part in parts]
    return list(dict.fromkeys(file_folder(file, run_dir) for file in files if file is not None))


def dry_run(kind: Kind, cfg: TrainConfig, run_dir: Path, *, argv: Sequence[str], files: Sequence[Path]) -> Path:
    """Write what a launch would write and start nothing. Returns the folder of the resolved configurations."""
    attempt = allocate(run_dir)
    record(attempt, kind, argv, files)
    ctx = RunContext(run_dir.resolve(), "", run_dir.name, attempt.number, None, attempt.config_dir, attempt.log_dir)
    components, resolved = Components(ctx, attempt), resolve(cfg, ctx, Start())
    if isinstance(resolved, SFTConfig):
        components.write("sft", resolved)
        if resolved.eval is not None:
            components.write("inference", resolved.inference)
            components.write("online_eval", resolved.online_eval(run_dir.resolve(), None))
            _write_eval_servers(components, resolved)
    else:
        components.write("trainer", resolved.trainer)
        components.write("orchestrator", resolved.orchestrator)
        _write_env_servers(components, resolved)
        if resolved.inference is not None:
            components.write("inference", resolved.inference)
        for number, config in enumerate(_frozen_servers(resolved).values()):
            components.write(f"inference-frozen-{number}", config)
    _warn(resolved)
    return attempt.resolved


def preflight(cfg: TrainConfig) -> None:
    """What can be known to fail before anything is written: ports that are taken, GPUs that are not there."""
    place = cfg.deployment
    _warn(cfg)
    check_rows(*_sources(cfg))
    if place.type == "multi_node":
        Allocation.of(place, managed=cfg.inference is not None)
        return
    if isinstance(cfg, RLConfig):
        if cfg.trainer.rollout_transport.type == "zmq":
            check_port("127.0.0.1", cfg.trainer.rollout_transport.port, "rollout_transport.port")
        if cfg.inference is not None:
            check_port(cfg.inference.server.host, cfg.inference.server.port, "inference.server.port")
            check_python(cfg.inference)
        for key, model in cfg.orchestrator.frozen_models():
            if model.base_url is None and not Path(model.name).is_dir():
                text = f"'{model.name}' is no directory; a server that knows it by this name needs base_url"
                raise UserError(f"orchestrator.{key}.name: {text}")
        check_frozen(cfg.orchestrator)
        gpu_ids(place.num_train_gpus, skip=_skipped_gpus(cfg))
        require_gpus(place.num_train_gpus + _skipped_gpus(cfg))
    else:
        if cfg.inference is not None:
            check_port(cfg.inference.server.host, cfg.inference.server.port, "inference.server.port")
        gpu_ids(place.num_train_gpus, skip=_inference_gpus(cfg))
        require_gpus(place.num_train_gpus + _inference_gpus(cfg))


def _sources(cfg: TrainConfig) -> list[tuple[str, list[TrainSource] | list[OnlineEvalSource]]]:
    if isinstance(cfg, SFTConfig):
        return [("eval.source", cfg.eval.source)] if cfg.eval else []
    evaluated = cfg.orchestrator.eval.source if cfg.orchestrator.eval else []
    return [("orchestrator.train.source", cfg.orchestrator.train.source), ("orchestrator.eval.source", evaluated)]


def place(cfg: TrainConfig) -> Allocation | None:
    """The nodes of a run over several of them; None: this host."""
    if cfg.deployment.type == "single_node":
        return None
    beside_engines = isinstance(cfg, SFTConfig)  # an SFT's evaluation runs where its engines do
    return Allocation.of(cfg.deployment, managed=cfg.inference is not None, beside_engines=beside_engines)


def supervisor_of(cfg: TrainConfig, ctx: RunContext, allocation: Allocation | None) -> Supervisor:
    grace = min(GRACE_S, cfg.slurm.cleanup_grace_period) if cfg.slurm else GRACE_S
    return Supervisor(grace, ctx.leave_file if allocation else None)


def _warn(cfg: TrainConfig) -> None:
    for text in cfg.orchestrator.warnings() if isinstance(cfg, RLConfig) else ():
        logger.warning(text)
    place, cores = cfg.deployment, os.cpu_count() or 1
    if place.type == "single_node" and place.num_train_gpus == 0 and place.num_train_ranks > cores:
        logger.warning(f"deployment.num_train_ranks = {place.num_train_ranks}: there are {cores} cores here")


def open_attempt(
    kind: str, run_dir: Path, argv: Sequence[str], files: Sequence[Path], fingerprint: str | None, run_name: str
) -> tuple[Attempt, RunContext]:
    """Number this launch, record its command and inputs, and give its processes their context.

    The run's id stays the same over all attempts: from the fingerprint in a build, else what `run.json` says.
    """
    run_id = f"{kind}-{fingerprint}" if fingerprint else rundir.mark(run_dir, kind, run_name)
    attempt = allocate(run_dir)
    if not (attempt.config_dir / "command.txt").is_file():  # else it was recorded when it was submitted
        record(attempt, kind, argv, files)
    ctx = RunContext(run_dir, run_id, run_name, attempt.number, fingerprint, attempt.config_dir, attempt.log_dir)
    return attempt, ctx


def resolve(cfg: TrainConfig, ctx: RunContext, start: Start) -> TrainConfig:
    """A copy in which every component knows the run directory, its name, and the checkpoint it begins behind."""
    cfg = cfg.placed(ctx.run_dir, ctx.run_name)
    if isinstance(cfg, RLConfig):
        cfg.trainer.resume = cfg.orchestrator.resume = start.config()
    else:
        cfg.resume = start.config()
    return cfg


def max_steps(cfg: TrainConfig) -> int | None:
    return cfg.trainer.max_steps if isinstance(cfg, RLConfig) else cfg.max_steps


def asked_resume(cfg: TrainConfig) -> ResumeConfig | None:
    """The `resume` table as the user gave it."""
    return cfg.trainer.resume if isinstance(cfg, RLConfig) else cfg.resume


def checkpoint_folder(cfg: TrainConfig) -> str | None:
    """`ckpt.output_dir`."""
    ckpt = cfg.trainer.ckpt if isinstance(cfg, RLConfig) else cfg.ckpt
    return ckpt.output_dir if ckpt else None


def _start_sft(supervisor: Supervisor, components: Components, cfg: SFTConfig) -> None:
    """The trainer alone, or with an inference server, env servers and the online evaluation beside it."""
    ranks, skip = cfg.deployment.num_train_ranks, _inference_gpus(cfg)
    if cfg.eval is None:
        components.start_trainer(supervisor, cfg, _train_gpus(cfg), ranks, skip)
        return
    address_file = components.start_inference(supervisor, cfg.inference, skip)
    components.start_env_servers(supervisor, _write_eval_servers(components, cfg))
    components.start_trainer(supervisor, cfg, _train_gpus(cfg), ranks, skip)
    base_url = components.await_inference(supervisor, address_file)
    evaluation = cfg.online_eval(components.ctx.run_dir, base_url, components.engines(address_file))
    components.start_online_evaluation(supervisor, evaluation)


def _write_eval_servers(components: Components, cfg: SFTConfig):
    return components.write_env_servers(cfg.eval.source, cfg.seed, cfg.log, cfg.env_vars)


def _start_rl(supervisor: Supervisor, components: Components, cfg: RLConfig) -> None:
    """Inference, env servers and trainer load side by side; the orchestrator starts when inference has its address."""
    place, orchestrator, address_file = cfg.deployment, cfg.orchestrator, None
    if cfg.inference is not None:
        address_file = components.start_inference(supervisor, cfg.inference, _inference_gpus(cfg))
    frozen = {
        model: components.start_inference(supervisor, config, 0, f"inference-frozen-{number}")
        for number, (model, config) in enumerate(_frozen_servers(cfg).items())
    }
    components.start_env_servers(supervisor, _write_env_servers(components, cfg))
    skip = _skipped_gpus(cfg)
    components.start_trainer(supervisor, cfg.trainer, _train_gpus(cfg), place.num_train_ranks, skip)
    if address_file is not None:
        client = orchestrator.model.client
        client.base_url = components.await_inference(supervisor, address_file)
        client.admin_base_url = components.engines(address_file) or client.admin_base_url
    urls = {model: components.await_inference(supervisor, file) for model, file in frozen.items()}
    for _, model in orchestrator.frozen_models():
        model.base_url = model.base_url or urls[model.name]
    components.start_orchestrator(supervisor, orchestrator)


def _frozen_servers(cfg: RLConfig) -> dict[str, InferenceConfig]:
    """`{model: configuration}` of the servers for frozen models that have none: the policy's, with another model."""
    servers: dict[str, InferenceConfig] = {}
    for _, model in cfg.orchestrator.frozen_models():
        if model.base_url is None and model.name not in servers:
            assert cfg.inference is not None
            config = servers[model.name] = cfg.inference.model_copy(deep=True)
            config.vllm.model, config.vllm.served_model_name, config.server.port = model.name, None, 0
            config.vllm.data_parallel_size = 1
            config.output_dir = None  # the run's weights are not for it
    return servers


def _inference_gpus(cfg: RLConfig) -> int:
    """GPUs that the managed inference server takes, the first ones of a host (over several nodes: all of its own)."""
    place = cfg.deployment
    if cfg.inference is None or place.type == "multi_node":
        return 0
    return place.num_infer_gpus


def _skipped_gpus(cfg: RLConfig) -> int:
    """Of those, the ones that are not the trainer's as well."""
    shared = cfg.deployment.type == "single_node" and cfg.deployment.share_gpus
    return 0 if shared else _inference_gpus(cfg)


def _train_gpus(cfg: TrainConfig) -> int:
    """GPUs of the trainer on each of its hosts."""
    place = cfg.deployment
    return place.gpus_per_node if place.type == "multi_node" else place.num_train_gpus


def _write_env_servers(components: Components, cfg: RLConfig):
    orchestrator = cfg.orchestrator
    sources = [*orchestrator.train.source, *(orchestrator.eval.source if orchestrator.eval else [])]
    return components.write_env_servers(sources, orchestrator.seed, orchestrator.log, orchestrator.env_vars)
