"""Supervision: the processes of one run, started in order, watched together, ended in order, none left behind."""

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from loguru import logger

from rlmake.core import procs, slurm
from rlmake.core.errors import RunFailed
from rlmake.launch import guard

POLL_S = 0.05
SETTLE_S = 0.5  # after a first death: others that fall with it are named in the same message
GRACE_S = 10.0  # between SIGTERM and SIGKILL
FAILED_GRACE_S = 4.0  # the same once a process has failed: the run has nothing left to bring to an end
LOOK_FOR_RANKS_S = 0.5
RESERVE_S = 5.0  # of SLURM's KillWait, to end the run's processes in
TAIL_LINES = 15
SAVED_AND_LEFT, DIVERGED = 75, 76  # exit codes of a trainer that are not failures of the program


class RunStopped(RunFailed):
    """The run ended before its last step without a fault: saved and left, or stopped by a signal.

    `early`: it was asked to (SIGUSR1) because its time is nearly over. `progressed`: its newest checkpoint lies behind
    the one that it began from; who catches this may have the run continued (`launch.requeue`).
    """

    def __init__(self, message: str, exit_code: int, early: bool = False):
        super().__init__(message)
        self.exit_code, self.early, self.progressed = exit_code, early, False


class RunDiverged(RunFailed):
    """The training diverged; trying again would diverge again."""

    exit_code = DIVERGED


@dataclass
class Child:
    """A process of the run. `final`: it ends by itself and the run ends with it; others serve until they are told.

    `remote`: it is the srun of a process on a node of the allocation.
    """

    name: str
    log: Path
    final: bool
    popen: subprocess.Popen
    remote: bool = False
    started: float = field(default_factory=time.monotonic)

    @property
    def age(self) -> float:
        """Seconds since it was started."""
        return time.monotonic() - self.started

    @property
    def code(self) -> int | None:
        """Exit code as a shell gives it (128 + signal), None while it runs."""
        code = self.popen.poll()
        return 128 - code if code is not None and code < 0 else code


