"""One writer per store directory: a lease held by a heartbeat, fenced by an epoch.

    <dir>/lease-<epoch>.json     the record of design §10; the highest epoch is the holder's

An epoch's file is created exclusively (a hard link of a finished record), so of two that want to succeed a dead holder
one wins. A holder renews `beat`; when an observer has not seen it move for 60 s of its own clock, it is stale: clocks
of different hosts are never compared. A holder on this host whose process is gone is succeeded at once, and so is one
whose SLURM job has left the queue. A holder that was succeeded (it slept, its disk hung) finds a higher epoch at its
next beat or before it publishes, and stops.
"""

import os
import re
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from loguru import logger

from rlmake.core import procs, slurm
from rlmake.core.errors import UserError
from rlmake.core.jsonio import read_json, read_record, write_json

SCHEMA = 1
STALE_AFTER = 60.0  # seconds without a beat, on the observer's clock
BEAT_EVERY = 5.0
POLL = 1.0
OWNER = "RLMAKE_LEASE"  # in the environment of all that works under a lease: the owner's id


class LeaseHeld(UserError):
    """Another process writes here and the caller did not want to wait."""

    exit_code = 4


class LeaseLost(UserError):
    """Another process has taken over; this one must not write any more."""

    exit_code = 5


class _Time(msgspec.Struct):
    seconds: float


class _Holder(msgspec.Struct):
    owner: str
    node: str
    machine: str
    pid: int
    pid_start: float
    epoch: int
    beat: int


def machine() -> str:
    """Names what a pid is valid in: this boot of this kernel, this pid namespace. Hostnames repeat, these do not."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.stat('/proc/self/ns/pid').st_ino}"


def read(folder: Path) -> dict[str, Any] | None:
    """The record of the highest epoch, None when there was never a holder. A released one has `released` true."""
    epoch = _newest(folder)
    return _read(folder, epoch) if epoch else None


def spent(folder: Path) -> float | None:
    """Seconds of all attempts at the work in a folder: what ended ones have noted, and the beats of one that runs or
    was killed. None where there was none."""
    seconds, holder = noted_seconds(folder), read(folder)
    if holder and not holder.get("released"):
        seconds = (seconds or 0.0) + holder["beat"] * BEAT_EVERY
    return seconds


def noted_seconds(folder: Path) -> float | None:
    """What the attempts that ended have noted together, None for nothing. A damaged note is told and counts as none."""
    path = folder / "time.json"
    try:
        return read_record(path, _Time)["seconds"] if path.is_file() else None
    except UserError as error:
        logger.warning(f"{error}; the time of earlier attempts is not known")
        return None


def is_gone(record: dict[str, Any]) -> bool:
    """Whether a holder is known to be gone at once: released, or its process or SLURM job is no more."""
    return _Watch(STALE_AFTER).gone(record["epoch"], record)


def describe(record: dict[str, Any]) -> str:
    """Who a holder is, in words."""
    job = f", SLURM job {record['slurm_job']}" if record.get("slurm_job") else ""
    return f"pid {record['pid']} on {record['node']}{job}"


class Lease:
    """A held lease; a context manager that releases. Use `acquire`.

    `inherited`: seconds for which a predecessor that died had held it, by its beats.
    """

    def __init__(self, folder: Path, epoch: int, record: dict[str, Any], inherited: float = 0.0):
        self.folder, self.epoch, self.record, self.inherited = folder, epoch, record, inherited
        self.lost = False
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self, on_loss: Callable[[], None] | None = None) -> "Lease":
        """Begin to beat. `on_loss` is called (in the beating thread) when another has taken over."""

        def beat() -> None:
            while not self._stop.wait(BEAT_EVERY):
                if not self._beat():
                    logger.error(f"{self.folder}: another process has taken over the lease, this one stops")
                    if on_loss:
                        on_loss()
                    return

        self._thread = threading.Thread(target=beat, name="lease", daemon=True)
        self._thread.start()
        return self

    def check(self) -> None:
        """Raise `LeaseLost` unless this is still the newest epoch. Called before everything that is published."""
        if self.lost or _newest(self.folder) != self.epoch:
            self.lost = True
            raise LeaseLost(f"{self.folder}: another process has taken over, nothing more is written from here")

    def release(self) -> None:
        """Let go; a lost lease is left to its new holder."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if not self.lost and _newest(self.folder) == self.epoch:
            write_json(_path(self.folder, self.epoch), {**self.record, "released": True})
        os.environ.pop(OWNER, None)

    def _beat(self) -> bool:
        with self._lock:
            if self.lost or _newest(self.folder) != self.epoch:
                self.lost = True
                return False
            self.record["beat"] += 1
            try:
                write_json(_path(self.folder, self.epoch), self.record)
            except OSError as error:  # a full or stuck disk: the next beat tries again, an observer's 60 s decide
                logger.warning(f"{self.folder}: lease not renewed: {error}")
        return True

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


