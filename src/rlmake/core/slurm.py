"""SLURM's commands, as far as they are needed: the queue, how a job ended, requeue, cancel, and what sbatch would say.

Nothing here raises when the controller does not answer: callers get None and decide how long to wait.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

LIVE = {
    "PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "REQUEUED",
    "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD", "STAGE_OUT",
}  # fmt: skip
FIELDS = "%i|%T|%r|%S|%N|%Z|%k"
TIMEOUT = 30.0
RELEASES = 3  # times that a job is let go again which a node could not start


@dataclass(frozen=True)
class Job:
    """A job as `squeue` shows it. `id` of an array's task is `<job>_<task>`; `start` is expected or real."""

    id: str
    state: str
    reason: str
    start: str
    nodes: str
    workdir: str
    comment: str

    @property
    def live(self) -> bool:
        return self.state in LIVE

    @property
    def held(self) -> bool:
        """Whether it will not start until somebody releases it; SLURM also holds what a node could not start."""
        return self.state in ("REQUEUE_HOLD", "SPECIAL_EXIT") or "held" in self.reason.lower()

    @property
    def launch_failed(self) -> bool:
        """Whether SLURM holds it because a node could not start it (`launch failed requeued held`)."""
        return self.held and "launch" in self.reason.lower()

    def __str__(self) -> str:
        if self.state == "PENDING":
            start = "" if self.start in ("N/A", "") else f", expected to start at {self.start}"
            return f"SLURM job {self.id} is pending ({self.reason}){start}"
        return f"SLURM job {self.id} is {self.state.lower()}" + (f" on {self.nodes}" if self.nodes else "")


@dataclass(frozen=True)
class End:
    """How a job ended: SLURM's word for it, and the exit code of its script (None: not known)."""

    state: str
    code: int | None


def here() -> bool:
    """Whether this host can submit."""
    return shutil.which("sbatch") is not None


def unusable() -> str | None:
    """Why nothing can be submitted from this host, whatever the controller does: no client, or none of a cluster."""
    if not here():
        return "there is no sbatch on this host: start this on a login node of the cluster"
    answer = ask("squeue", "-h", "--me", "-o", "%i")
    if answer is not None and "configuration source" in answer.stderr:
        return f"SLURM's commands know no cluster on this host: {answer.stderr.strip().splitlines()[-1]}"
    return None


def own_job() -> str | None:
    """The job that this process runs in."""
    return os.environ.get("SLURM_JOB_ID")


def ask(*command: str, stdin: str | None = None, timeout: float = TIMEOUT) -> subprocess.CompletedProcess | None:
    """Run one of SLURM's commands; None when it is not installed or does not answer in time."""
    try:
        return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=timeout, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None


def queue() -> list[Job] | None:
    """This user's jobs, also those that ended so lately that the controller still knows them."""
    answer = ask("squeue", "-h", "-r", "--me", "-t", "all", "-o", FIELDS)
    if answer is None or answer.returncode != 0:
        return None
    rows = (line.split("|", 6) for line in answer.stdout.splitlines() if line.count("|") >= 6)
    return [Job(*(field.strip() for field in row)) for row in rows]


def ended(job: str) -> End | None:
    """How a job that is not live any more ended: asked of the controller, then of the accounts. None: nobody knows."""
    answer = ask("scontrol", "-o", "show", "job", job)
    if answer is not None and answer.returncode == 0:
        fields = dict(pair.split("=", 1) for pair in answer.stdout.split() if "=" in pair)
        if state := fields.get("JobState"):
            return End(state, _code(fields.get("ExitCode", "")))
    answer = ask("sacct", "-n", "-X", "-P", "-j", job, "-o", "State,ExitCode")
    if answer is not None and answer.returncode == 0 and "|" in answer.stdout:
        state, code = answer.stdout.splitlines()[0].split("|")[:2]
        return End(state.split()[0], _code(code))
    return None


def _code(text: str) -> int | None:
    """`<exit code>:<signal>` as a shell gives it."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    return (int(match[1]) or (128 + int(match[2]) if match[2] != "0" else 0)) if match else None


def left_queue(job: str) -> bool:
    """Whether SLURM says that a job is no more; False where it does not say (no client, controller down)."""
    answer = ask("squeue", "-h", "-j", job, "-o", "%T")
    if answer is None:
        return False
    if answer.returncode != 0:
        return "Invalid job id" in answer.stderr
    return not set(answer.stdout.split()) & LIVE


def find(jobs: Iterable[Job], comment: str, workdir: Path | str) -> Job | None:
    """The live job with this comment that was submitted from this folder; of an array the task of its part of it."""
    folder = os.path.realpath(workdir)
    for job in jobs:
        if job.live and os.path.realpath(job.workdir) == folder and _means(job, comment):
            return job
    return None


def _means(job: Job, comment: str) -> bool:
    """An array's comment is `<head>a+b+…`: task 1 stands for `<head>a`, and so on."""
    if "+" not in job.comment:
        return job.comment == comment
    first, *rest = job.comment.split("+")
    head = first.rpartition("_")[0]
    names = [first, *(f"{head}_{name}" for name in rest)]
    _, _, task = job.id.partition("_")
    return task.isdigit() and 0 < int(task) <= len(names) and names[int(task) - 1] == comment


