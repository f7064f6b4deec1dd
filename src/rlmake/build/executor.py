"""The SLURM executor: the plugin's, with what a build needs that is killed and started again at any time.

- SLURM is the record of what was submitted: a job is known by its comment and work directory. Look-up and sbatch are
  one step under a file lock, so of several drivers one submits and the others attach.
- A job runs its rule's command itself, not a Snakemake below a Snakemake: nothing of the project is read again hours
  later, and the early signal of a time limit reaches the launcher.
- Work that was finished meanwhile is taken over; a job that vanished from SLURM is submitted again.
"""

import asyncio
import contextlib
import shlex
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import snakemake_executor_plugin_slurm as plugin
from snakemake_executor_plugin_slurm.submit_string import get_submit_command
from snakemake_executor_plugin_slurm.utils import get_job_wildcards, set_gres_string
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo

from rlmake.build import store, submission
from rlmake.build.workflow import or_leave
from rlmake.core import slurm
from rlmake.core.errors import RunFailed, UserError

common_settings = plugin.common_settings
DONE = "done"  # in the place of a job's id: the work was there when it was to be submitted
SLOWER = 6  # as many times the first pause between two looks at the queue grows
MISSES = 3  # looks at the queue that do not show a job before it counts as vanished
RETRY_SECONDS = (2, 5, 15, 30, 60, 60)  # for a controller that is busy or away
ARRAY = 50  # tasks of one array: their names stand in its comment
FINAL = {
    2: "a mistake that another try would repeat",
    76: "the training diverged",
}


@dataclass
class ExecutorSettings(plugin.ExecutorSettings):
    """The plugin's settings; the first look at the queue comes sooner."""

    init_seconds_before_status_checks: int | None = field(
        default=10, metadata={"help": "Seconds between looks at the queue at first; they grow sixfold.", "type": int}
    )


