"""The executor's view of jobs that are not live any more; the rest needs a cluster (tests/slurm)."""

import logging
from types import SimpleNamespace

import pytest
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo

from rlmake.build import submission
from rlmake.build.executor import MISSES, Executor
from rlmake.core import slurm


@pytest.fixture
def follow(monkeypatch, tmp_path):
    """`(executor, a followed job, what it reported)`; `slurm.ended` and the store answer as `state` says."""
    state = {"end": None, "finished": False}
    monkeypatch.setattr(slurm, "ended", lambda number: state["end"])
    monkeypatch.setattr(submission, "finished", lambda artefact: state["finished"])
    executor = Executor.__new__(Executor)
    executor._misses, executor.logger = {}, logging.getLogger("test")
    said = []
    executor.report_job_success = lambda info: said.append("success")
    executor.report_job_error = lambda info, msg: said.append(msg)
    wildcards = SimpleNamespace(fp="ab", n="4")
    job = SimpleNamespace(jobid=1, name="train", wildcards=wildcards, attempt=1, restart_times=3)
    log = tmp_path / "7.log"
    log.write_text("error: boom\n")
    return executor, SubmittedJobInfo(job, external_jobid="7", aux={"slurm_logfile": log}), said, state


async def test_a_job_that_vanished_is_an_error_only_after_some_looks(follow):
    executor, info, said, _ = follow
    assert [await executor._over(info, None) for _ in range(MISSES)] == [False] * (MISSES - 1) + [True]
    assert len(said) == 1 and "has vanished" in said[0]
    assert info.job.attempt == 1, "it is submitted again"


async def test_a_job_that_vanished_after_its_work_was_done_is_a_success(follow):
    executor, info, said, state = follow
    state["finished"] = True
    assert [await executor._over(info, None) for _ in range(MISSES)][-1] and said == ["success"]


@pytest.mark.parametrize(
    ("end", "words", "again"),
    [
        (slurm.End("TIMEOUT", 0), "ended as TIMEOUT", True),
        (slurm.End("NODE_FAIL", 0), "ended as NODE_FAIL", True),
        (slurm.End("PREEMPTED", 0), "ended as PREEMPTED", True),
        (slurm.End("FAILED", 1), "exit code 1", True),
        (slurm.End("FAILED", 76), "the training diverged", False),
        (slurm.End("FAILED", 2), "a mistake that another try would repeat", False),
        (slurm.End("OUT_OF_MEMORY", 0), "raise slurm.memory", False),
    ],
)
async def test_ends(follow, end, words, again):
    """Each end is said; what another try would only repeat is not tried again."""
    executor, info, said, state = follow
    state["end"] = end
    assert await executor._over(info, None)
    assert len(said) == 1 and words in said[0]
    assert (info.job.attempt <= info.job.restart_times) == again


async def test_a_requeued_job_goes_on(follow):
    executor, info, said, state = follow
    state["end"] = slurm.End("PENDING", 0)
    queued = slurm.Job("7", "COMPLETED", "", "", "", "", "")  # as the queue showed it a moment ago
    assert [await executor._over(info, queued) for _ in range(MISSES)] == [False] * MISSES and said == []


async def test_a_job_that_only_the_accounts_believe_alive_has_vanished(follow):
    """A controller that lost its jobs leaves them running in the accounts for ever."""
    executor, info, said, state = follow
    state["end"] = slurm.End("RUNNING", 0)
    assert [await executor._over(info, None) for _ in range(MISSES)] == [False] * (MISSES - 1) + [True]
    assert "has vanished" in said[0]
