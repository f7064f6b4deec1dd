"""Supervision with real processes: deaths, signals, a launcher that is killed, nothing left."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from rlmake.core import procs
from rlmake.core.errors import RunFailed, UserError
from rlmake.launch.supervise import RunDiverged, RunStopped, Supervisor, kill_leftovers, ranks

STUBS = str(Path(__file__).with_name("stubs.py"))
KEY = "PRL_ATTEMPT_LOG_DIR"


def of_run(logs: Path) -> list[procs.Process]:
    return procs.find(KEY, lambda value: value == str(logs))


@pytest.fixture
def logs(tmp_path):
    folder = tmp_path / "run" / "logs" / "attempt_1"
    folder.mkdir(parents=True)
    yield folder
    left = of_run(folder)
    procs.terminate(left, 0)
    assert not left, "a test left processes behind"


def start(supervisor: Supervisor, logs: Path, role: str, *args: str, final: bool = False):
    command = [sys.executable, STUBS, role, *args]
    return supervisor.start(role, command, {**os.environ, KEY: str(logs)}, logs / f"{role}.log", final)


def launch(logs: Path, *roles: str) -> subprocess.Popen:
    command = [sys.executable, STUBS, "launcher", str(logs), *roles]
    popen = subprocess.Popen(command, env={**os.environ, KEY: str(logs)}, stdout=subprocess.PIPE, text=True)
    assert popen.stdout.readline() == "up\n"
    return popen


def test_success_ends_the_servers(logs):
    with Supervisor() as supervisor:
        server = start(supervisor, logs, "serve")
        start(supervisor, logs, "finish", "0.3", final=True)
        supervisor.wait()
    assert server.code == 0


def test_death_is_told_with_name_code_and_last_lines(logs):
    begun = time.monotonic()
    with pytest.raises(RunFailed) as caught, Supervisor() as supervisor:
        start(supervisor, logs, "serve")
        start(supervisor, logs, "finish", "60", final=True)
        start(supervisor, logs, "fail", "3", final=True)
        supervisor.wait()
    head, *tail = str(caught.value).splitlines()
    assert head.startswith("fail exited with code 3 after ") and head.endswith(f"last lines of {logs / 'fail.log'}:")
    assert tail == ["    first line", "    ValueError: the reason"]
    assert caught.value.exit_code == 1
    assert time.monotonic() - begun < 5


def test_a_server_that_ends_early_is_a_failure_even_with_code_0(logs):
    with pytest.raises(RunFailed, match="finish exited with code 0"), Supervisor() as supervisor:
        start(supervisor, logs, "finish", "0.1")
        start(supervisor, logs, "serve", final=True)
        supervisor.wait()


def test_killed_child_is_named_by_its_signal(logs):
    with pytest.raises(RunFailed, match="serve was killed by SIGKILL"), Supervisor() as supervisor:
        server = start(supervisor, logs, "serve")
        start(supervisor, logs, "finish", "60", final=True)
        server.popen.kill()
        supervisor.wait()


@pytest.mark.parametrize(("code", "error"), [(75, RunStopped), (76, RunDiverged)])
def test_exit_codes_that_mean_something(logs, code, error):
    with pytest.raises(error) as caught, Supervisor() as supervisor:
        start(supervisor, logs, "fail", str(code), final=True)
        supervisor.wait()
    assert caught.value.exit_code == code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_to_the_launcher_ends_all(logs, number):
    popen = launch(logs, "serve", "family", "stubborn")
    assert len(of_run(logs)) >= 4
    popen.send_signal(number)
    assert popen.wait(8) != 0
    assert not of_run(logs)


@pytest.mark.parametrize(("number", "heard"), [(signal.SIGINT, True), (signal.SIGHUP, False)])
def test_signals_that_were_ignored_at_the_start(logs, number, heard):
    """SIGINT as a script's shell hands it to what it starts in the background, SIGHUP as nohup does."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        popen = launch(logs, "serve")
    finally:
        signal.signal(number, before)
    popen.send_signal(number)
    if heard:
        assert popen.wait(8) != 0
    else:
        time.sleep(0.5)
        assert popen.poll() is None and of_run(logs)
        popen.terminate()
        popen.wait(8)
    assert not of_run(logs)


def test_nothing_is_left_of_a_killed_launcher(logs):
    popen = launch(logs, "serve", "family", "stubborn")
    popen.kill()
    popen.wait()
    left = procs.wait_gone(of_run(logs), 10)
    assert not left and not of_run(logs)


@pytest.mark.parametrize("end", ["kill", "terminate"])
def test_temporary_files_go_with_the_run(logs, end):
    """Also those of a process that is killed; what was compiled stays, for the next run."""
    popen = launch(logs, "litter")
    folder, compiled = (logs / "litter0.log").read_text().split()[:2]
    assert Path(folder).is_dir() and Path(folder).parent.name.startswith("rlmake-")
    assert Path(compiled).parent == Path(tempfile.gettempdir())
    getattr(popen, end)()
    popen.wait()
    assert not procs.wait_gone(of_run(logs), 20)
    assert not Path(folder).parent.exists()


