"""Whole runs over several nodes of a real SLURM: who is where, loss of processes, evaluations, submission directly."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys

import cluster
import pytest
from slurm_project import EVAL, FAST, NODES, RL, environment
from slurm_tools import cut, jobs, live, resume, runs_again, slurm, until

pytestmark = pytest.mark.timeout(900)


def test_rl_over_three_nodes_loses_a_rank(project):
    """One engine, and the orchestrator beside it; a trainer that is replicated over two nodes. A rank on the second of
    them dies: named with node and rank, the allocation free at once, submitted again, finished."""
    place = NODES + "num_train_nodes = 2\nnum_infer_nodes = 1\nnodes_per_fsdp_group = 1\n"
    place += "orchestrator_on_inference = true"
    project.write("experiments/rl.toml", RL.format(steps=3, place=place))
    driver = project.start("outputs/rl/checkpoints/step_3")
    project.wait_for_step("rl", 1)
    first, *others = slurm("scontrol", "show", "hostnames", slurm(
        "squeue", "-h", "-j", project.training()["id"], "-o", "%N").strip()).split()  # fmt: skip
    assert project.nodes_of("PRL::Orchestrator") == project.nodes_of("rlmake.inference.server") == [first]
    assert project.nodes_of("rlmake.trainer.rl @") == others and len(others) == 2
    ranks = {environment(pid).get("RANK"): pid for pid in project.processes("rlmake.trainer.rl @")}
    kill_and_wait_until_free(project, ranks["1"])
    output = project.finish(driver)
    assert f"trainer 1 ({others[1]})" in output and "killed by SIGKILL" in output and "rank 1" in output, output[-5000:]
    assert sorted(set(project.steps("rl"))) == [1, 2, 3] and project.submissions() == 2
    logs = project.logs("rl") / "latest"
    assert os.readlink(logs / "trainer.log") == "trainer/node_0.log" and (logs / "trainer" / "node_1.log").is_file()
    ranks = list(logs.glob("trainer/torchrun/job_*/attempt_0/0/stderr.log"))
    assert len(ranks) == 2, "one log for each rank of each node"


def kill_and_wait_until_free(project, victim: int) -> None:
    """SIGKILL a process of the training's job; within a minute the job has left its nodes."""
    job = project.training()["id"]
    os.kill(victim, signal.SIGKILL)
    until(lambda: not any(one["id"] == job for one in live(project.folder)), "the allocation is free", 60)


def test_rl_over_three_nodes_loses_orchestrator_and_engine(project):
    """Two engines behind the router, one trainer node; each process's death: one message, free at once, finished."""
    project.write("experiments/rl.toml", RL.format(steps=3, place=NODES + "num_train_nodes = 1\nnum_infer_nodes = 2"))
    driver = project.start("outputs/rl/checkpoints/step_3")
    for step, victim in ((1, "PRL::Orchestrator"), (2, "rlmake.inference.server")):
        project.wait_for_step("rl", step)
        kill_and_wait_until_free(project, project.processes(victim)[0])
    output = project.finish(driver)
    assert "orchestrator (node" in output and re.search(r"inference [01] \(node", output), output[-5000:]
    assert output.count("was killed by SIGKILL") == 2
    assert sorted(set(project.steps("rl"))) == [1, 2, 3] and project.submissions() == 3
    logs = project.logs("rl") / "latest"
    for name in ("inference/node_0.log", "inference/node_1.log", "inference/router.log", "orchestrator.log"):
        assert (logs / name).is_file(), name
    assert os.readlink(logs / "inference.log") == "inference/node_0.log"
    assert (logs / "inference" / "router.log").read_text().count("http://") >= 3


