"""What SLURM says, read and put into words; its commands are little scripts here, the real ones are in tests/slurm."""

import os
import stat
import subprocess
from pathlib import Path

import pytest

from rlmake.build import resources, submission
from rlmake.config.shared import SlurmConfig
from rlmake.core import slurm
from rlmake.core.errors import ConfigError


@pytest.fixture
def say(tmp_path, monkeypatch):
    """`say("squeue", "text", code)`: from now on the command answers so. `calls()` are the calls."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    submission.partitions.cache_clear()

    def answer(command: str, out: str = "", code: int = 0, err: str = "") -> None:
        file = folder / command
        file.write_text(
            f"#!/bin/sh\necho \"$0 $*\" >> {tmp_path}/calls\ncat <<'END'\n{out}\nEND\necho '{err}' >&2\nexit {code}\n"
        )
        file.chmod(file.stat().st_mode | stat.S_IXUSR)

    answer.calls = lambda: (tmp_path / "calls").read_text().splitlines()
    yield answer
    submission.partitions.cache_clear()


def test_the_end_of_a_job_with_and_without_accounts(say):
    """The controller knows it for a while, then the accounts; where there are none nobody does."""
    say("scontrol", "JobId=7 JobName=x JobState=FAILED Reason=NonZeroExitCode ExitCode=76:0")
    assert slurm.ended("7") == slurm.End("FAILED", 76)
    say("scontrol", "", 1, "slurm_load_jobs error: Invalid job id specified")
    say("sacct", "CANCELLED by 0|0:15")
    assert slurm.ended("7") == slurm.End("CANCELLED", 143)
    say("sacct", "", 1, "Slurm accounting storage is disabled")
    assert slurm.ended("7") is None


def test_a_controller_that_does_not_answer_is_no_empty_queue(say):
    say("squeue", "", 1, "slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    assert slurm.queue() is None
    assert not slurm.left_queue("7")
    say("squeue", "", 1, "slurm_load_jobs error: Invalid job id specified")
    assert slurm.left_queue("7")


def test_a_host_from_which_nothing_can_be_submitted(say, monkeypatch):
    say("sbatch")
    say("squeue", "", 1, "squeue: fatal: Could not establish a configuration source")
    assert "know no cluster on this host" in (slurm.unusable() or "")
    say("squeue", "", 1, "slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    assert slurm.unusable() is None, "it may come back"
    monkeypatch.setenv("PATH", "/nowhere")
    assert "no sbatch" in (slurm.unusable() or "")


def test_a_job_is_found_by_comment_and_folder(say, tmp_path):
    here, other = tmp_path / "a b", tmp_path / "c"
    rows = [
        f"1|COMPLETED|None|N/A|n1|{here}|rule_train_wildcards_aa_4",
        f"2|RUNNING|None|N/A|n1|{other}|rule_train_wildcards_aa_4",
        f"3|PENDING|Priority|N/A||{here}|rule_train_wildcards_aa_4",
        f"9_2|RUNNING|None|N/A|n1|{here}|rule_evaluate_wildcards_aa+bb+cc",
    ]
    say("squeue", "\n".join(rows))
    jobs = slurm.queue()
    assert jobs is not None
    assert slurm.find(jobs, "rule_train_wildcards_aa_4", here).id == "3"
    assert slurm.find(jobs, "rule_evaluate_wildcards_bb", here).id == "9_2", (
        "the second task stands for the second name"
    )
    assert slurm.find(jobs, "rule_evaluate_wildcards_cc", here) is None
    assert slurm.find(jobs, "rule_train_wildcards_aa_5", here) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90", 90), ("1:30", 2), ("2:00:00", 120), ("1-", None), ("1-0", 1440), ("1-2:30", 1590), ("x", None)],
)
def test_time_limits(text, expected):
    if expected is None:
        with pytest.raises(ValueError):
            slurm.minutes(text)
    else:
        assert slurm.minutes(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("800", 800), ("64G", 65536), ("64gb", 65536), ("512K", 1), ("G", None)]
)
def test_memory(text, expected):
    if expected is None:
        with pytest.raises(ValueError):
            slurm.megabytes(text)
    else:
        assert slurm.megabytes(text) == expected


def test_what_sbatch_refuses_and_what_would_merely_wait(say):
    say("sinfo", "gpu\nhigh")
    say("sbatch", "", 1, "sbatch: error: invalid partition specified: gpuu")
    with pytest.raises(ConfigError) as error:
        submission.refuse_impossible(["sbatch -p gpuu --nodes=2", "sbatch -p gpuu --nodes=2"])
    assert str(error.value).startswith("SLURM would refuse a job with -p gpuu --nodes=2: there is no partition 'gpuu'")
    assert "did you mean 'gpu'" in str(error.value) and "\n" not in str(error.value)
    assert sum("--test-only" in call for call in say.calls()) == 1, "each kind of job is asked for once"
    for text in (
        "Required node not available (down, drained or reserved)",
        "Required partition not available (inactive or drain)",
    ):
        say("sbatch", "", 1, f"allocation failure: {text}")
        submission.refuse_impossible(["sbatch -p gpu"])


def test_the_partition_called_cluster_need_not_exist(say):
    say("sinfo", "gpu\nhigh")
    assert submission.partition("cluster") is None and submission.partition("high") == "high"
    submission.partitions.cache_clear()
    say("sinfo", "cluster")
    assert submission.partition("cluster") == "cluster"


def test_resources_of_a_run_over_nodes():
    place = {"type": "multi_node", "gpus_per_node": 8, "num_train_nodes": 2, "num_infer_nodes": None,
             "num_infer_replicas": 3, "num_train_ranks": 1, "cpu_threads": 2}  # fmt: skip
    table = SlurmConfig(
        partition="p", time="1:00:00", memory="2G", constraint="h100", exclude="n9", extra=["--nice"],
        save_before_end=60,
    ).model_dump()  # fmt: skip
    found = resources.of("rl", {"deployment": place, "inference": {}, "slurm": table})
    assert (found["nodes"], found["gpus"], found["gpus_per_node"]) == (2, 16, 8), "no engine: the trainer's nodes alone"
    found = resources.of("rl", {"deployment": place, "inference": {"x": 1}, "slurm": table})
    assert (found["nodes"], found["gpus"]) == (5, 40)
    assert found["slurm"]["time"] == 60 and found["slurm"]["memory"] == 2048
    assert found["slurm"]["extra"] == ["--exclusive", "--constraint=h100", "--exclude=n9", "--nice"]
    words = submission.options(found, training=True)
    assert {"--nodes=5", "--gres=gpu:8", "--time=60", "--mem=2048M", "--signal=B:USR1@60"} <= set(words)


def test_what_a_failed_job_said(tmp_path: Path):
    log = tmp_path / "7.log"
    log.write_text("step 1\n\nerror: trainer 1 (node2) was killed by SIGKILL; last lines of x.log:\nerror:     boom\n")
    assert submission.errors_in(log) == ["trainer 1 (node2) was killed by SIGKILL; last lines of x.log:", "    boom"]
    log.write_text("only this\n")
    assert submission.errors_in(log) == ["only this"]
    assert submission.errors_in(tmp_path / "none.log") == []


def test_a_pre_run_command_that_fails_ends_the_job():
    """With the exit code of a mistake, which is not tried again."""
    script = f"{submission.checked('false # it' + chr(39) + 's')}\necho went on"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: slurm.pre_run_command (false # it's) ended with code 1 on ")
    assert submission.checked("  ") is None and submission.checked(None) is None
    done = subprocess.run(["bash", "-c", f"{submission.checked('A=1')}\necho $A"], capture_output=True, check=True)
    assert done.stdout == b"1\n"
