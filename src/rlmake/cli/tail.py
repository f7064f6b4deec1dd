"""`rlmake tail <run>`: all logs of a run as one, wherever it runs, and where it is in the queue."""

import fcntl
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlmake.build import lease
from rlmake.build.names import OUTPUTS
from rlmake.core import slurm
from rlmake.core.arguments import ArgumentParser
from rlmake.core.errors import UserError, nearest
from rlmake.core.jsonio import read_json
from rlmake.launch.progress import Follower

LOOK_SECONDS, ASK_SECONDS = 0.5, 10.0
PER_RANK = "torchrun"  # the ranks' own files; what they say at the top is in trainer.log


@dataclass(frozen=True)
class Run:
    """`folder`: the run directory itself, in the store for a run of the build. `shown`: as the user named it."""

    folder: Path
    shown: str

    def job(self) -> str | None:
        """The SLURM job that was submitted last, None when it was never submitted."""
        notes = [*self.folder.glob("submitted-checkpoint-*.json"), self.folder / "launcher" / "job.json"]
        notes = [path for path in notes if path.is_file()]
        newest = max(notes, key=lambda path: path.stat().st_mtime, default=None)
        if newest is None:
            return None
        note = read_json(newest)
        if not isinstance(note, dict) or not isinstance(note.get("job"), str):
            raise UserError(f"{newest}: job: expected the number of a SLURM job; remove the file if it is of no use")
        return note["job"]

    def log_dir(self) -> Path | None:
        """The logs of the newest attempt."""
        latest = self.folder / "logs" / "latest"
        return latest.resolve() if latest.exists() else None

    def holder(self) -> str | None:
        """Who runs it on this host, or says so by its lease; None when nobody does."""
        record = lease.read(self.folder) if self.folder.is_dir() else None
        if record is not None and not record.get("released") and not _gone(record):
            return lease.describe(record)
        lock = self.folder / "launcher" / "lock"
        if lock.is_file():
            with open(lock) as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return file.read().strip()
        return None


def _gone(record: dict) -> bool:
    """Whether a lease's holder is known to have ended."""
    if record["machine"] == lease.machine():
        from rlmake.core import procs

        process = procs.process(record["pid"])
        return process is None or process.started != record["pid_start"]
    return bool(record.get("slurm_job")) and slurm.left_queue(record["slurm_job"])


def find(name: str) -> Run:
    """The run of that name or directory. Raises `UserError` when there is none."""
    for folder in (Path(name), Path(OUTPUTS) / name):
        if (folder / "logs").exists() or (folder / "configs").exists() or (folder / "launcher").exists():
            logs = folder / "logs"
            return Run(logs.resolve().parent if logs.is_symlink() else folder.resolve(), name)
    known = [path.parent.relative_to(OUTPUTS).as_posix() for path in sorted(Path(OUTPUTS).glob("**/logs"))]
    there = f"; there are {', '.join(known)}" if known else ""
    raise UserError(f"{name}: no run of this name has been started here{nearest(name, known) or there}")


def tail(argv: list[str]) -> int:
    """Follow all logs of a run, queued, running or ended, and say where it is in the queue. A job that SLURM holds
    because a node could not start it is released."""
    parser = ArgumentParser(prog="rlmake tail", description=tail.__doc__)
    parser.add_argument("run", help="run name (the experiment's path), or its directory")
    parser.add_argument("-n", "--lines", type=int, default=10, help="lines of each log to begin with")
    parser.add_argument("--no-follow", action="store_true", help="print what there is and leave")
    args = parser.parse_args(argv)
    if args.lines < 0:
        raise UserError(f"rlmake tail: --lines: expected a number from 0 on, not {args.lines}")
    run = find(args.run)
    try:
        return _follow(run, args.lines, once=args.no_follow)
    except KeyboardInterrupt:
        return 130


def _follow(run: Run, lines: int, once: bool) -> int:
    logs, told, asked, alive, releaser = _Logs(run, lines), "", -ASK_SECONDS, True, slurm.Releaser()
    while True:
        if time.monotonic() - asked >= ASK_SECONDS:
            asked = time.monotonic()
            said, alive, code = state(run, None if once else releaser)
            if said != told:
                told = said
                print(f"{run.shown}: {said}", file=sys.stderr, flush=True)
        shown = logs.show()
        if once or not alive:
            if not logs.seen and not shown:
                print(f"{run.shown}: no logs yet", file=sys.stderr)
            return code
        time.sleep(LOOK_SECONDS)


def state(run: Run, releaser: slurm.Releaser | None = None) -> tuple[str, bool, int]:
    """(in words, whether more is to come, exit code). `releaser`: of a job that is held."""
    number = run.job()
    jobs = slurm.queue() if number is not None and slurm.here() else []
    if jobs is None:
        return f"SLURM job {number}; SLURM does not answer", True, 0
    job = next((job for job in jobs if job.id == number), None)
    if job is not None and job.live:
        if releaser and (told := releaser(job)):
            return told, True, 0
        return f"{job}{_place(job, jobs)}", True, 0
    if holder := run.holder():
        return f"running, {holder}", True, 0
    end = slurm.ended(number) if number is not None and slurm.here() else None
    if end is not None:
        code = f", exit code {end.code}" if end.code else ""
        return f"ended, SLURM job {number}: {end.state}{code}", False, int(end.state != "COMPLETED")
    return "not running", False, 0


def _place(job: slurm.Job, jobs: list[slurm.Job]) -> str:
    """How many of the partition's pending jobs SLURM looks at before this one."""
    if job.state != "PENDING":
        return ""
    answer = slurm.ask("squeue", "-h", "-t", "PD", "-S", "-p,i", "-o", "%i")
    pending = answer.stdout.split() if answer is not None else []
    return f", {pending.index(job.id)} pending jobs before it" if job.id in pending else ""


class _Logs:
    """Every log of the newest attempt, each line behind the component that wrote it."""

    def __init__(self, run: Run, lines: int):
        self.run, self.lines = run, lines
        self.folder: Path | None = None
        self.seen: dict[Path, Follower] = {}

    def show(self) -> bool:
        """Print what is new; whether anything was."""
        folder, printed = self.run.log_dir(), False
        if folder is not None and folder != self.folder:
            if self.folder is not None:
                print(f"{self.run.shown}: {folder.name.replace('_', ' ')} begins", file=sys.stderr)
            self.folder, self.seen = folder, {}
        for path in _files(folder) if folder is not None else ():
            label = path.relative_to(folder).with_suffix("").as_posix()
            if path not in self.seen:
                self.seen[path] = Follower(path)
                new = self.seen[path].lines()[-self.lines :] if self.lines else []
            else:
                new = self.seen[path].lines()
            for line in new:
                print(f"{label:<12} | {line}")
                printed = True
        sys.stdout.flush()
        return printed


def _files(folder: Path) -> Iterator[Path]:
    """Logs in a stable order; links (trainer.log over several nodes) and the ranks' own files are left out."""
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != PER_RANK)
        for name in sorted(names):
            path = Path(root) / name
            if name.endswith(".log") and path.is_file() and not path.is_symlink():
                yield path
