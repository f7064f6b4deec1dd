"""Attempts, the used-run guard, --clean, the lock."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlmake.config import EvalConfig, RLConfig, SFTConfig, parse
from rlmake.config.shared import RunConfig
from rlmake.core.errors import ConfigError, RunFailed, UserError
from rlmake.launch import direct, evaluate, rundir, train
from rlmake.launch.attempt import allocate, record
from rlmake.launch.inputs import check_inputs
from rlmake.launch.resume import link_checkpoints


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("PRL_ATTEMPT_CONFIG_DIR", "PRL_ATTEMPT_LOG_DIR", "NEVER_CLEAN", "PRL_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


def make(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_attempt_is_one_more_than_any_folder_of_either_kind(tmp_path):
    run = tmp_path / "run"
    assert allocate(run).number == 1
    (run / "logs" / "attempt_9").mkdir()
    (run / "configs" / "attempt_10x").mkdir()
    attempt = allocate(run)
    assert attempt.number == 10
    assert attempt.config_dir == run / "configs" / "attempt_10" and attempt.log_dir.is_dir()
    for folder in ("configs", "logs"):
        assert os.readlink(run / folder / "latest") == "attempt_10", "relative, so that the directory can be moved"


def test_attempt_is_inherited_by_a_launcher_inside_a_launch(tmp_path, monkeypatch):
    run = tmp_path / "run"
    allocate(run)
    monkeypatch.setenv("PRL_ATTEMPT_CONFIG_DIR", str(run / "configs" / "attempt_1"))
    with pytest.raises(UserError, match="must be set together"):
        allocate(run)
    monkeypatch.setenv("PRL_ATTEMPT_LOG_DIR", str(run / "logs" / "attempt_1"))
    assert allocate(run).number == 1
    monkeypatch.setenv("PRL_ATTEMPT_LOG_DIR", str(run / "logs" / "attempt_2"))
    with pytest.raises(UserError, match="end in one attempt_<n>"):
        allocate(run)


def test_command_replays_through_a_shell(tmp_path):
    hostile = [
        "it's",
        "a;touch PWNED",
        "$(touch P2)",
        "naïve-🧪",
        "-x",
        "a{b}",
        "two words",
        'dq"',
        "back\\slash",
        "*",
        "",
    ]
    attempt = allocate(tmp_path / "run dir")
    show = [sys.executable, "-c", "import sys; print(ascii(sys.argv[1:]))"]
    record(attempt, "rl", [*show, *hostile], [])
    command = (attempt.config_dir / "command.txt").read_text()
    output = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert output.strip() == ascii(hostile)
    assert shlex.split(command)[3:] == hostile
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run dir"], "no stray file"


def test_the_command_of_an_evaluation_is_none_of_the_shells(tmp_path):
    attempt = allocate(tmp_path / "run")
    program = make(tmp_path / "bin/eval", "#!/bin/sh\necho ran $@\n")
    program.chmod(0o755)
    record(attempt, "eval", ["eval", "@", "suite.toml"], [])
    command, path = (attempt.config_dir / "command.txt").read_text(), f"{program.parent}:{os.environ['PATH']}"
    done = subprocess.run(command, shell=True, env=os.environ | {"PATH": path}, capture_output=True, text=True)
    assert done.stdout == "ran @ suite.toml\n", done.stderr


def test_inputs_are_kept_verbatim(tmp_path):
    one, two = make(tmp_path / "a.toml", "x = 1  # why\n"), make(tmp_path / "b.toml", "y = 2\n")
    attempt = allocate(tmp_path / "run")
    record(attempt, "rl", ["rl"], [one])
    assert (attempt.config_dir / "rl.toml").read_bytes() == one.read_bytes()
    record(attempt, "rl", ["rl"], [one, two])
    assert (attempt.config_dir / "rl.toml").read_text() == f"# @ {one}\nx = 1  # why\n\n# @ {two}\ny = 2\n"


def test_guard(tmp_path):
    run = tmp_path / "run"
    rundir.check_free(run, None, resume=False)
    allocate(run)
    rundir.check_free(run, None, resume=False)  # what a dry run leaves does not count
    make(run / "launcher" / "lock")
    rundir.check_free(run, None, resume=False)
    make(run / "logs" / "attempt_1" / "trainer.log")
    with pytest.raises(UserError, match=r"already holds a run \(logs\); use --resume, --clean"):
        rundir.check_free(run, None, resume=False)
    rundir.check_free(run, None, resume=True)


def test_guard_looks_at_an_external_checkpoint_folder(tmp_path):
    external = make(tmp_path / "ckpt" / "step_3" / "COMPLETE").parent.parent
    with pytest.raises(UserError, match=r"ckpt\.output_dir: .* is not empty"):
        rundir.check_free(tmp_path / "run", external, resume=False)


def test_guard_leaves_the_builds_folders_alone(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "logs").symlink_to(tmp_path)
    with pytest.raises(UserError, match="belongs to the build"):
        rundir.check_free(run, None, resume=True)


@pytest.fixture
def used(tmp_path):
    run = tmp_path / "outputs" / "run"
    allocate(run)
    rundir.mark(run, "rl", "run")
    make(run / "checkpoints" / "step_1" / "COMPLETE")
    return run


def test_clean_deletes_a_direct_run(used):
    rundir.clean(used, used.parent)
    assert rundir.used(used) is None and os.listdir(used) == ["launcher"]


def test_clean_keeps_the_lock_of_a_launcher(used):
    rundir.clean(used, used.parent)
    with rundir.Held(used), pytest.raises(RunFailed, match=f"in use by launcher pid {os.getpid()}"):
        rundir.Held(used)


@pytest.mark.parametrize("case", ["never", "outside", "same", "link", "no marker", "inner link", "foreign checkpoints"])
def test_clean_refuses(used, tmp_path, monkeypatch, case):
    output, target, external = used.parent, used, None
    if case == "never":
        monkeypatch.setenv("NEVER_CLEAN", "1")
    elif case == "outside":
        output = make(tmp_path / "other" / "x").parent
    elif case == "same":
        output = used
    elif case == "link":
        target = used.parent / "alias"
        target.symlink_to(used)
    elif case == "no marker":
        (used / "run.json").unlink()
    elif case == "inner link":
        (used / "weights").symlink_to(tmp_path)
    else:
        external = make(tmp_path / "mine" / "thesis.tex").parent
    with pytest.raises(UserError, match="--clean: refused"):
        rundir.clean(target, output, external)
    assert (used / "checkpoints" / "step_1" / "COMPLETE").exists()


def test_clean_takes_external_checkpoints_along(used, tmp_path):
    external = make(tmp_path / "ckpt" / "step_3" / "COMPLETE").parent.parent
    rundir.clean(used, used.parent, external)
    assert not external.exists()


def test_clean_takes_the_link_that_a_run_made_to_its_external_checkpoints(used, tmp_path):
    shutil.rmtree(used / "checkpoints")
    external = make(tmp_path / "ckpt" / "step_3" / "COMPLETE").parent.parent
    link_checkpoints(used, str(external))
    for named in (None, tmp_path / "other"):
        with pytest.raises(UserError, match=f"checkpoints is a link to {external}; give that as ckpt.output_dir"):
            rundir.clean(used, used.parent, named)
    assert (external / "step_3" / "COMPLETE").exists()
    rundir.clean(used, used.parent, external)
    assert rundir.used(used) is None and not external.exists()


def test_a_run_that_goes_on_is_named_as_the_reason(used, tmp_path):
    shutil.rmtree(used / "checkpoints")
    link_checkpoints(used, str(make(tmp_path / "ckpt" / "step_3" / "COMPLETE").parent.parent))
    (used / "weights").symlink_to(tmp_path)
    with rundir.Held(used):
        for refuse in (
            lambda: rundir.clean(used, used.parent),
            lambda: rundir.check_clean(used, used.parent),
            lambda: rundir.check_free(used, None, resume=False),
        ):
            with pytest.raises(RunFailed, match=f"in use by launcher pid {os.getpid()}"):
                refuse()
    assert (used / "run.json").exists() and (tmp_path / "ckpt" / "step_3" / "COMPLETE").exists()


def test_a_start_that_failed_at_once_leaves_nothing(tmp_path):
    run = tmp_path / "outputs" / "run"
    with pytest.raises(UserError), rundir.Held(run):
        raise UserError("port 8000 is already in use")
    assert os.listdir(tmp_path / "outputs") == []
    with pytest.raises(UserError), rundir.Held(run):
        make(run / "logs" / "attempt_1" / "trainer.log")
        raise UserError("later")
    assert sorted(os.listdir(run)) == ["launcher", "logs"]


def test_a_lock_that_was_taken_away_is_made_again(tmp_path, monkeypatch):
    """The other launcher had opened the file that the first one, failing, removes."""
    run = tmp_path / "run"
    plain = rundir._lock

    def late(file, run_dir):
        monkeypatch.setattr(rundir, "_lock", plain)
        shutil.rmtree(run)
        plain(file, run_dir)

    monkeypatch.setattr(rundir, "_lock", late)
    with rundir.Held(run), pytest.raises(RunFailed, match="in use"):
        rundir.Held(run)


def test_inputs_that_are_not_there_or_not_readable(tmp_path, monkeypatch):
    rows = make(tmp_path / "rows.jsonl")

    def fault(**data) -> str:
        given = {"name": str(rows), **data}
        config = parse(SFTConfig, {**raw_sft(tmp_path), "data": {**given, "batch_size": 8}})
        with pytest.raises(ConfigError) as refused:
            check_inputs(config, [], built=False)
        return str(refused.value)

    assert fault(name="none/of/it.jsonl") == "data.name: none/of/it.jsonl: no such file or directory"
    monkeypatch.chdir(tmp_path)
    for link, target in (("gone", "nowhere"), ("round", "round")):
        Path(link).symlink_to(target)
        assert fault(name=link) == f"data.name: {link}: a link that leads nowhere"
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != rows)
    assert fault() == f"data.name: {rows}: may not be read"


def test_a_file_that_built_data_does_not_have(tmp_path, monkeypatch):
    """Data that is there is not to be built; what is not built yet is."""
    stored = "what is in the store, with: snakemake -c all"
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "outputs/t/data/data/train.jsonl")
    for name, said in (
        ("outputs/t/data/data/nope.jsonl", "{}: no such file in outputs/t/data/data"),
        ("outputs/u/data/nope.jsonl", f"{{}} is not there; build it, or link {stored} outputs/u/data"),
    ):
        config = parse(SFTConfig, {**raw_sft(tmp_path), "data": {"name": name, "batch_size": 8}})
        with pytest.raises(ConfigError) as refused:
            check_inputs(config, [])
        assert str(refused.value) == f"data.name: {said.format(name)}"
    config = parse(SFTConfig, {**raw_sft(tmp_path), "data": {"name": "outputs/t/data/data", "batch_size": 8}})
    check_inputs(config, [])


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"loss": "nope.mod.fn"}, "trainer.loss.import_path: 'nope.mod.fn': no module 'nope'"),
        ({"loss": "nope.py:fn"}, "trainer.loss.import_path: no file nope.py"),
        ({"taskset": "reverse-txt"}, "env.taskset.id: taskset 'reverse-txt': no module 'reverse_txt'"),
        ({"taskset": "reverse-txt"}, "did you mean 'reverse-text'?"),
        ({"taskset": "owner/my-own@1"}, None),
        ({"loss": "my_own.fn", "taskset": "my-own"}, None),
    ],
)
def test_code_that_is_not_there_is_said_before_anything_starts(tmp_path, monkeypatch, changes, said):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "my_own.py", "")
    sources = [{"name": "one", "env": {"taskset": {"id": changes.get("taskset", "reverse-text")}}}]
    table = {
        "model": {"name": "a/b"},
        "deployment": {"num_train_gpus": 0, "num_infer_gpus": 0},
        "orchestrator": {"renderer": {"name": "qwen3"}, "train": {"source": sources}},
        "trainer": {"loss": {"type": "custom", "import_path": changes.get("loss", "rlmake.models.chatml.x")}},
    }
    config = parse(RLConfig, {**table, "inference": {}})
    if said is None:
        check_inputs(config, [], built=False)
        return
    with pytest.raises(ConfigError) as refused:
        check_inputs(config, [], built=False)
    assert said in str(refused.value)


def test_rows_that_an_environment_cannot_read_are_said_before_anything_starts(tmp_path):
    source = {
        "env": {"taskset": {"id": "reverse-text", "path": str(make(tmp_path / "rows.jsonl", '{"messages": []}'))}}
    }
    elsewhere = {**source, "name": "far", "serve": {"address": "tcp://host:1"}}
    said = f"env.taskset.path: {tmp_path}/rows.jsonl: row 1: expected an object with text in 'prompt' and 'target'; "
    sft = parse(SFTConfig, {**raw_sft(tmp_path), "inference": {}, "eval": {"source": [elsewhere, source]},
                            "data": {"name": "a.jsonl", "batch_size": 8}})  # fmt: skip
    model, renderer = {"name": str(tmp_path / "model")}, {"name": "qwen3"}
    rl = parse(RLConfig, {"model": model, "inference": {}, "deployment": {"num_train_gpus": 0, "num_infer_gpus": 0},
                          "orchestrator": {"renderer": renderer, "train": {"source": [source]},
                                           "eval": {"source": [source]}}})  # fmt: skip
    suite = parse(EvalConfig, {"source": [source], "client": {"base_url": "http://127.0.0.1:9/v1"}})
    for start, keys in (
        (lambda: train.preflight(sft), ["eval.source.1"]),
        (lambda: train.preflight(rl), ["orchestrator.train.source.0", "orchestrator.eval.source.0"]),
        (lambda: evaluate.run(suite, None, tmp_path / "out", identity={}), ["source.0"]),
    ):
        with pytest.raises(ConfigError) as refused:
            start()
        assert str(refused.value).splitlines() == [f"{key}.{said}it has 'messages'" for key in keys]
    assert not list((tmp_path / "out").glob("configs*"))


def raw_sft(tmp_path: Path) -> dict:
    make(tmp_path / "model" / "config.json", "{}")
    return {
        "model": {"name": str(tmp_path / "model")},
        "deployment": {"num_train_gpus": 0},
        "renderer": {"name": "qwen3"},
        "max_steps": 2,
    }


def test_run_id_is_kept_over_attempts(tmp_path, monkeypatch):
    run = tmp_path / "run"
    first = rundir.mark(run, "rl", "run")
    monkeypatch.setenv("PRL_RUN_ID", "given")
    assert rundir.mark(run, "rl", "run") == first
    assert rundir.mark(tmp_path / "other", "rl", "other") == "given"


def test_a_dry_run_keeps_out_of_what_a_build_made_and_minds_clean(tmp_path):
    """It writes configs/, so it is refused wherever the run itself would be."""
    run = tmp_path / "out" / "built"
    run.mkdir(parents=True)
    store = tmp_path / "store"
    (store / "configs").mkdir(parents=True)
    (run / "configs").symlink_to(store / "configs")
    with pytest.raises(UserError, match="belongs to the build"):
        rundir.check_free(run, None, resume=False)
    with pytest.raises(UserError, match="--clean: refused"):
        rundir.check_clean(run, tmp_path / "out")
    other = tmp_path / "out" / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"no run\.json"):
        rundir.check_clean(other, tmp_path / "out")
    assert (other / "notes.txt").exists()


@pytest.mark.parametrize(
    "name, message",
    [
        ("reverse-text/rl", "run.name: 'reverse-text/rl' belongs to the build"),
        ("reverse-text", "run.name: 'reverse-text' belongs to the build"),
        ("mine/weights", "run.name: 'weights' is reserved"),
    ],
)
def test_a_direct_run_takes_no_place_of_the_build(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "experiments" / "reverse-text" / "rl.toml")
    with pytest.raises(ConfigError) as refused:
        direct.check_name(EvalConfig.model_construct(run=RunConfig(name=name), output_dir="outputs"))
    assert str(refused.value).startswith(message)
    direct.check_name(EvalConfig.model_construct(run=RunConfig(name="mine"), output_dir="outputs"))


def test_clean_and_resume_exclude_each_other(tmp_path, monkeypatch):
    """`--clean` would delete what `--resume` goes on from; a fork of another run is no such case."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "outputs" / "x"
    make(run / "run.json", "{}")
    kept = make(run / "checkpoints" / "step_5" / "COMPLETE", "{}")
    base = {"model": {"name": str(tmp_path)}, "data": {"name": str(tmp_path)}, "renderer": {"name": "qwen3"}}
    base |= {"run": {"name": "x"}, "clean": True}
    for resume in ({}, {"dir": "outputs/x/checkpoints/step_5"}):
        cfg = parse(SFTConfig, {**base, "deployment": {"num_train_gpus": 0}, "resume": resume})
        with pytest.raises(ConfigError, match="resume: --clean would delete what is to be resumed from"):
            direct.launch("sft", cfg, ["sft"], [])
        assert kept.is_file()


def test_a_start_that_fails_leaves_no_folders(tmp_path):
    run = tmp_path / "outputs" / "a" / "b"
    with pytest.raises(UserError), rundir.made(run):
        assert run.is_dir()
        raise UserError("no")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError), rundir.made(run):
        make(run / "logs" / "trainer.log")
        raise UserError("later")
    assert (run / "logs" / "trainer.log").is_file()
    with pytest.raises(UserError), rundir.made(run.parent / "c"):
        raise UserError("no")
    assert run.is_dir() and not (run.parent / "c").exists()
