"""Jobs and drivers on a real SLURM, with toy workers: what is submitted, what is attached to, what is never lost."""

import os
import shutil
import signal
import subprocess

import pytest
from slurm_tools import PROFILE, jobs, live, read_until, slurm, trainings, until, wait_for_step

pytestmark = pytest.mark.timeout(900)
DIRECT = """
[run]
name = "d"
[deployment]
num_train_gpus = 0
num_infer_gpus = 0
[slurm]
"""


def build(project, *targets: str, **env: str) -> str:
    code, output = project.snakemake(*PROFILE, *targets, **env)
    assert code == 0, output[-6000:]
    return output


def kill(driver: subprocess.Popen) -> None:
    driver.kill()
    driver.communicate()


@pytest.fixture
def held():
    """The default partition takes jobs and starts none, until `release` is called."""
    slurm("scontrol", "update", "PartitionName=gpu", "State=DOWN")
    yield lambda: slurm("scontrol", "update", "PartitionName=gpu", "State=UP")
    slurm("scontrol", "update", "PartitionName=gpu", "State=UP")


def test_the_whole_graph_then_nothing(bare):
    """One job a training, small things local, names of the user nowhere in SLURM; a second build submits nothing."""
    bare.edit("t/sft.toml", "[experiment]", '[slurm]\ntime = "10"\nmemory = "300M"\nextra = ["--nice=7"]\n[experiment]')
    output = build(bare, "all")
    rules = sorted(job["comment"].split("_wildcards_")[0] for job in jobs(bare.root))
    assert rules == [
        "rule_evaluate", "rule_evaluate", "rule_export", "rule_export", "rule_model", "rule_train", "rule_train",
    ]  # fmt: skip
    assert (bare.root / "outputs/t/rl/weights").is_symlink() and "100%" in output
    shown = slurm("scontrol", "show", "job", trainings(bare)[0]["id"])
    assert "TimeLimit=00:10:00" in shown and "Nice=7" in shown and "Requeue=1" in shown
    assert "MinMemoryNode=300M" in shown
    before = len(jobs(bare.root))
    assert "Nothing to be done" in build(bare, "all")
    assert len(jobs(bare.root)) == before


@pytest.mark.parametrize("moment", ["running", "pending"])
def test_a_killed_driver_is_followed_by_one_that_attaches(toys, held, moment):
    """SIGKILL the driver while the job runs, or waits, twice; start again: one submission, its result is taken."""
    target = "outputs/t/sft/weights"
    toys.env["TOY_GATE"] = "t/sft 1"
    if moment == "running":
        held()
    driver = toys.start(*PROFILE, target)
    until(lambda: trainings(toys), "a training is submitted")
    if moment == "running":
        wait_for_step(toys, 1)
    kill(driver)
    driver = toys.start(*PROFILE, target)
    read_until(driver, "attached to it, nothing submitted: SLURM job ")
    kill(driver)
    drivers = [toys.start(*PROFILE, target) for _ in range(2)]
    for driver in drivers:
        read_until(driver, "attached to it, nothing submitted: SLURM job ")
    held()
    toys.go()
    outputs = [driver.communicate(timeout=200)[0] for driver in drivers]
    assert [driver.returncode for driver in drivers] == [0, 0], outputs
    assert len(trainings(toys)) == 1
    assert [line for line in toys.log() if line.startswith("step ")] == [f"step t/sft {n}" for n in (1, 2, 3, 4)]


def test_a_job_that_finished_without_a_driver_costs_nothing(toys):
    toys.env["TOY_GATE"] = "t/sft 1"
    driver = toys.start(*PROFILE, "outputs/t/sft/weights")
    wait_for_step(toys, 1)
    kill(driver)
    toys.go()
    until(lambda: not live(toys.root), "the job ends by itself")
    build(toys, "outputs/t/sft/weights")
    assert len(trainings(toys)) == 1
    assert toys.log().count("step t/sft 4") == 1


def test_ctrl_c_cancels_what_was_submitted_and_keeps_checkpoints(toys):
    """An attached driver leaves the job of a living one alone; the submitter's Ctrl-C cancels it; it resumes later."""
    toys.env["TOY_GATE"] = "t/sft 3"
    first = toys.start(*PROFILE, "outputs/t/sft/weights")
    wait_for_step(toys, 3)
    job = trainings(toys)[0]["id"]
    second = toys.start(*PROFILE, "outputs/t/sft/weights")
    read_until(second, "attached to it, nothing submitted")
    second.send_signal(signal.SIGINT)
    output, _ = second.communicate(timeout=100)
    assert "left alone, another living driver submitted them" in output
    assert trainings(toys)[0]["state"] == "RUNNING"
    first.send_signal(signal.SIGINT)
    output, _ = first.communicate(timeout=100)
    assert f"cancelled: {job}; checkpoints are kept" in output
    until(lambda: not live(toys.root), "the job is gone", 60)
    toys.go()
    build(toys, "outputs/t/sft/weights")
    assert "train t/sft from 2 to 4 " in toys.log()


