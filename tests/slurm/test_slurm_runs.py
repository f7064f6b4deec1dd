"""Whole runs on one node of a real SLURM: time limit, preemption, loss of the node."""

from collections import Counter

import pytest
from slurm_tools import cut, resume, runs_again, slurm, until

pytestmark = pytest.mark.timeout(900)


def test_a_time_limit_that_cuts_twice(project):
    """USR1, checkpoint, requeue from inside, twice: one submission, every step once and in order, no retry used."""
    project.sft(400)
    driver = project.start("outputs/sft/checkpoints/step_100")
    for life in (1, 2):
        before = max(project.steps("sft"), default=0)
        project.wait_for_step("sft", before + 3)
        job = project.training()["id"]
        cut(job)
        until(lambda: project.training()["state"] == "PENDING", f"requeued after life {life}", 120)
        slurm("scontrol", "update", f"JobId={job}", "TimeLimit=20")
        runs_again(job)
    project.fast()
    output = project.finish(driver)
    assert project.steps("sft") == list(range(1, 101)), "nothing twice, nothing left out"
    assert project.submissions() == 1, output
    assert len(list(project.logs("sft").glob("attempt_*"))) == 3


def test_preemption(project):
    """A job of a higher partition takes the node: SIGTERM, checkpoint within KillWait, requeued by SLURM, finished."""
    project.sft(30, table='nodelist = "node5"\nexclusive = true')
    driver = project.start("outputs/sft/checkpoints/step_30")
    project.wait_for_step("sft", 3)
    high = slurm("sbatch", "--parsable", "-p", "high", "-w", "node5", "--exclusive", "-o", "/dev/null",
                 "--wrap", "sleep 5").strip()  # fmt: skip
    until(lambda: project.training()["state"] == "PENDING", "preempted", 60)
    project.fast()
    until(lambda: high not in slurm("squeue", "-h", "-o", "%i").split(), "the other job is over", 60)
    runs_again(project.training()["id"])
    project.finish(driver)
    assert project.steps("sft") == list(range(1, 31)), "the checkpoint was saved at SIGTERM: nothing is trained twice"
    assert project.submissions() == 1


def test_a_node_goes_down(project):
    """The job of a lost node is requeued by SLURM and goes on elsewhere from its last checkpoint."""
    project.sft(24)
    text = (project.folder / "experiments/sft.toml").read_text().replace("interval = 1000", "interval = 4")
    project.write("experiments/sft.toml", text)
    driver = project.start("outputs/sft/checkpoints/step_24")
    project.wait_for_step("sft", 6)
    node = slurm("squeue", "-h", "-j", project.training()["id"], "-o", "%N").strip()
    try:
        slurm("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
        until(lambda: project.training()["state"] == "PENDING", "requeued", 60)
        project.fast()
        runs_again(project.training()["id"])
        project.finish(driver)
    finally:
        resume(node)
    twice = [step for step, count in Counter(project.steps("sft")).items() if count > 1]
    assert sorted(set(project.steps("sft"))) == list(range(1, 25)) and len(twice) <= 4
    assert project.submissions() == 1
