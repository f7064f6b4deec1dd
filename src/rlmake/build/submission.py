"""What the SLURM executor needs besides Snakemake: one submission per work, drivers that know of one another, the
script of a job, and what sbatch would refuse.

    <store directory>/submit.lock            look-up and sbatch are one step for all drivers
                     /submitted-<name>.json  {job, driver}: for clusters that rewrite comments, and for `rlmake tail`
    outputs/.store/.drivers/<driver>         locked while that driver lives
"""

import contextlib
import fcntl
import functools
import os
import shlex
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from loguru import logger

from rlmake.build import shared_folder, store
from rlmake.build.plan import EXPORT_RULE, RULE_OF
from rlmake.build.store import STORE, Artefact
from rlmake.core import slurm
from rlmake.core.errors import ConfigError, Fault, UserError, nearest
from rlmake.core.jsonio import read_json, write_json

SCHEMA = 1
OF_RULE = {rule: (stage, store.KIND_OF_STAGE[stage]) for stage, rule in RULE_OF.items()} | {
    rule: ("train", kind) for kind, rule in EXPORT_RULE.items()
}
BUSY = ("timed out", "unable to contact", "busy", "temporarily", "connection refused")
LEAD = 120  # seconds before the time limit at which a training saves and leaves
ENVIRONMENT = """\
ulimit -n 65536 2>/dev/null || true
if [ -e .env ]; then
  [ -f .env ] && [ -r .env ] || { echo "error: $PWD/.env cannot be read on $(hostname)" >&2; exit 2; }
  set -a; . ./.env; set +a
fi"""  # the start of every job's script
ERRORS = 24  # lines of a failed job's log that are shown
LATER = (
    "not available (",
    "down",
    "drained",
    "inactive",
    "reserved",
    "busy",
)  # reasons of sbatch to wait, not to refuse


def artefact_of(job: Any) -> Artefact:
    """What a job of one of the build's rules makes."""
    stage, kind = OF_RULE[job.name]
    step = int(job.wildcards.n) if stage == "train" else None
    return Artefact(stage, job.wildcards.fp, kind, step)


def finished(artefact: Artefact) -> bool:
    """Whether the work is done; its manifest is then declared once more, Snakemake deletes it before each job."""
    if not store.finished(artefact):
        return False
    store.declare(artefact)
    return True


@contextlib.contextmanager
def locked(artefact: Artefact) -> Iterator[None]:
    """One driver at a time looks up and submits the work of a store directory."""
    artefact.folder.mkdir(parents=True, exist_ok=True)
    with open(artefact.folder / "submit.lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            logger.warning(f"{file.name}: no file locks here ({error}); two drivers might submit twice")
        yield


def note_path(artefact: Artefact) -> Path:
    step = f"-{artefact.step}" if artefact.step is not None else ""
    return artefact.folder / f"submitted-{artefact.kind}{step}.json"


class Driver:
    """This driver among others: each holds a lock that the kernel lets go when it dies, SIGKILL included."""

    def __init__(self, identity: str):
        self.identity = identity
        self._file: Any = None
        self._owners: dict[str, str] = {}  # SLURM job → its driver, of jobs that this one attached to

    def note(self, artefact: Artefact, job: str) -> None:
        """Record a submission."""
        if self._file is None:
            path = STORE / ".drivers" / self.identity
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "w")  # noqa: SIM115  held for the driver's life
            with contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        write_json(note_path(artefact), {"schema": SCHEMA, "job": job, "driver": self.identity})

    def noted(self, artefact: Artefact, jobs: Sequence[slurm.Job], workdir: str) -> slurm.Job | None:
        """The live job of this user and folder that was noted for the work."""
        record = noted(artefact)
        if record is None:
            return None
        here = os.path.realpath(workdir)
        found = (j for j in jobs if j.id == record["job"] and j.live and os.path.realpath(j.workdir) == here)
        return next(found, None)

    def attached(self, job: str) -> None:
        """Remember whose job it is."""
        for path in STORE.glob("*/submitted-*.json"):
            with contextlib.suppress(UserError):
                record = read_json(path)
                if record["job"] == job:
                    self._owners[job] = record["driver"]

    def of_another(self, job: str) -> bool:
        """Whether another driver submitted the job and lives."""
        owner = self._owners.get(job)
        if owner in (None, self.identity):
            return False
        try:
            with open(STORE / ".drivers" / str(owner)) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        if self._file is not None:
            (STORE / ".drivers" / self.identity).unlink(missing_ok=True)
            self._file.close()
            self._file = None