def acquire(
    folder: Path,
    *,
    wait: bool = True,
    attempt: int = 1,
    give_up: Callable[[], bool] | None = None,
    on_loss: Callable[[], None] | None = None,
    stale_after: float = STALE_AFTER,
) -> Lease | None:
    """Become the one writer of `folder` (created if absent).

    A living holder is waited for (`wait`) or raises `LeaseHeld`. `give_up` is asked while waiting: when it says yes
    (the work was finished by the other) None is returned.
    """
    folder.mkdir(parents=True, exist_ok=True)
    watch = _Watch(stale_after)
    told: str | None = None
    while True:
        epoch = _newest(folder)
        holder = _read(folder, epoch) if epoch else None
        if epoch == 0 or watch.gone(epoch, holder):
            if lease := _claim(folder, epoch + 1, holder, attempt):
                return lease.start(on_loss)
            continue
        if holder is not None and not wait:
            raise LeaseHeld(f"{folder} is being written by {describe(holder)}; wait for it or stop it first")
        if give_up and give_up():
            return None
        if holder is not None and told != holder["owner"]:
            told = holder["owner"]
            logger.info(f"{folder.name}: written by {describe(holder)}, waiting for it")
        time.sleep(POLL)


class _Watch:
    """One observer's memory of a holder: when it last saw the beat move, by its own clock."""

    def __init__(self, stale_after: float):
        self.stale_after = stale_after
        self.seen: tuple[int, int | None] | None = None
        self.since = time.monotonic()

    def gone(self, epoch: int, holder: dict[str, Any] | None) -> bool:
        """Whether the holder may be succeeded now. An unreadable record counts as one that does not beat."""
        if holder is not None:
            if holder.get("released"):
                return True
            if holder["machine"] == machine():
                process = procs.process(holder["pid"])
                if process is None or process.started != holder["pid_start"]:
                    return True
            elif (job := holder.get("slurm_job")) and (_former_life(job) or slurm.left_queue(job)):
                return True
        now = (epoch, holder["beat"] if holder else None)
        if now != self.seen:
            self.seen, self.since = now, time.monotonic()
        return time.monotonic() - self.since >= self.stale_after


def _claim(folder: Path, epoch: int, before: dict[str, Any] | None, attempt: int) -> Lease | None:
    """Create the record of `epoch` exclusively; None when another was first."""
    me = procs.process(os.getpid())
    record = {
        "schema": SCHEMA,
        "owner": uuid.uuid4().hex,
        "host": socket.gethostname(),
        "node": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "machine": machine(),
        "pid": os.getpid(),
        "pid_start": me.started if me else 0,
        "slurm_job": slurm.own_job(),
        "attempt": attempt,
        "epoch": epoch,
        "beat": 0,
    }
    temporary = folder / f".lease-{record['owner']}.tmp"
    write_json(temporary, record)
    try:
        os.link(temporary, _path(folder, epoch))
    except FileExistsError:
        return None
    finally:
        temporary.unlink()
    inherited = 0.0
    if before is not None and not before.get("released"):
        inherited = before["beat"] * BEAT_EVERY
        logger.warning(f"{folder.name}: taking over from {describe(before)}, which is gone")
        _end_orphans(before)
    for old, path in _epochs(folder):
        if old < epoch:
            path.unlink(missing_ok=True)
    os.environ[OWNER] = record["owner"]
    return Lease(folder, epoch, record, inherited)


def _end_orphans(before: dict[str, Any]) -> None:
    """End what a dead holder started on this machine and left behind, so that nothing but us writes."""
    if before["machine"] != machine():
        return
    left = procs.wait_gone(procs.find(OWNER, lambda owner: owner == before["owner"]), 10.0)
    for process in left:
        process.signal(signal.SIGKILL)
    procs.wait_gone(left, 5.0)


def _former_life(job: str) -> bool:
    """Whether the holder was this very job before it was requeued: SLURM has ended all of it since."""
    return job == slurm.own_job() and os.environ.get("SLURM_RESTART_COUNT", "0") != "0"


def _path(folder: Path, epoch: int) -> Path:
    return folder / f"lease-{epoch}.json"


def _epochs(folder: Path) -> list[tuple[int, Path]]:
    found = []
    for name in os.listdir(folder):
        if match := re.fullmatch(r"lease-(\d+)\.json", name):
            found.append((int(match[1]), folder / name))
    return sorted(found)


def _newest(folder: Path) -> int:
    try:
        epochs = _epochs(folder)
    except FileNotFoundError:
        return 0
    return epochs[-1][0] if epochs else 0


def _read(folder: Path, epoch: int) -> dict[str, Any] | None:
    path = _path(folder, epoch)
    try:
        record = read_json(path)
    except UserError:
        return None
    if isinstance(record, dict) and record.get("schema", SCHEMA) != SCHEMA:  # of another version: not ours to judge
        raise UserError(f"{path}: schema {record['schema']} is unknown, expected {SCHEMA}")
    try:
        return read_record(path, _Holder, SCHEMA)
    except UserError:
        return None
