"""An evaluation on this host: engine, env servers and the evaluation itself, in a folder of its own."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loguru import logger

from rlmake.config import EvalConfig
from rlmake.config.eval import EvalResumeConfig
from rlmake.core.rundir import RunContext
from rlmake.evals import progress
from rlmake.launch import rundir
from rlmake.launch.attempt import allocate, record
from rlmake.launch.components import Components, check_port
from rlmake.launch.inputs import check_rows
from rlmake.launch.interpreter import check_python
from rlmake.launch.placement import gpu_ids
from rlmake.launch.progress import Display
from rlmake.launch.supervise import Supervisor, kill_leftovers
from rlmake.launch.train import open_attempt


def run(
    cfg: EvalConfig,
    model: Path | None,
    out: Path,
    *,
    identity: Mapping[str, Any],
    argv: Sequence[str] = (),
    files: Sequence[Path] = (),
    again: bool = False,
) -> None:
    """Evaluate `model` (a directory; None: what `cfg.model` names) and leave the report in `out`.

    The engine is started when the configuration has an `inference` table; without one `client.base_url` is asked.
    `again`: go on with what an earlier attempt has left in `out` (the build's, whose folder says what is evaluated).
    `identity` goes into the report: suite, run, fingerprints and step. Raises as `train.run` does.
    """
    out = Path(out).resolve()
    # in a build the folder is named by the evaluation's own fingerprint; the suite's is shared by all models
    fingerprint = out.name.rpartition("-")[2] if identity.get("suite_fingerprint") else None
    name = str(identity.get("run") or out.name)
    with rundir.Held(out):
        kill_leftovers(out)
        if again and progress.started(out):
            cfg = cfg.model_copy(update={"resume": EvalResumeConfig(skip_checks=True)})
        check_rows(("source", cfg.source))
        if cfg.inference is not None:
            check_port(cfg.inference.server.host, cfg.inference.server.port, "inference.server.port")
            check_python(cfg.inference)
            gpu_ids(cfg.deployment.num_infer_gpus)
        attempt, ctx = open_attempt("eval", out, argv, files, fingerprint, name)
        sink = logger.add(ctx.log_dir / "launcher.log", level="DEBUG")
        components, cfg = Components(ctx, attempt), resolve(cfg, model, ctx)
        label = f"evaluation of {name}"
        try:
            logger.info(f"{label} starts, attempt {attempt.number}; logs: {ctx.log_dir}")
            with Display(label, ctx.log_dir / "eval.log", 0, None, brief=fingerprint is not None) as display:
                with Supervisor() as supervisor:
                    _start(supervisor, components, cfg, identity)
                    supervisor.wait(display.tick)
        finally:
            logger.remove(sink)


def dry_run(cfg: EvalConfig, out: Path, *, argv: Sequence[str], files: Sequence[Path]) -> Path:
    """Write what an evaluation would write and start nothing. Returns the folder of the resolved configurations."""
    attempt = allocate(out)
    record(attempt, "eval", argv, files)
    ctx = RunContext(out.resolve(), "", out.name, attempt.number, None, attempt.config_dir, attempt.log_dir)
    components, resolved = Components(ctx, attempt), resolve(cfg, None, ctx)
    components.write("eval", resolved)
    components.write_env_servers(resolved.source, resolved.seed, resolved.log, resolved.env_vars)
    if resolved.inference is not None:
        components.write("inference", resolved.inference)
    return attempt.resolved


def resolve(cfg: EvalConfig, model: Path | None, ctx: RunContext) -> EvalConfig:
    """A copy that knows its model and its folder."""
    if model is not None:
        cfg = cfg.with_model(str(model))
    return cfg.placed(ctx.run_dir, ctx.run_name)


def _start(supervisor: Supervisor, components: Components, cfg: EvalConfig, identity: Mapping[str, Any]) -> None:
    if cfg.inference is not None:  # the evaluation loads while the engine does, and reads its address then
        address_file = components.start_inference(supervisor, cfg.inference, cfg.deployment.num_infer_gpus)
    servers = components.write_env_servers(cfg.source, cfg.seed, cfg.log, cfg.env_vars)
    components.start_env_servers(supervisor, servers)
    components.start_evaluation(supervisor, cfg, identity)
    if cfg.inference is not None:  # with several engines it is the router's, which starts when they answer
        components.await_inference(supervisor, address_file)