@pytest.mark.parametrize(("length", "there"), [(40, True), (90, False)])
def test_a_long_tmpdir_leaves_room_for_the_paths_of_sockets(length, there, monkeypatch):
    """Of the broker below the run's folder too; both go to /tmp otherwise."""
    with tempfile.TemporaryDirectory(dir="/tmp") as root:
        chosen = Path(root, "d" * (length - len(root) - 1))
        chosen.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(chosen))
        folder = procs.scratch("rlmake-", 38)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        below = procs.scratch("rlmake-env-", 12)
        shutil.rmtree(folder)
    assert Path(folder).parent == (chosen if there else Path("/tmp")) and Path(below).parent == Path(folder)
    assert len(below) + 12 <= 107 and len(folder) + 38 <= 107


def test_no_folder_for_temporary_files_is_one_line(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nothing")
    with pytest.raises(UserError, match=r"^TMPDIR: no folder for temporary files can be made: .*/proc/nothing"):
        procs.scratch("rlmake-", 38)


def test_a_folder_for_temporary_files_may_be_chosen(logs, tmp_path):
    with Supervisor() as supervisor:
        command, env = [sys.executable, STUBS, "litter"], {**os.environ, KEY: str(logs), "TMPDIR": str(tmp_path)}
        child = supervisor.start("litter", command, env | {"TORCHINDUCTOR_CACHE_DIR": "here"}, logs / "litter.log")
        supervisor.wait_until(lambda: child.log.stat().st_size, 30, "a line")
        folder, compiled = child.log.read_text().split()[:2]
    assert Path(folder).parent == tmp_path and Path(folder).exists() and compiled == "here"


def test_own_processes_end_with_a_killed_launcher_and_its_guard(logs):
    """Without the guard, by `die_with_parent` alone, here two levels down (as ranks below torchrun are)."""
    code = (
        "import subprocess, sys; from rlmake.core import procs\n"
        "child = 'import os, time; from rlmake.core import procs; procs.die_with_parent(); print(1, flush=True);'\n"
        "child += 'import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)'\n"
        "middle = f'import subprocess, sys, time; subprocess.run([sys.executable, \"-c\", {child!r}])'\n"
        "import os; env = {**os.environ, **procs.launcher_mark()}\n"
        "subprocess.run([sys.executable, '-c', middle], env=env)"
    )
    env = {**os.environ, KEY: str(logs)}
    popen = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE)
    assert popen.stdout.readline() == b"1\n"
    popen.kill()
    popen.wait()
    begun = time.monotonic()
    deadline = begun + 10
    while of_run(logs) and time.monotonic() < deadline:
        time.sleep(0.1)
        # the middle process is not ours and does not end by itself; its own launcher's end is what the child notices
        if len(of_run(logs)) == 1:
            procs.terminate(of_run(logs), 0)
    assert not of_run(logs)


def test_leftovers_of_this_run_only(logs, tmp_path):
    other = tmp_path / "run2" / "logs" / "attempt_1"
    mine = subprocess.Popen([sys.executable, STUBS, "stubborn"], env={**os.environ, KEY: str(logs)})
    theirs = subprocess.Popen([sys.executable, STUBS, "serve"], env={**os.environ, KEY: str(other)})
    try:
        while len(of_run(logs)) + len(of_run(other)) < 2:
            time.sleep(0.05)
        assert [p.pid for p in kill_leftovers(logs.parent.parent)] == [mine.pid]
        assert mine.wait(5) != 0 and theirs.poll() is None
    finally:
        for popen in (mine, theirs):
            popen.kill()
            popen.wait()


def test_processes_of_a_living_launcher_are_not_leftovers(logs):
    popen = launch(logs, "serve")
    with pytest.raises(RunFailed, match=f"in use by process {popen.pid}"):
        kill_leftovers(logs.parent.parent)
    popen.terminate()
    popen.wait()


def test_save_and_leave_reaches_the_ranks_through_torchrun(logs, tmp_path):
    command = [sys.executable, "-m", "rlmake.launch.elastic", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", "2", "--log-dir", str(logs / "torchrun"), "--redirects", "3", "--tee", "3"]
    command += ["--local-ranks-filter", "0"]
    command += [STUBS, "rank", str(tmp_path)]
    with pytest.raises(RunStopped, match="trainer saved a checkpoint and left") as caught, Supervisor() as supervisor:
        env = {**os.environ, KEY: str(logs), "OMP_NUM_THREADS": "1"}
        agent = supervisor.start("trainer", command, env, logs / "trainer.log", final=True)
        supervisor.wait_until(lambda: len(list(tmp_path.glob("started*"))) == 2, 60, "ranks")
        assert len(ranks(agent.popen.pid)) == 2
        os.kill(os.getpid(), signal.SIGUSR1)
        supervisor.wait()
    assert caught.value.exit_code == 75