def requeue(job: str) -> str | None:
    """Put a job back into the queue. None when it worked, else what SLURM said."""
    answer = ask("scontrol", "requeue", job)
    if answer is None:
        return "scontrol does not answer"
    return None if answer.returncode == 0 else " ".join((answer.stderr or answer.stdout).split())


def release(job: str) -> str | None:
    """Let a held job start. None when it worked, else what SLURM said."""
    answer = ask("scontrol", "release", job)
    if answer is None:
        return "scontrol does not answer"
    return None if answer.returncode == 0 else " ".join((answer.stderr or answer.stdout).split())


class Releaser:
    """What to do about held jobs, for whoever follows some."""

    def __init__(self) -> None:
        self._times: dict[str, int] = {}  # job → how often it was released here; one more: and what lets it go was said

    def __call__(self, job: Job) -> str | None:
        """A job that SLURM holds because a node could not start it is released, `RELEASES` times; of any other that is
        held the answer says, once, how it goes on. None: nothing new."""
        times = self._times.get(job.id, 0)
        if not job.held:
            if times > RELEASES:
                del self._times[job.id]
            return None
        if job.launch_failed and times < RELEASES:
            self._times[job.id] = times + 1
            refused = release(job.id)
            how = f"could not be released: {refused}" if refused else f"released ({times + 1} of {RELEASES} times)"
            return f"SLURM job {job.id} was held because a node could not start it ({job.reason}); {how}"
        if times > RELEASES:
            return None
        self._times[job.id] = RELEASES + 1
        return (
            f"SLURM job {job.id} is held ({job.reason}) and will not start by itself: `scontrol release {job.id}` "
            f"lets it go, `scancel {job.id}` ends it"
        )


def cancel(jobs: Sequence[str]) -> str | None:
    """Cancel jobs. None when it worked, else what SLURM said."""
    answer = ask("scancel", *jobs, timeout=60.0)
    if answer is None:
        return "scancel does not answer"
    return None if answer.returncode == 0 else " ".join(answer.stderr.split())


def config(key: str) -> str | None:
    """A value of the cluster's configuration (`KillWait`, …)."""
    answer = ask("scontrol", "show", "config", timeout=10.0)
    match = re.search(rf"^{key}\s*=\s*(\S+)", answer.stdout, re.MULTILINE) if answer else None
    return match[1] if match else None


def kill_wait() -> float:
    """Seconds between SIGTERM and SIGKILL when SLURM ends a job."""
    value = config("KillWait") or ""
    return float(value) if value.isdigit() else 30.0


def hostnames(nodelist: str) -> list[str]:
    """`node[1-2]` as `[node1, node2]`."""
    answer = ask("scontrol", "show", "hostnames", nodelist)
    return answer.stdout.split() if answer is not None and answer.returncode == 0 else []


def nodes_of(job: str) -> list[str]:
    """The nodes of a running job, in SLURM's order, which is that of the ranks."""
    nodelist = os.environ.get("SLURM_JOB_NODELIST") if job == own_job() else None
    if not nodelist:
        answer = ask("squeue", "-h", "-j", job, "-o", "%N")
        nodelist = answer.stdout.strip() if answer is not None else ""
    return hostnames(nodelist) if nodelist else []


def addresses(nodes: Sequence[str]) -> dict[str, str]:
    """The address of each node, its name where SLURM has no other."""
    answer = ask("scontrol", "-o", "show", "node", ",".join(nodes))
    found = {}
    for line in answer.stdout.splitlines() if answer is not None and answer.returncode == 0 else ():
        fields = dict(pair.split("=", 1) for pair in line.split() if "=" in pair)
        found[fields.get("NodeName", "")] = fields.get("NodeAddr", "")
    return {node: found.get(node) or node for node in nodes}


def minutes(text: str) -> int:
    """A time limit as SLURM writes it (`90`, `1:30:00`, `2-00`, …) in minutes, rounded up. Raises `ValueError`."""
    days, dash, rest = text.strip().partition("-") if "-" in text else ("0", "", text.strip())
    parts = rest.split(":")
    if not days.isdigit() or not all(part.isdigit() for part in parts) or len(parts) > 3:
        raise ValueError("expected minutes, [hours:]minutes:seconds, or days-hours[:minutes[:seconds]]")
    numbers = [int(part) for part in parts]
    if dash:
        hours, mins, seconds = [*numbers, 0, 0][:3]
    else:
        hours, mins, seconds = {1: (0, *numbers, 0), 2: (0, *numbers), 3: tuple(numbers)}[len(numbers)]
    if not (total := ((int(days) * 24 + hours) * 60 + mins) * 60 + seconds):
        raise ValueError("expected a time above 0; leave it out for the partition's own limit")
    return -(-total // 60)


def megabytes(text: str) -> int:
    """A memory size as SLURM writes it (`800`, `64G`) in megabytes. Raises `ValueError`."""
    match = re.fullmatch(r"(\d+)\s*([KMGT]?)B?", text.strip().upper())
    if not match:
        raise ValueError("expected a size like 800M or 64G")
    scale = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}[match[2]]
    if not int(match[1]):
        raise ValueError("expected a size above 0; extra = ['--mem=0'] asks for all memory of each node")
    return max(1, int(int(match[1]) * scale))
