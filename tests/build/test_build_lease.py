"""One writer per directory: exclusive, taken over from the dead at once and from the silent in time, fenced."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from rlmake.build import lease as module
from rlmake.build.lease import LeaseHeld, LeaseLost, acquire

HOLDER = """
import subprocess, sys, time
from pathlib import Path
from rlmake.build.lease import acquire
lease = acquire(Path(sys.argv[1]))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(module, "POLL", 0.05)
    monkeypatch.setattr(module, "BEAT_EVERY", 0.1)


def foreign(folder, **fields):
    """A holder on another machine."""
    with acquire(folder) as lease:
        record = dict(lease.record)
    record |= {"machine": "elsewhere", "owner": "other", "node": "n2", "epoch": 2, "beat": 7, **fields}
    (folder / "lease-2.json").write_text(json.dumps(record))
    return record


def test_second_writer_leaves_or_waits(tmp_path):
    with acquire(tmp_path) as first:
        with pytest.raises(LeaseHeld, match=f"being written by pid {os.getpid()}"):
            acquire(tmp_path, wait=False)
        assert acquire(tmp_path, give_up=lambda: True) is None
        threading.Timer(0.3, first.release).start()
        second = acquire(tmp_path)
    assert second.epoch == 2
    second.release()
    assert module.read(tmp_path)["released"]


def test_dead_process_is_succeeded_at_once_and_its_children_are_ended(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    child = int(holder.stdout.readline())
    try:
        with pytest.raises(LeaseHeld):
            acquire(tmp_path, wait=False)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        monkey = module.procs.wait_gone
        module.procs.wait_gone = lambda left, timeout: monkey(left, min(timeout, 0.2))
        try:
            with acquire(tmp_path, wait=False) as lease:
                assert lease.epoch == 2
                assert module.procs.process(child) is None, "what it had started is gone"
        finally:
            module.procs.wait_gone = monkey
    finally:
        for pid in (holder.pid, child):
            if module.procs.process(pid):
                os.kill(pid, signal.SIGKILL)


def test_a_silent_holder_elsewhere_is_stale_by_the_observers_clock(tmp_path):
    foreign(tmp_path)
    with pytest.raises(LeaseHeld):
        acquire(tmp_path, wait=False)
    started = time.monotonic()
    with acquire(tmp_path, stale_after=0.5) as lease:
        assert lease.epoch == 3
    assert 0.5 <= time.monotonic() - started < 5


def test_a_beating_holder_elsewhere_is_waited_for(tmp_path):
    record = foreign(tmp_path)
    deadline = time.monotonic() + 1.2

    def beat():
        while time.monotonic() < deadline:
            record["beat"] += 1
            module.write_json(tmp_path / "lease-2.json", record)
            time.sleep(0.1)

    thread = threading.Thread(target=beat)
    thread.start()
    with acquire(tmp_path, stale_after=0.5):
        assert time.monotonic() > deadline
    thread.join()


def test_a_job_that_left_the_queue_is_succeeded_at_once(tmp_path, monkeypatch):
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    (bin_dir / "squeue").write_text('#!/bin/sh\n[ "$3" = 17 ] && echo RUNNING\nexit 0\n')
    (bin_dir / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_dir}:{os.environ['PATH']}")
    running, gone = tmp_path / "running", tmp_path / "gone"
    foreign(running, slurm_job="17")
    foreign(gone, slurm_job="18")
    with pytest.raises(LeaseHeld, match="SLURM job 17"):
        acquire(running, wait=False)
    acquire(gone, wait=False).release()


def test_whoever_was_succeeded_notices(tmp_path):
    lost = threading.Event()
    lease = acquire(tmp_path, on_loss=lost.set)
    foreign_record = {**lease.record, "owner": "other", "epoch": 2, "machine": "elsewhere"}
    (tmp_path / "lease-2.json").write_text(json.dumps(foreign_record))
    assert lost.wait(5)
    with pytest.raises(LeaseLost):
        lease.check()
    lease.release()
    assert not module.read(tmp_path).get("released"), "the new holder's lease is left alone"


def test_one_of_many_wins(tmp_path):
    found = []

    def run():
        try:
            found.append(acquire(tmp_path, wait=False))
        except LeaseHeld:
            pass

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 1
    found[0].release()
