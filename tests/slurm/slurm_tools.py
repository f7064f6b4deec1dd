"""SLURM as the tests see it: its commands, this project's jobs, waiting, cleaning up."""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOON = ("--rlmake-init-seconds-before-status-checks", "1", "--latency-wait", "5")
PROFILE = ("--profile", "profiles/slurm", *SOON)


def slurm(*command: str) -> str:
    """Output of one of SLURM's commands."""
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def until(ready: Callable[[], object], what: str, seconds: float = 240.0) -> object:
    """The first true answer of `ready`."""
    deadline = time.monotonic() + seconds
    while not (found := ready()):
        assert time.monotonic() < deadline, f"{what}: not after {seconds:g} s"
        time.sleep(0.25)
    return found


def jobs(folder: Path) -> list[dict[str, str]]:
    """This project's jobs, the ended ones too, oldest first: id, state, name, comment, restarts."""
    rows = slurm("squeue", "-h", "-r", "--me", "-t", "all", "-S", "i", "-o", "%i|%T|%j|%k|%Z|%r").splitlines()
    found = []
    for row in rows:
        identity, state, name, comment, workdir, reason = row.split("|")
        if os.path.realpath(workdir) == os.path.realpath(folder):
            found.append({"id": identity, "state": state, "name": name, "comment": comment, "reason": reason})
    return found


def live(folder: Path) -> list[dict[str, str]]:
    return [
        job for job in jobs(folder) if job["state"] in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED")
    ]


def trainings(project) -> list[dict[str, str]]:
    """The trainings among a toy project's jobs."""
    return [job for job in jobs(project.root) if job["comment"].startswith("rule_train_")]


def read_until(driver: subprocess.Popen, words: str) -> str:
    """The driver's output up to the line with the words."""
    seen = []
    for line in driver.stdout:
        seen.append(line)
        if words in line:
            return "".join(seen)
    raise AssertionError(f"the driver ended without saying {words!r}: {''.join(seen)[-4000:]}")


def wait_for_step(project, step: int) -> None:
    """Wait until a toy's training has begun a step."""
    until(lambda: f"step t/sft {step}" in project.log(), f"step {step}")


def pids(folder: Path, word: str) -> list[int]:
    """The project's processes whose command line has the word."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            ours = entry.name.isdigit() and os.readlink(entry / "cwd") == str(folder.resolve())
            if ours and word.encode() in (entry / "cmdline").read_bytes().replace(b"\0", b" "):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def hurry(job: str) -> None:
    """A requeued job is held for two minutes: let it start now. Too soon and its credential is still revoked."""
    time.sleep(5)
    subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], capture_output=True, check=False)


def runs_again(job: str, seconds: float = 240) -> None:
    """Wait until a requeued job runs, hurrying it on; one that a node could not start is the executor's to release."""

    def running() -> bool:
        state, reason = slurm("squeue", "-h", "-j", job, "-o", "%T|%r").strip().split("|")
        if state == "PENDING" and "held" not in reason.lower():
            hurry(job)
        return state == "RUNNING"

    until(running, f"job {job} runs again", seconds)


def cut(job: str) -> None:
    """Let the job's time limit come soon: it is lowered to one or two minutes from now, SLURM does the rest."""
    used = slurm("squeue", "-h", "-j", job, "-o", "%M").strip().split(":")
    slurm("scontrol", "update", f"JobId={job}", f"TimeLimit={int(used[-2]) + 2}")


def resume(node: str) -> None:
    """Let a node take jobs again; refused where it does already."""
    subprocess.run(["scontrol", "update", f"NodeName={node}", "State=RESUME"], capture_output=True, check=False)


def clean_up(folder: Path) -> None:
    """Leave neither jobs nor drivers behind."""
    if left := [job["id"] for job in live(folder)]:
        subprocess.run(["scancel", *left], check=False)
    for entry in Path("/proc").iterdir():
        try:
            own = entry.name == str(os.getpid())
            if entry.name.isdigit() and not own and Path(os.readlink(entry / "cwd")) == folder.resolve():
                os.kill(int(entry.name), 9)
        except OSError:
            continue
    until(lambda: not live(folder), "jobs gone", 60)
