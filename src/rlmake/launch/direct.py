"""Runs started directly (`rl @ file.toml`), not by the build: name and directory, guard, --clean, --dry-run."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loguru import logger

from rlmake.build import names
from rlmake.build.experiments import FOLDER as EXPERIMENTS
from rlmake.config import EvalConfig, RLConfig, SFTConfig
from rlmake.config.optim import warmup_fault
from rlmake.core import log
from rlmake.core.errors import ConfigError, Fault
from rlmake.dashboard import registry
from rlmake.evals.progress import going_on_from
from rlmake.launch import door, evaluate, rundir, train
from rlmake.launch.attempt import allocate, record
from rlmake.launch.inputs import check_inputs
from rlmake.launch.requeue import continued
from rlmake.launch.resume import starting_point

DirectConfig = SFTConfig | RLConfig | EvalConfig


def launch(kind: str, cfg: DirectConfig, argv: Sequence[str], files: Sequence[Path]) -> None:
    """Carry out `sft`, `rl` or `eval` as the command line asked. `argv`: the whole command."""
    log.setup("launcher", cfg.log.level, cfg.log.json_logging)
    name = cfg.run.name or cfg.auto_name(rundir.short_id())
    run_dir = Path(cfg.output_dir) / (cfg.run.dir or name)
    check_name(cfg)
    training = not isinstance(cfg, EvalConfig)
    external = train.checkpoint_folder(cfg) if training else None
    checkpoints = Path(external) if external else None
    resume = train.asked_resume(cfg) if training else cfg.resume
    continues = resume is not None and resume.dir is None
    again = door.in_own_job(run_dir) and door.is_requeued()  # another life of the job that was submitted for this run
    door.check_not_queued(run_dir)
    options = door.check(cfg, kind) if cfg.slurm is not None and not door.in_own_job(run_dir) else None
    if continues and not (cfg.run.name or cfg.run.dir):
        raise ConfigError(Fault("needs the run to go on with: give its run.name", "resume"))
    if cfg.clean:
        if resume is not None and (continues or Path(resume.dir).resolve().is_relative_to(run_dir.resolve())):
            raise ConfigError(Fault("--clean would delete what is to be resumed from; give one of the two", "resume"))
        rundir.check_clean(run_dir, Path(cfg.output_dir), checkpoints)
    else:
        rundir.check_free(run_dir, checkpoints, resume=continues or again)
    check_inputs(cfg, files, built=not cfg.dry_run)
    if training and (fault := warmup_fault(getattr(cfg, "trainer", cfg).scheduler, train.max_steps(cfg))):
        raise ConfigError(Fault(fault, "scheduler", str(files[0]) if len(files) == 1 else None))
    unlinked = continues and checkpoints is not None and not (run_dir / "checkpoints").exists()
    if resume is not None and not (again or unlinked):
        if training:
            starting_point(run_dir, resume, None, hashes=False)  # the launch itself reads every byte
        else:
            going_on_from(run_dir, resume)
    if cfg.dry_run and options is None:
        _dry_run(kind, cfg, run_dir, argv, files)
        return
    if cfg.clean and not cfg.dry_run:
        rundir.clean(run_dir, Path(cfg.output_dir), checkpoints)
        rundir.check_free(run_dir, checkpoints, resume=continues)
    with rundir.made(run_dir):
        _start(kind, cfg, run_dir, name, argv, files, options, "auto" if again else resume)


def _start(
    kind: str,
    cfg: DirectConfig,
    run_dir: Path,
    name: str,
    argv: Sequence[str],
    files: Sequence[Path],
    options: list[str] | None,
    resume: Any,
) -> None:
    """Submit the run (with `options` of sbatch), or carry it out here."""
    if cfg.dashboard and not cfg.dry_run and sys.stdout.isatty():
        show_dashboard(Path(cfg.output_dir))
    if options is not None:
        attempt = allocate(run_dir)
        record(attempt, kind, argv, files)
        door.submit(kind, cfg, run_dir, name, attempt, options, dry_run=cfg.dry_run)
    elif not isinstance(cfg, EvalConfig):
        with continued():
            train.run(kind, cfg, run_dir, argv=argv, files=files, resume=resume, fingerprint=None, run_name=name)
    else:
        evaluate.run(cfg, None, run_dir, identity={"run": name}, argv=argv, files=files)


def show_dashboard(output_dir: Path) -> None:
    """Say where the run can be watched; a dashboard that can't start is no reason to fail."""
    try:
        url = registry.ensure(output_dir)
    except OSError as error:
        logger.warning(f"no dashboard: {error}; --no-dashboard does without")
        return
    if url:
        logger.info(f"dashboard: {url}")
    else:
        logger.warning(f"the dashboard did not start, see {registry.folder()}/daemon.log; --no-dashboard does without")


def check_name(cfg: DirectConfig) -> None:
    """A direct run may not take a place that is the build's: an experiment's, or inside a run's folder."""
    for key in ("name", "dir"):
        given = getattr(cfg.run, key)
        if given is None:
            continue
        fault = names.fault_of_run(given)
        declared = next((path for path in (EXPERIMENTS / f"{given}.toml", EXPERIMENTS / given) if path.exists()), None)
        if fault is None and declared is not None and Path(cfg.output_dir) == Path(names.OUTPUTS):
            fault = f"'{given}' belongs to the build ({declared}); choose another name"
        if fault:
            raise ConfigError(Fault(fault, f"run.{key}"))


def _dry_run(kind: str, cfg: DirectConfig, run_dir: Path, argv: Sequence[str], files: Sequence[Path]) -> None:
    if isinstance(cfg, EvalConfig):
        resolved = evaluate.dry_run(cfg, run_dir, argv=argv, files=files)
    else:
        resolved = train.dry_run(kind, cfg, run_dir, argv=argv, files=files)
    print(f"dry run: nothing was started; resolved configuration: {resolved}")
