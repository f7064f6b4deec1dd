"""One dashboard per user: started once, for every directory that a launch registers."""

import json
import os
import signal
import time
import urllib.request

import pytest
from dashboard_runs import Made

from rlmake.core.procs import process
from rlmake.dashboard import registry


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(registry, "START_SECONDS", 120.0)  # of a machine that does much else
    yield
    record = registry.folder() / "daemon.json"
    if record.exists() and registry.running():
        pid = json.loads(record.read_text())["pid"]
        os.kill(pid, signal.SIGTERM)
        for _ in range(100):
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                pass
            if process(pid) is None:
                break
            time.sleep(0.1)


def test_the_first_launch_starts_it_and_others_add_their_directories(tmp_path):
    Made(tmp_path / "a/outputs/one").close()
    Made(tmp_path / "b/outputs/two").close()
    url = registry.ensure(tmp_path / "a/outputs")
    pid = json.loads((registry.folder() / "daemon.json").read_text())["pid"]
    assert url and registry.ensure(tmp_path / "b/outputs") == url
    assert json.loads((registry.folder() / "daemon.json").read_text())["pid"] == pid
    with urllib.request.urlopen(f"{url}/api/runs", timeout=30) as answer:
        assert {row["id"] for row in json.load(answer)["runs"]} == {"one", "two"}


def test_a_dead_one_and_broken_records_are_not_believed(tmp_path):
    registry.folder().mkdir(parents=True)
    (registry.folder() / "daemon.json").write_text(json.dumps({"pid": os.getpid(), "started": 1, "url": "http://x"}))
    (registry.folder() / "dirs.json").write_text('["/nowhere", 3, "' + str(tmp_path) + '"]')
    assert registry.running() is None and registry.dirs() == [tmp_path]
    (registry.folder() / "dirs.json").write_text("{broken")
    (registry.folder() / "daemon.json").write_text("[]")
    assert registry.running() is None and registry.dirs() == []