class Executor(plugin.Executor):
    """Submits, attaches, follows, cancels."""

    def __init__(self, workflow: Any, logger: Any) -> None:
        self._misses: dict[str, int] = {}
        self._told: dict[str, str] = {}  # job → its state as it was last seen
        self._releaser = slurm.Releaser()
        self._down_since: float | None = None
        self._cancelled = False
        self._followed: dict[str, None] = {}  # jobs not known to have ended; Snakemake's list is empty during a look
        super().__init__(workflow, logger)  # starts the thread that looks at the queue

    def __post_init__(self, test_mode: bool = False) -> None:
        super().__post_init__(test_mode)
        self._driver = submission.Driver(self.run_uuid)
        or_leave(self._check)

    def _check(self) -> None:
        """Refuse what SLURM, or its nodes, would not do, before anything is submitted."""
        wanted = [job for job in self.workflow.dag.needrun_jobs() if _ours(job)]
        project = Path(self.workflow.workdir_init)
        if wanted and (why := slurm.unusable()):
            raise UserError(why)
        submission.check_env_file(project)
        submission.refuse_blind(project, (job.resources.get("slurm_partition") for job in wanted))
        submission.refuse_impossible(self._sbatch(job) for job in wanted)

    # ---- submitting

    def run_job(self, job: Any) -> None:
        """Attach to the job that does this work already, or submit one. Runs in a thread: nothing may escape it."""
        if not _ours(job):
            super().run_job(job)
            return
        with self._reporting([job]):
            artefact = submission.artefact_of(job)
            with submission.locked(artefact):
                if submission.finished(artefact):
                    self._follow(job, DONE, None, "finished meanwhile, nothing submitted")
                    return
                found = self._find(job, artefact)
                if found is not None:
                    self._attach(job, found)
                    return
                if unused := submission.unused(artefact):
                    self.logger.warning(f"[slurm] {unused}: counts for direct submissions, not for a build's jobs")
                log = self._log_of(job, "%j")
                call = self._sbatch(job, log)
                number = self._submit(call, submission.script([self._command(job)], artefact), job, artefact)
                self._driver.note(artefact, number)
            if self._cancelled:
                slurm.cancel([number])
            self._follow(job, number, self._log_of(job, number), f"submitted as SLURM job {number}")

    def run_array_jobs(self, jobs: list[Any]) -> None:
        """One array for jobs of one rule; those that run already, or alone, are done one by one."""
        left = []
        for job in jobs:
            with self._reporting([job]):
                artefact = submission.artefact_of(job) if _ours(job) else None
                if artefact is None or submission.finished(artefact) or self._find(job, artefact) is not None:
                    self.run_job(job)
                else:
                    left.append(job)
        kinds: dict[str, list[Any]] = {}
        for job in left:  # tasks of an array are all of one size
            kinds.setdefault(self._sbatch(job), []).append(job)
        for alike in kinds.values():
            for start in range(0, len(alike), min(ARRAY, self.max_array_size)):
                self._run_array(alike[start : start + min(ARRAY, self.max_array_size)])

    def _run_array(self, jobs: list[Any]) -> None:
        if len(jobs) == 1:
            self.run_job(jobs[0])
            return
        with self._reporting(jobs), contextlib.ExitStack() as locks:
            artefacts = [submission.artefact_of(job) for job in jobs]
            for artefact in sorted(artefacts):
                locks.enter_context(submission.locked(artefact))
            comment = "+".join([_comment(jobs[0]), *(get_job_wildcards(job) for job in jobs[1:])])
            log = self.slurm_logdir / f"rule_{jobs[0].name}" / "%A_%a.log"
            call = f"{self._sbatch(jobs[0], log, comment)} --array=1-{len(jobs)}"
            script = submission.script([self._command(job) for job in jobs], artefacts[0])
            number = self._submit(call, script, jobs[0], artefacts[0])
            for task, (job, artefact) in enumerate(zip(jobs, artefacts, strict=True), 1):
                identity = f"{number}_{task}"
                self._driver.note(artefact, identity)
                self._follow(job, identity, log.with_name(f"{identity}.log"), f"submitted as SLURM job {identity}")

    def _command(self, job: Any) -> str:
        return str(job.shellcmd)

    def _sbatch(self, job: Any, log: Path | None = None, comment: str | None = None) -> str:
        """The sbatch command, in the plugin's words; without `log` all but the names of this very job."""
        params = {
            "run_uuid": (submission.job_name(job) or self.run_uuid) if log else "test",  # the job's name
            "slurm_logfile": log or "/dev/null",
            "comment_str": (comment or _comment(job)) if log else "test",
            "account": next(self.get_account_arg(job)),
            "partition": self.get_partition_arg(job),
            "workdir": self.workflow.workdir_init,
        }
        if log:
            log.parent.mkdir(parents=True, exist_ok=True)
        call = get_submit_command(job, params, settings=self.workflow.executor_settings, failed_nodes=set())
        return call + set_gres_string(job) + submission.signals(job)

    def _submit(self, call: str, script: str, job: Any, artefact: store.Artefact) -> str:
        """The number of the job. What a busy controller refuses is tried again; whether it took it is looked up."""
        for wait in (*RETRY_SECONDS, None):
            answer = subprocess.run(
                [*shlex.split(call), "/dev/stdin"], input=script, capture_output=True, text=True, check=False
            )
            number = answer.stdout.strip().split(";")[0]
            if answer.returncode == 0 and number.isdigit():
                return number
            said = " ".join(answer.stderr.split()) or f"unexpected answer {answer.stdout!r}"
            if wait is None or not submission.is_busy(said):
                raise UserError(f"sbatch: {said}; the call was: {call}")
            self.logger.warning(f"{said}; trying again in {wait} s")
            time.sleep(wait)
            if found := self._find(job, artefact):
                return found.id
        raise AssertionError

    def _find(self, job: Any, artefact: store.Artefact) -> slurm.Job | None:
        for wait in RETRY_SECONDS:
            if (jobs := slurm.queue()) is not None:
                break
            self.logger.warning(f"squeue does not answer; trying again in {wait} s")
            time.sleep(wait)
        else:
            raise RunFailed("squeue does not answer: whether this work is queued already cannot be known")
        here = self.workflow.workdir_init
        return slurm.find(jobs, _comment(job), here) or self._driver.noted(artefact, jobs, here)

    def _attach(self, job: Any, found: slurm.Job) -> None:
        self._driver.attached(found.id)
        log = self._log_of(job, found.id)
        if "_" in found.id:
            log = log.parent.parent / log.name
        self._follow(job, found.id, log, f"attached to it, nothing submitted: {found}")

    def _log_of(self, job: Any, number: str) -> Path:
        return self.slurm_logdir / f"rule_{job.name}" / get_job_wildcards(job) / f"{number}.log"

    def _follow(self, job: Any, number: str, log: Path | None, what: str) -> None:
        self.logger.info(
            f"Job {job.jobid} ({job.name} {get_job_wildcards(job)}): {what}" + (f" (log: {log})" * bool(log))
        )
        if number != DONE:
            self._followed[number] = None
        info = SubmittedJobInfo(job, external_jobid=number, aux={"slurm_logfile": log})
        self._report_job_submission_threadsafe(info)

    @contextlib.contextmanager
    def _reporting(self, jobs: Sequence[Any]) -> Iterator[None]:
        """An exception in this thread would leave Snakemake waiting for ever: make it the jobs' failure."""
        try:
            yield
        except Exception as error:
            text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            for job in jobs:
                if isinstance(error, UserError) and not isinstance(error, RunFailed):
                    _no_retry(job)
                self._report_job_error_threadsafe(SubmittedJobInfo(job), f"{text}\n")

    def get_account_arg(self, job: Any) -> Iterator[str]:
        """As given; sbatch itself says when it does not exist."""
        account = job.resources.get("slurm_account")
        yield f" -A {shlex.quote(str(account))}" if account else ""

    def get_partition_arg(self, job: Any) -> str:
        """As given, else the cluster's default. `cluster`, the configuration's default, need not exist."""
        wanted = submission.partition(job.resources.get("slurm_partition"))
        return f" -p {shlex.quote(wanted)}" if wanted else ""

    # ---- following

    async def check_active_jobs(self, active_jobs: list[SubmittedJobInfo]) -> AsyncIterator[SubmittedJobInfo]:
        """Report what has ended and yield the rest."""
        start = float(self.workflow.executor_settings.init_seconds_before_status_checks or 10)
        jobs = await asyncio.to_thread(slurm.queue) if active_jobs else []
        self._say_when_down(jobs is None)
        known = {job.id: job for job in jobs or ()}
        ended = 0
        for info in active_jobs:
            number = info.external_jobid
            job = known.get(number)
            if number == DONE:
                self.report_job_success(info)
            elif jobs is None or (job is not None and job.live) or not await self._over(info, job):
                if job is not None:
                    self._misses.pop(number, None)
                    self._say_state(info, job)
                    if said := await asyncio.to_thread(self._releaser, job):
                        self.logger.warning(said)
                yield info
                continue
            self._followed.pop(number, None)
            ended += 1
        current = self.next_seconds_between_status_checks or start
        self.next_seconds_between_status_checks = start if ended else min(SLOWER * start, max(start, current * 1.3))

    async def _over(self, info: SubmittedJobInfo, job: slurm.Job | None) -> bool:
        """Report how a job that is not live any more ended; False when that is not known yet."""
        number = info.external_jobid
        end = await asyncio.to_thread(slurm.ended, number)
        alive = end is not None and end.state in slurm.LIVE  # what the accounts believe of a job that the queue lost
        if job is None and (end is None or alive):
            self._misses[number] = self._misses.get(number, 0) + 1
            if self._misses[number] < MISSES:
                return False
            end = None
        elif alive:
            return False
        if (end is not None and end.state == "COMPLETED") or submission.finished(submission.artefact_of(info.job)):
            self.report_job_success(info)
            return True
        log = (info.aux or {}).get("slurm_logfile")
        head, *errors = self._obituary(info, end, log)
        self.logger.error("\n".join([f"Job {info.job.jobid} ({info.job.name}): {head}", *errors]))  # also when quiet
        self.report_job_error(info, msg=f"{head}\n")
        return True

    def _obituary(self, info: SubmittedJobInfo, end: slurm.End | None, log: Path | None) -> list[str]:
        """Lines: what SLURM says, then what the job itself said."""
        number = info.external_jobid
        errors = [f"    {line}" for line in (submission.errors_in(log) if log else [])]
        if end is None:
            text = f"SLURM job {number} has vanished, and nobody knows how it ended; it is submitted again"
            return [f"{text}; log: {log}", *errors]
        code = f" (exit code {end.code})" if end.code else ""
        text = f"SLURM job {number} ended as {end.state}{code}"
        if end.state == "OUT_OF_MEMORY":
            _no_retry(info.job)
            text += ": raise slurm.memory"
        elif end.state == "FAILED" and end.code in FINAL:
            _no_retry(info.job)
            text += f": {FINAL[end.code]}"
        return [f"{text}; log: {log}", *errors]

    def _say_state(self, info: SubmittedJobInfo, job: slurm.Job) -> None:
        """A line when a job's state changes, requeueing included."""
        before = self._told.get(job.id)
        if before is not None and before != job.state and job.state in ("PENDING", "RUNNING"):
            what = "was put back into the queue" if job.state == "PENDING" else "runs"
            self.logger.info(f"SLURM job {job.id} ({info.job.name}) {what}: {job}")
        self._told[job.id] = job.state

    def _say_when_down(self, down: bool) -> None:
        if down and self._down_since is None:
            self._down_since = time.monotonic()
            self.logger.warning("SLURM does not answer (squeue); jobs go on, waiting for it")
        elif not down and self._down_since is not None:
            self.logger.info(f"SLURM answers again after {time.monotonic() - self._down_since:.0f} s")
            self._down_since = None

    def cancel_jobs(self, active_jobs: list[SubmittedJobInfo]) -> None:
        """At Ctrl-C: cancel what this driver submitted, and what drivers submitted that are dead."""
        self._cancelled = True  # what is being submitted in this moment is cancelled where it is
        foreign = [info.external_jobid for info in active_jobs if info.external_jobid not in (None, DONE)]
        numbers = list(dict.fromkeys([*self._followed, *foreign]))
        mine = [number for number in numbers if not self._driver.of_another(number)]
        if left := sorted(set(numbers) - set(mine)):
            self.logger.info(f"left alone, another living driver submitted them: SLURM jobs {', '.join(left)}")
        if mine:
            said = slurm.cancel(mine)
            text = f"could not cancel SLURM jobs {', '.join(mine)}: {said}" if said else f"cancelled: {', '.join(mine)}"
            self.logger.info(text + "; checkpoints are kept")

    def shutdown(self) -> None:
        super().shutdown()
        self._driver.close()


def _ours(job: Any) -> bool:
    """Whether a job is one of the build's own rules, whose command is all there is to it."""
    return not job.is_group() and job.name in submission.OF_RULE and not job.is_local and bool(job.rule.shellcmd)


def _comment(job: Any) -> str:
    return f"rule_{job.name}_wildcards_{get_job_wildcards(job)}"


def _no_retry(job: Any) -> None:
    job.attempt = job.restart_times + 1