class Supervisor:
    """Context manager around the processes of a run; leaving it ends all of them, whatever happened inside.

    SIGTERM and SIGINT to the calling process end the run in order; SIGUSR1 goes on to the trainer's ranks, which save
    a checkpoint after the step in hand and leave with code 75.

    In a SLURM job SIGTERM means that the job is taken away (preempted, cancelled, out of time): SLURM sends it to every
    process and SIGKILL after KillWait. There the children do not hear it (they are told to stop by SIGINT), and the
    trainer is given what is left of that time to save and leave. `leave_file` is written when the run is to save and
    leave: for ranks on other nodes, which no signal of ours reaches.
    """

    def __init__(self, grace: float = GRACE_S, leave_file: Path | None = None):
        self.children: list[Child] = []
        self._grace, self._leave_file = grace, leave_file
        self._kill_wait = slurm.kill_wait() if slurm.own_job() else None
        self._early = False
        self._deadline = float("inf")
        self._received: int | None = None
        self._look_for_ranks = float("inf")  # when to look (again) for ranks that have to be told to save and leave
        self._told: set[procs.Process] = set()
        self._seen_ended: set[str] = set()
        self._handlers: dict[int, object] = {}

    def __enter__(self) -> "Supervisor":
        self._scratch = procs.scratch("rlmake-", 38)  # vLLM names sockets by a UUID
        self._guard = guard.start(self._scratch)
        if threading.current_thread() is threading.main_thread():
            # An ignored SIGHUP is somebody's wish (nohup). An ignored SIGINT is not: a script's shell starts so all
            # that it puts into the background. Whoever sends it means the run, and its servers take it anyhow.
            hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
            for number in (signal.SIGTERM, signal.SIGINT, *hangup):
                self._handlers[number] = signal.signal(number, self._note)
            self._handlers[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._leave)
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        failed = error is not None and not isinstance(error, RunStopped)
        try:
            self.stop(min(self._grace, FAILED_GRACE_S) if failed else self._grace)
        finally:
            self._guard.stdin.close()
            self._guard.wait()
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    def start(
        self,
        name: str,
        command: list[str],
        env: Mapping[str, str],
        log: Path,
        final: bool = False,
        remote: bool = False,
    ) -> Child:
        """Start a child with both streams appended to `log`, in a session of its own (the terminal's Ctrl-C is ours).

        `env` is the whole environment; the launcher's mark is added, and a folder for temporary files that goes with
        the run, unless the child is on another node or its configuration has chosen one.
        """
        if not remote and env.get("TMPDIR") == os.environ.get("TMPDIR"):
            kept = os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")  # compiled code
            env = {"TORCHINDUCTOR_CACHE_DIR": kept, **env, "TMPDIR": self._scratch}
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as stream, _unheard(signal.SIGTERM, self._kill_wait is not None):
            popen = subprocess.Popen(
                command,
                env={**env, **procs.launcher_mark()},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.children.append(child := Child(name, log, final, popen, remote))
        return child

    def wait_until(self, ready: Callable[[], bool], timeout: float, what: str) -> None:
        """Watch the children until `ready()`. Raises `RunFailed` when one dies, the time is over or a signal came."""
        deadline = time.monotonic() + timeout
        while not ready():
            self.check()
            if time.monotonic() > deadline:
                raise RunFailed(f"{what}: not there after {timeout:g} s")
            time.sleep(POLL_S)

    def wait(self, tick: Callable[[], None] = lambda: None) -> None:
        """Watch until every final child has ended well. `tick` is called at each look. Raises as `wait_until`."""
        while any(child.code is None for child in self.children if child.final):
            self.check()
            tick()
            time.sleep(POLL_S)
        self.check()
        tick()

    def check(self) -> None:
        """Raise when a signal came, or a child ended that should not have."""
        self._record_ends()
        if time.monotonic() > self._deadline:
            self._received = signal.SIGTERM
        if self._received is not None:
            name = signal.Signals(self._received).name
            raise RunStopped(f"stopped by {name}; every process of the run was ended", 128 + self._received)
        if time.monotonic() > self._look_for_ranks:
            self._tell_ranks()
        if not self._dead():
            return
        time.sleep(SETTLE_S)
        dead = self._dead()
        for child in dead:
            if child.code == SAVED_AND_LEFT:
                text = f"{child.name} saved a checkpoint and left (exit code 75); resume continues it"
                raise RunStopped(text, 75, self._early)
        message = "\n".join(self._obituary(child) for child in dead)
        raise RunDiverged(message) if any(child.code == DIVERGED for child in dead) else RunFailed(message)

    def _dead(self) -> list[Child]:
        """Children that ended with an error, and servers that ended at all."""
        return [c for c in self.children if c.code is not None and (c.code != 0 or not c.final)]

    @staticmethod
    def _obituary(child: Child) -> str:
        why = f"exited with code {child.code}"
        if child.code > 128 and (child.code - 128) in set(signal.Signals):
            why = f"was killed by {signal.Signals(child.code - 128).name}"
        elif child.code == DIVERGED:
            why = f"diverged (exit code {DIVERGED})"
        head = f"{child.name} {why} after {child.age:.0f} s; last lines of {child.log}:"
        return "\n".join([head, *(f"    {line}" for line in tail(child.log))])

    def stop(self, grace: float) -> None:
        """End the final children, then the servers that they used, then whatever any of them started. Idempotent."""
        for group in ([c for c in self.children if c.final], [c for c in self.children if not c.final]):
            for child in reversed(group):
                if child.code is None:
                    child.popen.send_signal(self._stop_signal(child))
            deadline = time.monotonic() + grace
            while any(child.code is None for child in group) and time.monotonic() < deadline:
                self._record_ends()
                time.sleep(POLL_S)
            for child in group:
                if child.code is None:
                    logger.warning(f"{child.name} did not end within {grace:g} s: killed")
                    child.popen.kill()
                    child.popen.wait()
            self._record_ends()
        mark = procs.launcher_mark()[procs.LAUNCHER]
        procs.terminate(procs.find(procs.LAUNCHER, lambda value: value == mark), 1.0)

    def _stop_signal(self, child: Child) -> int:
        return signal.SIGTERM if self._kill_wait is None or child.remote else signal.SIGINT

    def _record_ends(self) -> None:
        for child in self.children:
            if child.code is not None and child.name not in self._seen_ended:
                self._seen_ended.add(child.name)
                logger.debug(f"{child.name} ended with code {child.code} after {child.age:.1f} s")

    def _note(self, number: int, _frame: object) -> None:
        if number == signal.SIGTERM and self._kill_wait is not None:
            self._deadline = min(self._deadline, time.monotonic() + max(1.0, self._kill_wait - RESERVE_S))
            self._look_for_ranks = 0.0
        else:
            self._received = number

    def _leave(self, *_: object) -> None:
        self._early = True
        self._look_for_ranks = 0.0

    def _tell_ranks(self) -> None:
        """SIGUSR1 to every rank, not to torchrun above them: once, and as soon as it has its handler.

        Before that, and again while the interpreter shuts down, the signal would be lost or deadly.
        """
        self._look_for_ranks = time.monotonic() + LOOK_FOR_RANKS_S
        if self._leave_file is not None:
            self._leave_file.touch()
        for child in self.children:
            for rank in ranks(child.popen.pid) if child.final and child.code is None else ():
                if rank not in self._told and procs.catches(rank.pid, signal.SIGUSR1):
                    self._told.add(rank)
                    rank.signal(signal.SIGUSR1)


@contextlib.contextmanager
def _unheard(number: int, wanted: bool) -> Iterator[None]:
    """Processes started inside have the signal blocked, whatever handlers they set."""
    if not wanted:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ranks(agent: int) -> list[procs.Process]:
    """The ranks below a torchrun agent: its direct children that carry torch's own mark."""
    return [p for p in procs.find("TORCHELASTIC_RUN_ID", lambda _: True) if procs.parent(p.pid) == agent]


def tail(log: Path, lines: int = TAIL_LINES, limit: int = 64 << 10) -> list[str]:
    """The last lines of a log that are not blank."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - limit))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]


def kill_leftovers(run_dir: Path) -> list[procs.Process]:
    """End what a dead launcher left of this run directory, and of no other. Returns what was ended.

    Raises `RunFailed` when the launcher of such a process is alive: then the directory is in use.
    """
    logs = f"{run_dir.resolve() / 'logs'}{os.sep}"
    found = procs.find("PRL_ATTEMPT_LOG_DIR", lambda value: value.startswith(logs))
    for one in found:
        launcher = procs.parse_mark(procs.environ(one.pid).get(procs.LAUNCHER))
        if launcher and launcher.pid != os.getpid() and launcher.alive():
            raise RunFailed(f"{run_dir} is in use by process {launcher.pid}; stop it first")
    if found:
        logger.warning(f"ending {len(found)} processes that a dead launcher left of {run_dir.name}: {pids(found)}")
        procs.terminate(found, 2.0)
    return found


def pids(processes: Iterable[procs.Process]) -> str:
    return ", ".join(str(one.pid) for one in processes)
