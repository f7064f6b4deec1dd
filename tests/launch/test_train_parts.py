"""What a launch decides before it starts anything: where it resumes, who gets which GPU, what the display shows."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlmake import checkpoint
from rlmake.config import SFTConfig
from rlmake.config.shared import ResumeConfig
from rlmake.core import procs
from rlmake.core.errors import ConfigError, RunFailed, UserError
from rlmake.core.rundir import RunContext, step_dir
from rlmake.launch import train
from rlmake.launch.attempt import allocate
from rlmake.launch.inputs import check_frozen
from rlmake.launch.placement import environment, gpu_ids, require_gpus, torchrun
from rlmake.launch.progress import Display, Follower
from rlmake.launch.resume import Start, link_checkpoints, starting_point


def context(run: Path) -> RunContext:
    return RunContext(run, "id", "name", 2, "f" * 16, run / "configs" / "attempt_2", run / "logs" / "attempt_2")


def complete(run: Path, step: int) -> Path:
    """A whole checkpoint, by the room's own functions."""
    folder = step_dir(run, step)
    (folder / "trainer").mkdir(parents=True)
    (folder / "trainer" / "state.json").write_text("{}")
    checkpoint.seal(folder, "trainer")
    checkpoint.publish(run, step, ("trainer",), policy_version=step, world_size=1, ledger=None, ctx=context(run))
    return folder


