"""The Weights & Biases monitor with the real SDK: offline, and against a local stand-in of the service."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import services

from rlmake.core.errors import UserError
from rlmake.core.jsonio import write_json
from rlmake.monitors import wandb_run, wandb_view

ENVS = {"orchestrator": {"train": {"source": [{"name": "a"}, {"name": "b"}]}, "eval": {"source": [{"name": "held"}]}}}
WRITER = """
import sys
from pathlib import Path
from types import SimpleNamespace
from rlmake import monitors
from rlmake.core.rundir import RunContext
from rlmake.monitors import wandb_run

wandb_run.PAUSE, wandb_run.TRIES_TO_CREATE, wandb_run.FINISH_SECONDS = 0.1, 2, 3.0
run, producer, offline, finished, steps = Path(sys.argv[1]), sys.argv[2], *(eval(word) for word in sys.argv[3:6])
table = SimpleNamespace(project="p", entity=None, name=None, group="g", tags=["t"], offline=offline)
ctx = RunContext(run, "rl-1", "my-run", 1, None, run / "configs" / "attempt_1", run / "logs")
m = monitors.setup(SimpleNamespace(file=None, wandb=table, prime=None), producer, ctx)
for step in steps:
    m.log(step, {f"{producer}/value": step / 2})
m.log(None, {"inference/pooled/num_requests_running/mean": 3.0})
if len(sys.argv) > 6:
    print("ready", flush=True)
    sys.stdin.readline()
    m.log(9, {"late": 1.0})
m.close(finished)
print("closed", flush=True)
"""


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    (folder / "configs" / "attempt_1" / "resolved").mkdir(parents=True)
    (folder / "configs" / "attempt_1" / "command.txt").write_text("rl @ 'my file.toml' --max-steps 3\n")
    return folder


def resolve(run: Path, **configs) -> None:
    for name, config in configs.items():
        write_json(run / "configs" / "attempt_1" / "resolved" / f"{name}.json", config)


def command(run: Path, producer: str, url: str | None, *, offline=False, finished=True, steps=(1, 2)):
    env = {"PATH": "/usr/bin:/bin", "HOME": str(run), "PYTHONPATH": ":".join(sys.path), "WANDB_API_KEY": "k" * 40}
    if url:
        env["WANDB_BASE_URL"] = url
    return [sys.executable, "-c", WRITER, str(run), producer, repr(offline), repr(finished), repr(list(steps))], env


def write(run: Path, producer: str, url: str | None, **given):
    words, env = command(run, producer, url, **given)
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)


def test_roles(run):
    resolved = run / "configs" / "attempt_1" / "resolved"
    assert wandb_run.role("trainer", resolved) == wandb_run.Role(shared=False, primary=True, finisher=True)
    resolve(run, sft={})
    assert not wandb_run.role("trainer", resolved).shared
    resolve(run, orchestrator={})
    assert wandb_run.role("trainer", resolved) == wandb_run.Role(shared=True, primary=True, finisher=False)
    assert wandb_run.role("orch", resolved) == wandb_run.Role(shared=True, primary=False, finisher=True)
    (resolved / "sft.json").unlink()
    resolve(run, trainer={})
    assert wandb_run.role("orch", resolved) == wandb_run.Role(shared=True, primary=True, finisher=True)
    assert wandb_run.role("trainer", resolved) == wandb_run.Role(shared=True, primary=False, finisher=False)


def test_offline_writes_a_run_of_one_process(run):
    resolve(run, sft={"max_steps": 3})
    done = write(run, "trainer", None, offline=True)
    assert done.returncode == 0, done.stderr
    assert list(run.rglob("run-rl-1.wandb")), "the SDK's own record, to be sent by `wandb sync`"


def test_offline_is_refused_where_several_processes_write(run):
    resolve(run, orchestrator={}, trainer={})
    done = write(run, "orch", None, offline=True)
    assert "monitors.wandb.offline: true does not work" in done.stderr


def test_several_processes_write_one_run(run):
    """Created by the orchestrator, joined by the trainer, which tries until it is there; ended by the last word."""
    resolve(run, orchestrator={"max_steps": 3, **ENVS["orchestrator"]}, trainer={"max_steps": 3})
    with services.serving(services.Wandb(refuse=1)) as service:
        for producer in ("orch", "trainer", "orch"):
            done = write(run, producer, service.url, finished=producer == "orch" and bool(service.ends()))
            assert done.returncode == 0, done.stderr
            if producer == "orch" and len(service.ends()) == 1:
                assert service.ends() == [1], "an orchestrator that was stopped is no finished run"
        rows = service.history()
        runs = service.runs()
    assert service.ends() == [1, 0] and {run["name"] for run in runs} == {"rl-1"}
    first = next(run for run in runs if run["displayName"])
    assert first["displayName"] == "my-run" and first["tags"] == ["t"] and first["groupName"] == "g"
    assert json.loads(first["config"])["orchestrator"]["value"]["max_steps"] == 3
    values = [(row["step"], key, row[key]) for row in rows for key in row if key.endswith("/value")]
    assert values == [(s, f"{p}/value", s / 2) for p in ("orch", "trainer", "orch") for s in (1, 2)]
    assert {row.get("inference/pooled/num_requests_running/mean") for row in rows} == {None, 3.0}
    assert len(service.views) == 1, "a second start makes no second view"
    assert any("rl" in str(run["program"]) for run in runs)


def test_the_view_follows_the_environments(run, monkeypatch, tmp_path):
    wanted = wandb_view.sections(ENVS)
    assert list(wanted) == [section for section in wandb_view.names.SECTIONS if section in wanted]
    assert {"reward/all/mean", "reward/a/mean", "reward/b/mean"} <= set(wanted["train"])
    assert any(name.startswith("eval/held/") for name in wanted["eval"])
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setenv("HOME", str(tmp_path))
    other = {"orchestrator": {"train": {"source": [{"name": "c"}]}}}
    with services.serving(services.Wandb()) as service:
        monkeypatch.setenv("WANDB_BASE_URL", service.url)
        made = [wandb_view.ensure("me", "p", each) for each in (ENVS, ENVS, other, ENVS, other)]
    assert made == ["overview", "overview", "overview-v2", "overview", "overview-v2"] and len(service.views) == 2
    assert wandb_view.shown(service.views[0]["spec"]) == wanted
    assert wandb_view.shown("{}") == {} and wandb_view.shown("no json") == {}


def test_a_start_that_fails_is_one_line(run, monkeypatch):
    with services.serving(services.Wandb(refuse=99)) as service:
        done = write(run, "eval", service.url)
    assert done.returncode != 0 and "UserError: monitors.wandb: can't open the run after 2 tries" in done.stderr
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"pip install 'rlmake\[wandb\]'"):
        wandb_run.WandbMonitor(SimpleNamespace(offline=True), "eval", SimpleNamespace())


def test_a_service_that_goes_away_holds_up_nothing(run):
    """The SDK alone would wait for it without end."""
    resolve(run, sft={})
    with services.serving(services.Wandb()) as service:
        words, env = command(run, "trainer", service.url)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen([*words, "wait"], env=env, text=True, **pipes)
        assert "ready\n" in iter(process.stdout.readline, "")
    try:
        assert "closed" in process.communicate("\n", timeout=100)[0] and process.returncode == 0
    finally:
        process.kill()
    assert list(run.rglob("run-rl-1.wandb")), "what was not sent is there for `wandb sync`"