def noted(artefact: Artefact) -> dict[str, Any] | None:
    """The last submission of a piece of work, None when there was none."""
    with contextlib.suppress(UserError):
        return read_json(note_path(artefact))
    return None


def script(commands: Sequence[str], artefact: Artefact) -> str:
    """The script of a job; with several commands that of an array, whose task k runs the k-th.

    `exec`: the early signal goes to the script's own process, which is then the command.
    """
    prepare = checked(_table(artefact).get("pre_run_command"))
    lines = ["#!/bin/bash", ENVIRONMENT, *([prepare] if prepare else [])]
    if len(commands) == 1:
        lines.append(f"exec {commands[0].strip()}")
    else:
        lines.append("case $SLURM_ARRAY_TASK_ID in")
        lines += [f"{task}) exec {command.strip()} ;;" for task, command in enumerate(commands, 1)]
        lines.append("esac")
    return "\n".join(lines) + "\n"


def checked(command: str | None) -> str | None:
    """`pre_run_command` as lines of a script, which ends with it where it fails: a mistake, not tried again."""
    if not (command or "").strip():
        return None
    said = f"slurm.pre_run_command ({command.strip().splitlines()[0]}) ended with code"
    report = f'echo "error: "{shlex.quote(said)}" $code on $(hostname)" >&2; exit 2'
    return f"{command}\ncode=$?; if [ $code -ne 0 ]; then {report}; fi"


def check_env_file(project: Path) -> None:
    """Raise `ConfigError` for a `.env` that no job could read."""
    file = project / ".env"
    if os.path.lexists(file) and not (file.is_file() and os.access(file, os.R_OK)):
        raise ConfigError(Fault(f"{file}: every job reads it first, and it cannot be read"))


def errors_in(log: Path) -> list[str]:
    """What a failed job said about it, the end of its log: from the first line that begins with `error:` on."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - (64 << 10)))
            lines = [line.rstrip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return []
    starts = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    return [line.removeprefix("error: ") for line in lines[starts[0] :]][:ERRORS] if starts else lines[-ERRORS:]


def signals(job: Any) -> str:
    """Options of sbatch for being cut off: requeue, and for a training the early signal of its time limit, which may be
    the partition's own."""
    if job.name != "train":
        return " --requeue"
    lead = _table(artefact_of(job)).get("save_before_end") or LEAD
    runtime = job.resources.get("runtime")
    return f" --requeue --signal=B:USR1@{min(lead, int(runtime) * 60 - 1) if runtime else lead}"


def _table(artefact: Artefact) -> dict[str, Any]:
    """The [slurm] options in the specification of a job; none before the specification is written."""
    try:
        return store.read_spec(artefact.stage, artefact.fingerprint)["resources"].get("slurm") or {}
    except UserError:
        return {}


def job_name(job: Any) -> str | None:
    """`slurm.job_name` of a training."""
    return _table(artefact_of(job)).get("job_name") if job.name == "train" else None


def unused(artefact: Artefact) -> str:
    """Keys of a training's [slurm] that a build has no use for."""
    return ", ".join(_table(artefact).get("unused") or ())


def options(wanted: dict[str, Any], training: bool) -> list[str]:
    """Options of sbatch for a job's resources (`resources.of`), long ones. A training gets its early signal."""
    table, nodes = wanted["slurm"], wanted["nodes"]
    name = partition(table["partition"])
    found = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", f"--cpus-per-task={wanted['threads']}"]
    found += [f"--gres=gpu:{wanted['gpus_per_node']}"] if wanted["gpus"] else []
    found += [f"--partition={name}"] if name else []
    found += [f"--account={table['account']}"] if table["account"] else []
    found += [f"--time={table['time']}"] if table["time"] else []
    found += [f"--mem={table['memory']}M"] if table["memory"] else []
    found.append("--requeue")
    if training:
        found.append(f"--signal=B:USR1@{table['save_before_end'] or LEAD}")
    return [*found, *table["extra"]]