def test_sft_with_evaluations_over_three_nodes(project):
    """One allocation: two nodes with an engine each, on the first the router, env server and evaluations; the trainer's
    node. Every version that is due is measured on both engines, and the job ends by itself."""
    project.sft(4, place=NODES + "num_train_nodes = 1\nnum_infer_nodes = 2", renderer=FAST, table=EVAL)
    project.finish(project.start("outputs/sft/checkpoints/step_4"))
    assert project.steps("sft") == [1, 2, 3, 4] and project.submissions() == 1
    logs = project.logs("sft") / "latest"
    said = (logs / "eval.log").read_text()
    assert [f"Evaluated held (Step {step})" in said for step in (0, 2, 4)] == [True] * 3, said
    for name in ("inference/node_0.log", "inference/node_1.log", "inference/router.log", "envs/eval/held.log"):
        assert (logs / name).is_file(), name


def test_submission_by_the_entry_point(project):
    """Over two nodes: dry run, submission, a node that cannot start it, tail while held, queued and running, the guard;
    the time limit cuts it, the requeued life goes on by itself and trains nothing twice."""
    project.sft(60, place=NODES + "num_train_nodes = 2", renderer="slow.py:Slower")
    text = (project.folder / "experiments/sft.toml").read_text().partition("[experiment]")[0]
    project.write("run.toml", text)
    dry = project.entry("sft", "@", "run.toml", "--run.name", "d", "--dry-run")
    assert dry.returncode == 0 and "submit it by hand with: sbatch " in dry.stdout, dry.stderr
    script = (project.folder / "outputs/d/launcher/sft.sbatch").read_text()
    assert "#SBATCH --signal=B:USR1@118" in script and "#SBATCH --mem=600M" in script and not jobs_of(project)
    with no_node_starts_jobs():
        done = project.entry("sft", "@", "run.toml", "--run.name", "d")
        assert done.returncode == 0 and "submitted as SLURM job" in done.stdout, done.stderr
        until(lambda: "held" in jobs_of(project)[-1]["reason"], "held because it could not be started", 60)
    job = jobs_of(project)[-1]["id"]
    shown = project.folder / "shown"
    with open(shown, "w") as stream:
        command = [sys.executable, "-m", "rlmake.cli.main", "tail", "d"]
        tail = subprocess.Popen(command, cwd=project.folder, env=project.env, stdout=stream, stderr=stream)
    until(lambda: "a node could not start it" in shown.read_text(), "tail lets it go", 60)
    runs_again(job)
    refused = project.entry("sft", "@", "run.toml", "--run.name", "d")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and "wait for it" in refused.stderr
    metrics = project.folder / "outputs/d/monitors/file/metrics.jsonl"
    until(lambda: metrics.is_file() and metrics.read_text().count("loss/mean") >= 3, "three steps", 300)
    cut(job)
    until(lambda: jobs_of(project)[-1]["state"] == "PENDING", "requeued", 120)
    project.fast()
    slurm("scontrol", "update", f"JobId={job}", "TimeLimit=20")
    until(lambda: "is pending" in shown.read_text(), "tail says so", 60)
    runs_again(job)
    assert tail.wait(200) == 0, shown.read_text()
    for words in ("released (1 of 3 times)", f"SLURM job {job} is running", "attempt 4 begins", "COMPLETED"):
        assert words in shown.read_text(), f"{words}: {shown.read_text()}"
    rows = [json.loads(line) for line in metrics.read_text().splitlines() if "loss/mean" in line]
    assert [row["step"] for row in rows] == list(range(1, 61))
    assert len(list((project.folder / "outputs/d/logs/latest/trainer").glob("node_?.log"))) == 2


@contextlib.contextmanager
def no_node_starts_jobs():
    """The prolog of jobs fails on the nodes of `wide`: SLURM drains a node where it did, and holds the job."""
    nodes = [f"node{i}" for i in cluster.WIDE]
    cluster.PROLOG.write_text("\n".join(nodes) + "\n")
    try:
        yield
    finally:
        cluster.PROLOG.unlink()
        for node in nodes:
            resume(node)


def jobs_of(project) -> list[dict[str, str]]:
    """Jobs that were submitted directly."""
    return [job for job in jobs(project.folder) if not job["comment"].startswith("rule_")]
