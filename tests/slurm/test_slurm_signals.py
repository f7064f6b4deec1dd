"""What SLURM's own signals do to a launcher and what is below it, with stubs in the place of trainer and server."""

import sys
from pathlib import Path

import pytest
from slurm_tools import ROOT, live, slurm, until

STUB = Path(__file__).with_name("slurm_stub.py")


@pytest.fixture
def job(tmp_path):
    """A running launcher as a job: its number."""
    command = f"PYTHONPATH={ROOT / 'src'} exec {sys.executable} {STUB} launcher {tmp_path}"
    options = ["--parsable", "--mem=100", "--requeue", "-D", str(tmp_path), "-o", str(tmp_path / "job.log")]
    number = slurm("sbatch", *options, "--wrap", command).strip()
    said = tmp_path / "said"
    until(lambda: said.is_file() and "rank up" in said.read_text(), "the rank is up", 120)
    yield number
    if live(tmp_path):
        slurm("scancel", number)


def said(folder: Path) -> list[str]:
    return (folder / "said").read_text().splitlines()


def test_scancel_saves_within_kill_wait(job, tmp_path):
    """SIGTERM goes to every process of the job: only the launcher heeds it, the rank saves, then the server ends."""
    slurm("scancel", job)
    until(lambda: not live(tmp_path), "the job is gone", 60)
    assert said(tmp_path) == ["rank up", "saved", "server told to stop", "stopped 75 early=False"]


def test_the_early_signal_is_told_from_a_kill(job, tmp_path):
    """`--signal=B:USR1@…` as SLURM delivers it: to the launcher alone."""
    slurm("scancel", "--signal=USR1", "--batch", job)
    until(lambda: not live(tmp_path), "the job is gone", 60)
    assert said(tmp_path) == ["rank up", "saved", "server told to stop", "stopped 75 early=True"]
