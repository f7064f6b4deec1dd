"""Processes: end with the launcher whatever kills it, end others in order, find what a dead launcher left, ports.

Two marks in the environment say to whom a process belongs; both are set by the launcher for all that it starts and
are inherited by what those start in turn:

    RLMAKE_LAUNCHER      <pid>:<start time> of the launcher, so a pid that was given out again is not mistaken for it
    PRL_ATTEMPT_LOG_DIR  the log folder of the attempt, which says which run directory it is
"""

import contextlib
import ctypes
import errno
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, NoReturn

from rlmake.core.errors import UserError

LAUNCHER = "RLMAKE_LAUNCHER"
READABLE = {"SPT_NOENV": "1"}  # or setproctitle writes over /proc/<pid>/environ, by which processes are found
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Process(NamedTuple):
    """A process that can't be confused with a later one of the same pid. `started`: clock ticks since boot."""

    pid: int
    started: int

    def alive(self) -> bool:
        """Running and the same process; a zombie has ended."""
        return _started(self.pid) == self.started

    def signal(self, number: int) -> None:
        """Send a signal; one that has ended is left alone."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _fields(pid: int) -> list[bytes] | None:
    """The fields of /proc/<pid>/stat behind the name, from `state` on (proc(5)); None when the process is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return None


def _started(pid: int) -> int | None:
    """Start time of a living process; None when it is gone or a zombie."""
    fields = _fields(pid)
    return int(fields[19]) if fields and fields[0] not in (b"Z", b"X") else None


def process(pid: int) -> Process | None:
    """The living process with this pid, or None."""
    started = _started(pid)
    return None if started is None else Process(pid, started)


def launcher_mark() -> dict[str, str]:
    """The environment entry by which children know this process as their launcher; for `subprocess`'s `env`."""
    return {LAUNCHER: f"{os.getpid()}:{_started(os.getpid())}"}


def parse_mark(mark: str | None) -> Process | None:
    """The launcher named by a mark; None for no or a broken mark."""
    pid, _, started = (mark or "").partition(":")
    return Process(int(pid), int(started)) if pid.isdigit() and started.isdigit() else None


def die_with_parent(poll: float = 0.5, grace: float = 5.0) -> None:
    """End this process when its parent or its launcher ends, in whatever way. The first call of every entry module.

    The kernel sends SIGTERM when the parent dies (it means the parent's thread that started us: launchers start their
    children from the main thread). A watchdog thread covers what that misses: a parent that was dead before the
    call, a launcher further up (torchrun stands between it and the ranks), and a process that does not heed SIGTERM
    within `grace` seconds. A process that was started by hand carries no launcher's mark and is left alone, so a
    server under `nohup` outlives its shell.
    """
    launcher = parse_mark(os.environ.get(LAUNCHER))
    if launcher is None or launcher.pid == os.getpid():
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    def watch() -> None:
        while os.getppid() == parent and launcher.alive():
            time.sleep(poll)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="die-with-parent", daemon=True).start()


def leave(code: int) -> NoReturn:
    """End this process at once, with its output flushed.

    Taking down an interpreter that holds torch and transformers costs more than a second of CPU and achieves nothing.
    Only for a main module whose files are closed and whose children have ended.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def environ(pid: int) -> dict[str, str]:
    """The environment that a process was started with; empty when it is gone or another user's."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = os.fsdecode(file.read()).split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def find(key: str, accept: Callable[[str], bool]) -> list[Process]:
    """Living processes of this user that were started with the environment variable `key` at a value `accept` takes.

    The calling process and its ancestors are never among them.
    """
    own = set(_ancestors())
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) not in own]
    values = {pid: environ(pid).get(key) for pid in pids}
    found = [process(pid) for pid, value in values.items() if value is not None and accept(value)]
    return [one for one in found if one is not None]


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal now (SigCgt of /proc/<pid>/status); False when it is gone."""
    try:
        with open(f"/proc/{pid}/status") as file:
            caught = next(line for line in file if line.startswith("SigCgt:"))
    except OSError:
        return False
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def parent(pid: int) -> int | None:
    """The parent's pid; None when the process is gone."""
    fields = _fields(pid)
    return int(fields[1]) if fields else None


def _ancestors() -> Iterator[int]:
    """This process's pid and those of its ancestors."""
    pid: int | None = os.getpid()
    while pid:
        yield pid
        pid = parent(pid)


def wait_gone(processes: Iterable[Process], timeout: float) -> list[Process]:
    """Wait until all have ended; those still alive after `timeout` seconds."""
    left, deadline = list(processes), time.monotonic() + timeout
    while (left := [one for one in left if one.alive()]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def terminate(processes: Iterable[Process], grace: float) -> list[Process]:
    """SIGTERM, up to `grace` seconds, SIGKILL. Returns those that had to be killed.

    Children of the caller must be reaped elsewhere: a zombie counts as ended.
    """
    processes = list(processes)
    for one in processes:
        one.signal(signal.SIGTERM)
    left = wait_gone(processes, grace)
    for one in left:
        one.signal(signal.SIGKILL)
    wait_gone(left, 5.0)
    return left


def scratch(prefix: str, below: int) -> str:
    """A new folder for temporary files in $TMPDIR, or in /tmp where sockets would get too long a path there: a path of
    theirs has 107 bytes (unix(7)), of which `below` are kept for what is below the folder. Raises `UserError`."""
    try:
        parent = tempfile.gettempdir()
        fits = len(os.fsencode(parent)) + len(prefix) + 9 + below <= 107  # 9: a slash, and the random part
        return tempfile.mkdtemp(prefix=prefix, dir=parent if fits else "/tmp")
    except OSError as error:
        raise UserError(f"TMPDIR: no folder for temporary files can be made: {error}") from None


def claim_port(host: str = "127.0.0.1", port: int = 0, key: str = "port") -> socket.socket:
    """A listening TCP socket; port 0 lets the system choose. Keep it open: a port let go can be taken by another.

    Raises `UserError` in one line, naming the configuration `key`, when the port is in use or not ours to bind.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(2048)
    except (OSError, TypeError) as error:
        sock.close()
        if isinstance(error, socket.gaierror | TypeError) or error.errno == errno.EADDRNOTAVAIL:
            why = error if isinstance(error, TypeError) else error.strerror
            raise UserError(
                f"{re.sub('port$', 'host', key)}: {host!r}: {why}; expected an address of this machine"
            ) from None
        reason = "already in use" if error.errno == errno.EADDRINUSE else os.strerror(error.errno or 0)
        raise UserError(f"{key}: {host}:{port} is {reason}; choose another port, or 0 for any free one") from None
    return sock