def test_a_job_cancelled_by_an_administrator_is_submitted_again_and_goes_on(toys):
    toys.env["TOY_GATE"] = "t/sft 3"
    driver = toys.start(*PROFILE, "outputs/t/sft/weights")
    wait_for_step(toys, 3)
    job = trainings(toys)[0]["id"]
    subprocess.run(["scancel", job], check=True)
    until(lambda: job not in [one["id"] for one in live(toys.root)], "it is gone", 60)
    toys.go()
    output, _ = driver.communicate(timeout=200)
    assert driver.returncode == 0, output[-4000:]
    assert "ended as CANCELLED" in output
    assert len(trainings(toys)) == 2
    assert "train t/sft from 2 to 4 " in toys.log()


def test_a_failure_is_in_the_drivers_output_and_a_mistake_is_not_tried_again(toys):
    """The reason, not only the number of a job; exit code 1 is tried again as often as the profile says."""
    code, output = toys.snakemake(*PROFILE, "--retries", "1", "outputs/t/sft/weights", TOY_FAIL="t/sft 3")
    assert code == 1
    assert "the toy failed" in output and ".log" in output
    assert len(trainings(toys)) == 2
    code, output = toys.snakemake(*PROFILE, "outputs/t/sft/weights", TOY_DIVERGE="t/sft 3")
    assert code == 1 and "the training diverged" in output
    assert len(trainings(toys)) == 3, "a diverged run is not tried again"


def test_a_queued_job_trains_what_was_planned(toys, held):
    driver = toys.start(*PROFILE, "outputs/t/sft/weights")
    until(lambda: trainings(toys), "a training is submitted")
    toys.edit("t/sft.toml", "lr = 1e-3", "lr = 1e-1")
    toys.write("t/broken.toml", "this is = = no TOML")
    held()
    output, _ = driver.communicate(timeout=120)
    assert driver.returncode == 0, output[-4000:]
    assert toys.log().count("step t/sft 4") == 1 and len(trainings(toys)) == 1


def test_evaluations_of_a_grid_are_one_array(toys):
    """Three cells, three evaluations that are ready together: one sbatch. Killed and started again: attached to."""
    grid = toys.root / "experiments" / "t" / "sft.toml"
    grid.write_text(grid.read_text() + "[experiment.grid]\nseed = [0, 1, 2]\n")
    os.remove(toys.root / "experiments" / "t" / "rl.toml")
    cells = [f"outputs/t/sft/seed={seed}" for seed in (0, 1, 2)]
    build(toys, *(f"{cell}/weights" for cell in cells))
    output = build(toys, *(f"{cell}/evals/held" for cell in cells))
    tasks = [job["id"] for job in jobs(toys.root) if job["comment"].startswith("rule_evaluate")]
    assert sorted(task.partition("_")[2] for task in tasks) == ["1", "2", "3"], output
    assert len({task.partition("_")[0] for task in tasks}) == 1
    assert all((toys.root / cell / "evals" / "held").is_symlink() for cell in cells)


def test_what_slurm_would_refuse_is_said_before_anything_is_submitted(toys):
    """All faults of a build at once, a line each; by the plan and by the entry points as well."""
    tables = {
        'partition = "gpux"': "there is no partition 'gpux'; did you mean 'gpu'?",
        'memory = "900G"': "no partition has such nodes",
        'constraint = "h300"': "Invalid feature",
        'nodelist = "node99"': "Invalid node name",
        "[deployment]\ngpus_per_node = 8\nnum_train_gpus = 8": "no partition has such nodes",
    }
    plain = (toys.root / "experiments" / "t" / "sft.toml").read_text()
    for number, table in enumerate(tables):
        text = plain.replace("[experiment]", f"[slurm]\n{table}\n[experiment]").replace("1e-3", f"1e-{number + 4}")
        toys.write(f"t/bad{number}.toml", text)
    code, output = toys.snakemake(*PROFILE, *(f"outputs/t/bad{number}/weights" for number in range(len(tables))))
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert code == 2 and len(errors) == len(set(tables.values())), output
    assert all(any(words in error for error in errors) for words in tables.values()), output
    assert "Traceback" not in output
    toys.edit("t/bad0.toml", '"gpux"', '"far"')
    (toys.root / ".env").mkdir()
    for command, words in (
        (["plan", "--slurm", "outputs/t/bad0/weights"], ".env: every job reads it first, and it cannot be read"),
        (["plan", "--slurm", "outputs/t/bad0/weights"], "is on this host alone"),
        (["plan", "--slurm", "outputs/t/bad1/weights"], "no partition has such nodes"),
        (["sft", "@", "direct.toml", "--slurm.partition", "gpux"], "there is no partition 'gpux'"),
        (["sft", "@", "direct.toml", "--slurm.partition", "far"], "is on this host alone"),
        (["sft", "@", "direct.toml", "--slurm.template-path", "no.j2"], "slurm.template_path: no.j2: No such file"),
    ):
        (toys.root / "direct.toml").write_text(plain.partition("[experiment]")[0] + DIRECT)
        said = toys.rlmake(*command)
        assert said.returncode == 2 and words in said.stderr, said
        assert said.stderr.count("\n") == 1 and "Traceback" not in said.stderr, said.stderr
        shutil.rmtree(toys.root / ".env", ignore_errors=True)
    assert not jobs(toys.root) and not (toys.root / "outputs" / "d").exists()