def check_plan(rows: Iterable[dict[str, Any]], works: dict[tuple[str, str], Any]) -> None:
    """Ask SLURM about the jobs of a plan (rows of `rlmake plan`); works: the registry's. Raises `ConfigError`."""
    if why := slurm.unusable():
        raise UserError(why)
    check_env_file(Path.cwd())
    faults: dict[str, Fault] = {}
    for row in rows:
        stage, _ = OF_RULE.get(row["rule"], ("", ""))
        if row["rule"] in ("train", "evaluate"):
            folder = Path(row["output"]).relative_to(STORE).parts[0]
            work = works[stage, folder.rpartition("-")[2]]
            refuse_blind(Path.cwd(), [work.resources["slurm"]["partition"]])
            call = shlex.join(["sbatch", *options(work.resources, training=stage == "train")])
            if call not in faults and (refused := impossible(call)):
                faults[call] = Fault("SLURM would refuse {}: {}".format(*refused), file=row["target"])
    if faults:
        raise ConfigError(faults.values())


@functools.cache
def partitions() -> tuple[str, ...]:
    """The cluster's partitions, none where it does not say."""
    answer = slurm.ask("sinfo", "-h", "-o", "%R")
    return tuple(dict.fromkeys(answer.stdout.split())) if answer is not None and answer.returncode == 0 else ()


def partition(wanted: Any) -> str | None:
    """The partition to ask for; `cluster`, the configuration's default, only where there is one."""
    known = partitions()
    if not wanted or (str(wanted) == "cluster" and known and "cluster" not in known):
        return None
    return str(wanted)


def refuse_blind(project: Path, wanted: Iterable[Any]) -> None:
    """Raise `ConfigError` when the nodes of a partition that is asked for cannot see the project's folder."""
    for name in dict.fromkeys(map(partition, wanted)):
        if why := shared_folder.unseen(project.resolve(), name):
            raise ConfigError(Fault(f"partition {name or 'by default'}: {why}"))


def refuse_impossible(calls: Iterable[str]) -> None:
    """Ask SLURM about each kind of job (`sbatch --test-only`) before any is submitted. Raises `ConfigError`."""
    faults: dict[str, str] = {}  # reason → the first kind of job that it is given for
    for call in dict.fromkeys(calls):
        if refused := impossible(call):
            asked, why = refused
            faults.setdefault(why, asked)
    if faults:
        raise ConfigError([Fault(f"SLURM would refuse {asked}: {why}") for why, asked in faults.items()])


def impossible(call: str) -> tuple[str, str] | None:
    """What a command line asks for and why sbatch would never run it; None when it would, or that is not known."""
    words = shlex.split(call)
    try:
        answer = subprocess.run(
            [*words, "--test-only", "--wrap", "true"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    said = " ".join(answer.stderr.split())
    if answer.returncode == 0 or is_busy(said) or any(word in said.lower() for word in LATER):
        return None
    return _asked(words), _why(said, words)


def is_busy(said: str) -> bool:
    """Whether an error of SLURM's commands is about the controller, not about the job."""
    return any(word in said.lower() for word in BUSY)


def _asked(words: Sequence[str]) -> str:
    """What a call asks for, without the names of the job."""
    skip = ("--parsable", "--export", "--requeue", "--signal", "--test-only")
    named = ("--job-name", "--output", "--comment", "-D")
    shown, rest = [], iter(words[1:])
    for word in rest:
        if word in named:
            next(rest, None)
        elif not word.startswith((*skip, *named)):
            shown.append(word)
    return f"a job with {' '.join(shown)}" if shown else "any job"


def _why(said: str, words: Sequence[str]) -> str:
    text = said.lower()
    if "account" in text:
        account = _given(words, "-A", "--account=")
        return f"there is no account '{account}', or it is not yours, or not for this partition"
    if "partition" in text:
        wanted = _given(words, "-p", "--partition=")
        return f"there is no partition '{wanted}'{nearest(wanted, partitions())}; there are {', '.join(partitions())}"
    if "node configuration" in text or "node count" in text:
        answer = slurm.ask("sinfo", "-h", "-o", "%R: %D nodes of %c CPUs, %m MB, %G")
        there = "; ".join(answer.stdout.splitlines()) if answer is not None else ""
        return f"no partition has such nodes, or so many ({there})"
    return said


def _given(words: Sequence[str], short: str, long: str) -> str:
    """The value of an option in a command line."""
    found = [words[i + 1] for i, word in enumerate(words) if word == short]
    found += [word.removeprefix(long) for word in words if word.startswith(long)]
    return found[0] if found else ""
