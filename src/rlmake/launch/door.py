"""Submission by an entry point: `rl @ run.toml @ slurm.toml` writes a script and hands it to sbatch.

<run>/launcher/<entry>.sbatch        the script: in the job it calls the same entry point with the file below
              /<entry>.json          the resolved configuration, read by every life of the job
              /job.json              {schema, job, entry, script}: the last submission
              /logs/job_<id>.log     what the launcher prints in the job
<run>/configs/attempt_<n>/resolved/   the same, until the attempt's own components write what they were given
"""

import os
import shlex
import sys
from collections.abc import Sequence
from importlib import resources as package
from pathlib import Path
from typing import Any

from rlmake.build import resources, shared_folder, submission
from rlmake.config import dump
from rlmake.config.shared import SlurmConfig
from rlmake.core import slurm
from rlmake.core.errors import ConfigError, Fault, UserError, nearest
from rlmake.core.jsonio import read_json, write_bytes, write_json
from rlmake.launch import rundir
from rlmake.launch.attempt import Attempt

SCHEMA = 1
MARK = "RLMAKE_SUBMITTED"  # set in the job, to the run directory: there the run is started, not submitted again
VALUES = (
    "entry", "run_name", "options", "nodes", "project_dir", "config_dir", "log_dir", "output_dir", "exports",
    "environment", "pre_run_command", "command", "config",
)  # fmt: skip


def in_own_job(run_dir: Path) -> bool:
    """Whether this process is the job that was submitted for the run: the script says so, or else the record."""
    if slurm.own_job() is None:
        return False
    return os.environ.get(MARK) == str(run_dir.resolve()) or _submitted(run_dir) == slurm.own_job()


def _submitted(run_dir: Path) -> str | None:
    """The last job that was submitted for the run."""
    path = run_dir / "launcher" / "job.json"
    return read_json(path)["job"] if path.is_file() else None


def is_requeued() -> bool:
    return os.environ.get("SLURM_RESTART_COUNT", "0") != "0"


def live_job(run_dir: Path) -> slurm.Job | None:
    """The job of a run that is queued or running."""
    number = _submitted(run_dir)
    if number is None or not slurm.here():
        return None
    return next((job for job in slurm.queue() or () if job.id == number and job.live), None)


def check_not_queued(run_dir: Path) -> None:
    """Raise `UserError` when a job of the run is queued or running, other than this one."""
    if not in_own_job(run_dir) and (job := live_job(run_dir)):
        held = slurm.Releaser()(job)  # nobody else looks after a job that was submitted directly
        raise UserError(f"{run_dir}: {held or f'{job}; wait for it, or end it with: scancel {job.id}'}")


def check(cfg: Any, kind: str) -> list[str]:
    """Options of sbatch for the run. Raises `UserError` for what SLURM, or the nodes, would not do."""
    table: SlurmConfig = cfg.slurm
    if why := slurm.unusable():
        raise ConfigError(Fault(why, "slurm"))
    project = Path(table.project_dir)
    if not project.is_dir():
        raise ConfigError(Fault(f"{table.project_dir}: no such directory", "slurm.project_dir"))
    template(table.template_path)
    submission.check_env_file(project)
    options = submission.options(resources.of(kind, dump(cfg)), training=kind in ("rl", "sft"))
    if why := shared_folder.unseen(project.resolve(), submission.partition(table.partition)):
        raise ConfigError(Fault(why, "slurm.project_dir"))
    submission.refuse_impossible([shlex.join(["sbatch", *options])])
    return options


def submit(
    kind: str, cfg: Any, run_dir: Path, name: str, attempt: Attempt, options: Sequence[str], *, dry_run: bool
) -> None:
    """Write resolved configuration and script, and submit it (not in a dry run). Says what to do next."""
    run_dir, table = run_dir.resolve(), cfg.slurm
    config = _reentry(kind, cfg, run_dir, name)
    resolved = attempt.write_resolved(kind, config)
    launcher = run_dir / "launcher"
    (launcher / "logs").mkdir(parents=True, exist_ok=True)
    log = launcher / "logs" / "job_%j.log"
    lines = [f"--job-name={table.job_name}", f"--output={log}", *options]
    reread = launcher / f"{kind}.json"  # an attempt's own files are written over when it starts
    write_json(reread, config)
    command = [sys.executable, "-m", "rlmake.cli.main", kind, "@", str(reread)]
    values = {
        "entry": kind,
        "run_name": name,
        "options": [_directive(line) for line in lines],
        "nodes": resources.of(kind, dump(cfg))["nodes"],
        "project_dir": str(Path(table.project_dir).resolve()),
        "config_dir": str(attempt.config_dir),
        "log_dir": str(attempt.log_dir),
        "output_dir": str(run_dir),
        "exports": exports(cfg, run_dir, name, attempt),
        "environment": submission.ENVIRONMENT,
        "pre_run_command": submission.checked(table.pre_run_command),
        "command": shlex.join(command),
        "config": config,
    }
    script = launcher / f"{kind}.sbatch"
    write_bytes(script, _jinja().from_string(template(table.template_path)).render(values).encode())
    print(f"script: {script}")
    print(f"resolved configuration: {resolved}")
    if dry_run:
        print(f"dry run: nothing was submitted; submit it by hand with: sbatch {shlex.quote(str(script))}")
        return
    answer = slurm.ask("sbatch", "--parsable", str(script), timeout=120.0)
    if answer is None or answer.returncode != 0:
        said = "no answer" if answer is None else " ".join(answer.stderr.split())
        raise UserError(f"sbatch: {said}; the script is {script}")
    number = answer.stdout.strip().split(";")[0]
    record = {"schema": SCHEMA, "job": number, "entry": kind, "script": str(script)}
    write_json(launcher / "job.json", record)
    print(f"submitted as SLURM job {number}; log: {str(log).replace('%j', number)}")
    print(f"follow it with: rlmake tail {shlex.quote(os.path.relpath(run_dir))}    cancel it with: scancel {number}")


