"""A SLURM with accounting whose controller forgets ended jobs after seconds; one that goes away; one that lost all."""

import os
import signal

import cluster
import pytest
from slurm_tools import PROFILE, jobs, pids, read_until, slurm, trainings, until, wait_for_step

pytestmark = pytest.mark.timeout(600)
TARGET = "outputs/t/sft/weights"
JOB = "rlmake.cli.job train"


def table(toys, account: str) -> None:
    toys.edit("t/sft.toml", "[experiment]", f'[slurm]\naccount = "{account}"\n[experiment]')


def forgotten(job: str) -> bool:
    """Whether the controller does not know a job any more."""
    return cluster.run("scontrol", "show", "job", job, check=False).returncode != 0


def test_an_account_that_is_not_there(toys):
    table(toys, "nobody")
    code, output = toys.snakemake(*PROFILE, TARGET)
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert code == 2 and len(errors) == 1 and "there is no account 'nobody'" in errors[0], output
    assert not jobs(toys.root)


def test_the_accounts_say_how_a_forgotten_job_ended(toys):
    """The driver looks away while the job fails and is forgotten: end, exit code and reason are known all the same.
    Where the driver has died, the next one takes what was finished."""
    table(toys, "lab")
    driver = toys.start(*PROFILE, "--retries", "0", TARGET, TOY_FAIL="t/sft 3", TOY_GATE="t/sft 1")
    wait_for_step(toys, 1)
    job = trainings(toys)[0]["id"]
    driver.send_signal(signal.SIGSTOP)
    toys.go()
    until(lambda: forgotten(job), "the controller forgets the job", 120)
    driver.send_signal(signal.SIGCONT)
    output, _ = driver.communicate(timeout=120)
    assert driver.returncode == 1 and f"SLURM job {job} ended as FAILED (exit code 1)" in output, output[-3000:]
    assert "the toy failed" in output
    assert slurm("sacct", "-n", "-X", "-P", "-j", job, "-o", "Account,State").strip() == "lab|FAILED"
    (toys.root / "go").unlink()
    driver = toys.start(*PROFILE, TARGET, TOY_GATE="t/sft 4")
    wait_for_step(toys, 4)
    job = trainings(toys)[0]["id"]
    driver.kill()
    driver.communicate()
    toys.go()
    until(lambda: forgotten(job), "the controller forgets the job", 120)
    code, output = toys.snakemake(*PROFILE, TARGET)
    assert code == 0 and not trainings(toys), output[-3000:]
    assert toys.log().count("step t/sft 4") == 1 and "train t/sft from 2 to 4 " in toys.log()


def test_a_controller_that_goes_away_and_one_that_lost_all_jobs(toys):
    """Waited for, said once. The job, which is alive but unknown to a controller without accounts, has vanished: it is
    ended by its node, submitted again and goes on from its checkpoint."""
    driver = toys.start(*PROFILE, TARGET, TOY_GATE="t/sft 3")
    wait_for_step(toys, 3)
    job = trainings(toys)[0]["id"]
    alive = pids(toys.root, JOB)
    assert alive
    cluster.end("slurmctld")
    seen = read_until(driver, "SLURM does not answer")
    cluster.controller()
    seen += read_until(driver, "SLURM answers again")
    cluster.end("slurmctld")
    cluster.CONF.write_text(cluster.CONF.read_text().replace("accounting_storage/slurmdbd", "accounting_storage/none"))
    cluster.controller("-c")
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in alive), "its node ends the job", 60)
    toys.go()
    output = seen + driver.communicate(timeout=240)[0]
    assert driver.returncode == 0, output[-4000:]
    assert f"SLURM job {job} has vanished" in output, output[-4000:]
    assert "train t/sft from 2 to 4 " in toys.log() and toys.log().count("step t/sft 4") == 1