def test_auto_takes_the_newest_whole_step_else_the_fork_else_the_start(tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    fork = complete(other, 4)
    assert starting_point(run, "auto", None) == Start()
    assert starting_point(run, "auto", str(fork)) == Start(4, fork=fork)
    for step in (9, 90, 100):
        complete(run, step)
    (step_dir(run, 100) / "trainer" / "state.json").write_text("damaged")
    assert starting_point(run, "auto", str(fork)) == Start(90)


def test_asked_resume(tmp_path):
    run = tmp_path / "run"
    for step in (10, 20):
        complete(run, step)
    assert starting_point(run, ResumeConfig(), None) == Start(20)
    assert starting_point(run, ResumeConfig(step=10), None) == Start(10, explicit=True)
    with pytest.raises(UserError, match="step_15"):
        starting_point(run, ResumeConfig(step=15), None)
    with pytest.raises(UserError, match="lies in the run itself"):
        starting_point(run, ResumeConfig(dir=str(step_dir(run, 10))), None)
    assert starting_point(run, None, None) == Start()


def test_a_fork_holds_the_checkpoint_that_it_begins_from(tmp_path, monkeypatch):
    """Retention of the other run leaves it alone while the fork runs, and is free again afterwards."""
    other, seen = tmp_path / "other", []
    folder = complete(other, 4)
    complete(other, 6)
    complete(other, 8)

    def running(*_):
        seen.append((checkpoint.is_read(folder), checkpoint.retain(other, keep_last=1)))
        raise UserError("enough")

    monkeypatch.setattr(train, "preflight", running)
    cfg = SFTConfig(resume={"dir": str(folder)}, max_steps=9)
    with pytest.raises(UserError, match="enough"):
        train.run("sft", cfg, tmp_path / "run", argv=[], files=[], resume=cfg.resume, fingerprint=None, run_name="fork")
    assert seen == [(True, [6])] and not checkpoint.is_read(folder)
    assert checkpoint.retain(other, keep_last=1) == [4]


def test_the_attempt_is_said_where_the_file_monitor_writes_and_nowhere_without_one(tmp_path, monkeypatch):
    def stop(_):
        raise UserError("enough")

    monkeypatch.setattr(train, "preflight", lambda _: None)
    monkeypatch.setattr(train, "place", stop)
    for name, file in {"none": None, "usual": {}, "elsewhere": {"path": str(tmp_path / "rows")}}.items():
        cfg = SFTConfig(monitors={"file": file}, max_steps=9)
        with pytest.raises(UserError, match="enough"):
            given = {"argv": [], "files": [], "resume": None, "fingerprint": None, "run_name": name}
            train.run("sft", cfg, tmp_path / name, **given)
    found = [path.parent for path in sorted(tmp_path.rglob("metrics.jsonl"))]
    assert found == [tmp_path / "rows", tmp_path / "usual" / "monitors" / "file"]
    assert not (tmp_path / "none" / "monitors").exists()


def test_the_processes_are_told_a_definite_checkpoint(tmp_path):
    assert Start().config() is None
    assert Start(7).config() == ResumeConfig(step=7)
    fork = Start(7, fork=tmp_path / "step_7")
    assert fork.config() == ResumeConfig(dir=str(tmp_path / "step_7")) and fork.own_step == 0


def test_external_checkpoints_are_a_link(tmp_path):
    run, external = tmp_path / "run", tmp_path / "disk" / "ckpt"
    run.mkdir()
    link_checkpoints(run, str(external))
    link_checkpoints(run, str(external))
    complete(run, 3)
    assert (external / "step_3" / "COMPLETE").is_file() and checkpoint.newest(run) == 3
    with pytest.raises(UserError, match=f"is a link to {external}; name that folder"):
        link_checkpoints(run, str(tmp_path / "elsewhere"))


@pytest.mark.parametrize(
    ("visible", "inference", "trainer"),
    [(None, ["0", "1"], ["2"]), ("4,5,7", ["4", "5"], ["7"]), ("a, b,c", ["a", "b"], ["c"])],
)
def test_inference_takes_the_first_gpus_and_the_trainer_the_next(monkeypatch, visible, inference, trainer):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_ids(2) == inference and gpu_ids(1, skip=2) == trainer and gpu_ids(0) == []


def test_too_few_visible_gpus_are_an_error(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(UserError, match="2 GPUs are wanted, CUDA_VISIBLE_DEVICES=3 shows 1"):
        gpu_ids(1, skip=1)


def test_environment_layers(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "13")
    monkeypatch.setenv("MINE", "kept")
    ctx = context(tmp_path)
    env = environment(ctx, {"A": "default", "B": "default"}, {"B": "user", "PRL_RUN_ID": "stolen"}, threads=2)
    assert (env["A"], env["B"], env["MINE"]) == ("default", "user", "kept")
    assert env["PRL_RUN_ID"] == env["WANDB_RUN_ID"] == "id" and env["CUDA_VISIBLE_DEVICES"] == ""
    assert env["OMP_NUM_THREADS"] == "2" and env["RLMAKE_FINGERPRINT"] == "f" * 16
    assert environment(ctx)["OMP_NUM_THREADS"] == "1", "what computes nothing takes no threads"
    assert RunContext.from_env(tmp_path).attempt == 1
    monkeypatch.setattr(os, "environ", env)
    assert RunContext.from_env(tmp_path) == ctx


def test_a_process_with_a_title_is_still_found(tmp_path):
    code = (
        "import setproctitle, time; setproctitle.setproctitle('PRL::Long' * 30); print(1, flush=True); time.sleep(60)"
    )
    env = environment(context(tmp_path))
    with subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE) as popen:
        popen.stdout.readline()
        found = procs.find("PRL_ATTEMPT_LOG_DIR", lambda value: value == str(context(tmp_path).log_dir))
        popen.kill()
    assert [one.pid for one in found] == [popen.pid]


def test_torchrun_uses_no_fixed_port(tmp_path):
    command = torchrun(2, [0, 1], tmp_path, "rlmake.trainer.rl", tmp_path / "trainer.json")
    assert "--standalone" in command and command[command.index("--nproc-per-node") + 1] == "2"
    assert command[command.index("--local-ranks-filter") + 1] == "0,1"


def test_a_claimed_port_is_held(tmp_path):
    with procs.claim_port() as held:
        port = held.getsockname()[1]
        with pytest.raises(UserError, match=rf"inference\.server\.port: 127\.0\.0\.1:{port} is already in use"):
            procs.claim_port(port=port, key="inference.server.port")
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass


@pytest.mark.parametrize("host", ["a..b", "203.0.113.7", "::zz", "a\0b"])
def test_a_host_that_is_not_here_is_named_by_its_own_key(host):
    for key, named in (("inference.server.port", "inference.server.host"), ("address", "address")):
        with pytest.raises(UserError, match=rf"^{named}: {re.escape(repr(host))}: .*expected an address of this"):
            procs.claim_port(host, key=key)


@pytest.mark.parametrize("case", ["with a checkpoint", "named", "without one", "diverged", "of the build"])
def test_a_run_that_failed_says_how_to_go_on(case, tmp_path, monkeypatch):
    """Where there is a checkpoint to go on from, and --resume is the way to do it; it needs the run's name."""
    stub, hinted = str(Path(__file__).with_name("stubs.py")), case in ("with a checkpoint", "named")

    def start(supervisor, components, cfg):
        command = [sys.executable, stub, "fail", "76" if case == "diverged" else "1"]
        supervisor.start("trainer", command, dict(os.environ), tmp_path / "trainer.log", final=True)

    monkeypatch.setattr(train, "_start_sft", start)
    monkeypatch.setattr(train, "preflight", lambda _: None)
    if case != "without one":
        complete(tmp_path / "run", 4)
    cfg = SFTConfig(max_steps=9, run={"name": "run"} if case == "named" else {})
    given = {"argv": [], "files": [], "resume": "auto", "run_name": "x"}
    with pytest.raises(RunFailed, match="ValueError: the reason") as failed:
        train.run("sft", cfg, tmp_path / "run", fingerprint="f" * 16 if case == "of the build" else None, **given)
    hint = f"the same command with --resume{'' if case == 'named' else ' --run.name run'} goes on behind step 4"
    assert (str(failed.value).splitlines()[-1] == hint) == hinted and ("--resume" in str(failed.value)) == hinted


def test_follower_gives_whole_lines_once(tmp_path):
    log = tmp_path / "x.log"
    follower = Follower(log)
    assert follower.lines() == []
    log.write_text("one\ntw")
    assert follower.lines() == ["one"]
    with open(log, "a") as file:
        file.write("o\nthree\n")
    assert follower.lines() == ["two", "three"] and follower.lines() == []


def test_display_in_a_build_shows_steps_and_warnings_only(tmp_path, capsys):
    log = tmp_path / "x.log"
    step = "[rank0] 12:00:01 SUCCESS trainer Step 1 | 1.0s | Loss 0.5"
    log.write_text(f"12:00:00 INFO    trainer loading\n{step}\n12:00:02 WARNING orchestrator nothing to train on\n")
    with Display("run", log, 0, 3, brief=True):
        pass
    brief = "run: trainer Step 1 | 1.0s | Loss 0.5\nrun: warning: orchestrator nothing to train on\n"
    assert capsys.readouterr().out == brief
    with Display("run", log, 0, 3, brief=False):
        pass
    assert capsys.readouterr().out == log.read_text()


def test_attempts_of_two_launches_at_once_differ(tmp_path):
    first = allocate(tmp_path)
    (tmp_path / "configs" / "attempt_2").mkdir()  # another launcher is at it, its log folder is not there yet
    assert (first.number, allocate(tmp_path).number) == (1, 3)


def test_gpus_that_are_not_there_are_said_in_one_line(monkeypatch):
    """And none are asked for on the CPU."""
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(()))
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    require_gpus(0)
    with pytest.raises(UserError, match="2 GPUs are wanted and this host has none") as error:
        require_gpus(2)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("part", "policy", "frozen", "other"),
    [
        ("teacher", {"a": 0, "b": 1}, {"a": 0, "b": 1, "c": 2}, None),
        ("teacher", {"a": 0, "b": 1, "c": 2}, {"a": 0, "b": 1}, "'c' has the id 2 in {policy}, none in {frozen}"),
        ("sampling.source", {"a": 0, "b": 1, "c": 2}, {"a": 0, "b": 1}, None),
        ("sampling.source", {"a": 0, "b": 1}, {"a": 1, "b": 0}, "'a' has the id 0 in {policy}, 1 in {frozen}"),
        ("sampling.source", {"a": 0}, None, None),
    ],
)
def test_a_frozen_model_must_know_the_tokens(tmp_path, part, policy, frozen, other):
    """What the policy writes the teacher reads; what a source writes the policy learns."""
    names = {}
    for name, tokens in (("policy", policy), ("frozen", frozen)):
        folder = tmp_path / name
        folder.mkdir()
        names[name] = str(folder)
        if tokens is not None:
            added = [{"content": "<end>", "id": 9}]
            (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": tokens}, "added_tokens": added}))
    model = SimpleNamespace(name=names["frozen"], base_url="http://x/v1")
    cfg = SimpleNamespace(
        tokenizer=SimpleNamespace(name=names["policy"]), frozen_models=lambda: [(f"train.algo.{part}", model)]
    )
    if other is None:
        check_frozen(cfg)
        return
    with pytest.raises(ConfigError, match=re.escape(other.format(**names))) as refused:
        check_frozen(cfg)
    assert f"orchestrator.train.algo.{part}.name" in str(refused.value)