def exports(cfg: Any, run_dir: Path, name: str, attempt: Attempt) -> dict[str, str]:
    """Variables that the job's processes, and templates of the user's own, find."""
    found = {
        MARK: str(run_dir),
        "PROJECT_DIR": str(Path(cfg.slurm.project_dir).resolve()),
        "OUTPUT_DIR": str(run_dir),
        "CONFIG_DIR": str(attempt.resolved),
        "LOG_DIR": str(attempt.log_dir),
        "PRL_RUN_NAME": name,
    }
    if hasattr(cfg, "run"):
        found["PRL_RUN_ID"] = found["WANDB_RUN_ID"] = rundir.run_id(run_dir)
    place = getattr(cfg, "deployment", None)
    if getattr(place, "type", None) == "multi_node" and hasattr(place, "infer_nodes"):
        managed = cfg.inference is not None
        infer = place.infer_nodes(managed)
        found |= {
            "NUM_TRAIN_NODES": str(place.num_train_nodes),
            "NUM_INFER_NODES": str(infer),
            "NUM_INFER_REPLICAS": str(place.num_infer_replicas),
            "NODES_PER_INFER_REPLICA": str(infer // place.num_infer_replicas),
            "GPUS_PER_NODE": str(place.gpus_per_node),
            "ORCH_PROCID": str(infer - 1 if place.orchestrator_on_inference and infer else infer),
        }
        if managed:
            parallel = cfg.inference.vllm.tensor_parallel_size
            found["ROUTER_PORT"] = str(cfg.inference.server.port)
            found["INFERENCE_TP"] = str(parallel)
            found["INFERENCE_DP_LOCAL"] = str(max(1, place.gpus_per_node // parallel))
    return found


def template(path: str | None) -> str:
    """The text of the script's template. Raises `ConfigError` for one that is missing, broken, or asks for what there
    is not."""
    import jinja2
    from jinja2 import meta

    if path is None:
        return package.files("rlmake.launch").joinpath("job.sbatch.j2").read_text(encoding="utf-8")
    try:
        text = Path(path).read_text(encoding="utf-8")
        wanted = meta.find_undeclared_variables(_jinja().parse(text))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            Fault(f"{path}: {getattr(error, 'strerror', None) or error}", "slurm.template_path")
        ) from None
    except jinja2.TemplateError as error:
        raise ConfigError(Fault(f"{path}: {error}", "slurm.template_path")) from None
    if unknown := sorted(wanted - set(VALUES)):
        fault = f"{path}: there is no '{unknown[0]}'{nearest(unknown[0], VALUES)}; there are {', '.join(VALUES)}"
        raise ConfigError(Fault(fault, "slurm.template_path"))
    return text


def _jinja() -> Any:
    import jinja2

    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    return environment


def _directive(option: str) -> str:
    """An option as a line of a script: quoted where SLURM's own parser needs it."""
    name, equals, value = option.partition("=")
    if not equals or not any(sign in value for sign in " \t'\"\\"):
        return option
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{name}="{escaped}"'


def _reentry(kind: str, cfg: Any, run_dir: Path, name: str) -> dict[str, Any]:
    """What the job reads: without `clean` and `dry_run`; on one host without [slurm] too, which it needs no more."""
    config = dump(cfg)
    config |= {key: False for key in ("clean", "dry_run") if key in config}
    config["run"] |= {"name": name, "dir": run_dir.name}
    config["output_dir"] = str(run_dir if kind == "inference" else run_dir.parent)
    if getattr(getattr(cfg, "deployment", None), "type", None) != "multi_node":
        config["slurm"] = None
    return config
