"""The console scripts: speed to the first error, --dry-run, one line per mistake."""

import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
RL = """
max_steps = 3
[model]
name = "some/model"
[orchestrator]
batch_size = 8
renderer.name = "qwen3"
[orchestrator.train]
group_size = 4
[[orchestrator.train.source]]
name = "reverse-text"
env.taskset.id = "reverse-text"
env.taskset.path = "rows.jsonl"
[[orchestrator.train.source]]
name = "elsewhere"
env.taskset.id = "reverse-text"
serve.address = "tcp://127.0.0.1:9"
[inference]
[deployment]
num_train_gpus = 0
num_infer_gpus = 0
"""


def call(*argv: str, cwd: Path, **env: str) -> subprocess.CompletedProcess:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PRL_", "NEVER_CLEAN"))} | env
    return subprocess.run([BIN / argv[0], *argv[1:]], cwd=cwd, env=environ, capture_output=True, text=True, timeout=150)


@pytest.fixture
def project(tmp_path):
    (tmp_path / "rl.toml").write_text(RL)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "abc", "target": "cba"}\n')
    return tmp_path


@pytest.mark.parametrize("argv", [["rl", "--help"], ["sft", "--help"], ["eval", "--help"], ["inference", "--help"]])
def test_help_is_fast_and_needs_no_torch(project, argv):
    code = (
        "import sys, importlib.abc\n"
        "class No(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, *_):\n"
        "        assert name.partition('.')[0] not in ('torch', 'transformers', 'datasets', 'verifiers'), name\n"
        "sys.meta_path.insert(0, No())\n"
        f"sys.argv = {argv!r}\n"
        f"from rlmake.cli.main import {argv[0]}; {argv[0]}()"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run([sys.executable, "-c", code], cwd=project, capture_output=True, text=True)
    assert done.returncode == 0 and "usage" in done.stdout.lower(), done.stderr
    # CPU time, as the tests share their cores: 0.6 s on an idle one
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 1.5


@pytest.mark.parametrize(
    ("argv", "lines"),
    [
        (["--max-stepz", "3"], ["max_stepz", "did you mean 'max_steps'"]),
        (["--run.name", "a;touch PWNED"], ["run.name", "no safe name"]),
        (["--run.name", "../x"], ["run.name"]),
        (["--run.name=-x"], ["run.name"]),
        (["--run.name", "naïve-🧪"], ["run.name"]),
        (["--orchestrator.batch-size", "7"], ["batch_size", "7 is not a multiple of group_size = 4"]),
        (["--model.name", "outputs/m/weights"], ["model.name", "snakemake -c all outputs/m/weights"]),
        (["--resume"], ["resume: needs the run to go on with: give its run.name"]),
        (["--resume", "--run.name", "r"], ["outputs/r/checkpoints: no complete checkpoint to resume from"]),
        (["--resume.step", "3", "--run.name", "r"], ["outputs/r/checkpoints/step_3"]),
        (["--dry-run", "--resume.step", "3", "--run.name", "r"], ["cannot resume from outputs/r/checkpoints/step_3"]),
        (
            ["--dry-run", "--resume.dir", "other/checkpoints/step_77"],
            ["other/checkpoints/step_77", "steps there: none"],
        ),
    ],
)
def test_mistakes_are_one_line_each(project, argv, lines):
    done = call("rl", "@", "rl.toml", *argv, cwd=project)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("error: "), done.stderr
    assert all(text in done.stderr for text in lines), done.stderr
    assert not (project / "PWNED").exists()


def test_dry_run_writes_what_a_launch_would_and_starts_nothing(project):
    done = call("rl", "@", "rl.toml", "--dry-run", "--run.name", "try", cwd=project, PRL_OUTPUT_DIR="out")
    assert done.returncode == 0, done.stderr
    attempt = project / "out" / "try" / "configs" / "latest"
    assert (attempt / "command.txt").read_text() == "rl @ rl.toml --dry-run --run.name try\n"
    assert (attempt / "rl.toml").read_text() == RL
    resolved = {p.relative_to(attempt / "resolved").as_posix() for p in (attempt / "resolved").rglob("*.json")}
    assert resolved == {"trainer.json", "orchestrator.json", "inference.json", "envs/train/reverse-text.json"}
    trainer = json.loads((attempt / "resolved" / "trainer.json").read_text())
    assert trainer["output_dir"] == str(project / "out" / "try") and trainer["max_steps"] == 3
    assert not any((project / "out" / "try" / "logs").rglob("*.log"))
    again = call("rl", "@", "rl.toml", "--dry-run", "--run.name", "try", cwd=project, PRL_OUTPUT_DIR="out")
    assert again.returncode == 0 and os.readlink(project / "out/try/configs/latest") == "attempt_2"


def test_a_used_directory_is_refused(project):
    (project / "outputs" / "mine" / "logs" / "attempt_1").mkdir(parents=True)
    (project / "outputs" / "mine" / "logs" / "attempt_1" / "trainer.log").write_text("x")
    done = call("rl", "@", "rl.toml", "--run.name", "mine", cwd=project)
    assert done.returncode == 2 and "already holds a run (logs)" in done.stderr
    done = call("rl", "@", "rl.toml", "--run.name", "mine", "--clean", cwd=project, NEVER_CLEAN="1")
    assert done.returncode == 2 and "NEVER_CLEAN" in done.stderr


@pytest.mark.parametrize("argv", [["rl", "@", "rl.toml", "--inference.server.port"], ["inference", "--server.port"]])
def test_a_configured_port_in_use_is_one_clear_line(project, argv):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = call(*argv, str(port), cwd=project)
    assert done.returncode == 2 and not any(project.rglob("attempt_1")), (
        "a launch that never began leaves the name free"
    )
    assert not list(project.glob("outputs/*")), "nor anything else"
    assert done.stderr.splitlines()[-1].endswith(
        f"server.port: 127.0.0.1:{port} is already in use; choose another port, or 0 for any free one"
    )


def test_a_dry_run_of_an_evaluation_looks_for_what_it_resumes(project):
    suite = '[[source]]\nenv.taskset.id = "reverse-text"\n[inference]\n[deployment]\nnum_infer_gpus = 0\n'
    (project / "suite.toml").write_text(suite + '[renderer]\nname = "qwen3"\n')
    argv = ["eval", "@", "suite.toml", "-m", "some/model", "--dry-run", "--run.name", "e"]
    done = call(*argv, "--resume.step", "5", cwd=project)
    assert done.returncode == 2, done.stderr
    assert done.stderr == "error: resume: outputs/e/checkpoints/eval holds no evaluation to go on from\n"
    assert call(*argv, cwd=project).returncode == 0


def test_a_server_without_its_model_is_refused_before_heavy_imports(project):
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = call("inference", "--vllm.model", "/nope", cwd=project)
    assert (done.returncode, done.stderr) == (2, "error: vllm.model: /nope: no such file or directory\n")
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 2.0


def test_a_missing_file_is_said_before_anything_starts(tmp_path, monkeypatch):
    """One line with the key, and no run directory."""
    from rlmake.config import SFTConfig, parse
    from rlmake.core.errors import ConfigError
    from rlmake.launch import direct

    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    raw = {
        "model": {"name": "./folder"},
        "data": {"name": "nothere.jsonl"},
        "renderer": {"name": "qwen3"},
        "max_steps": 1,
        "deployment": {"num_train_gpus": 0},
        "run": {"name": "x"},
    }
    with pytest.raises(ConfigError) as error:
        direct.launch("sft", parse(SFTConfig, raw), ["sft"], [])
    assert sorted(str(error.value).splitlines()) == [
        "data.name: nothere.jsonl: no such file or directory",
        "model.name: ./folder: not a model directory, it has no config.json",
    ]
    assert not (tmp_path / "outputs").exists()
    (tmp_path / "a.bin").write_bytes(b"x")
    (tmp_path / "empty").mkdir()
    for model, data, said in (
        (
            "./a.bin",
            "./empty",
            ["data.name: ./empty: an empty folder", "model.name: ./a.bin: a file; expected"],
        ),
        ("", "", ["data.name: is empty; expected a file", "model.name: is empty; expected a model"]),
    ):
        with pytest.raises(ConfigError) as error:
            direct.launch(
                "sft", parse(SFTConfig, raw | {"model": {"name": model}, "data": {"name": data}}), ["sft"], []
            )
        lines = sorted(str(error.value).splitlines())
        assert len(lines) == 2 and all(map(str.startswith, lines, said)), lines


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["plan", "--jsn"], "rlmake plan: --jsn: unknown option; did you mean '--json'?"),
        (["gc", "--dryrun"], "rlmake gc: --dryrun: unknown option; did you mean '--dry-run'?"),
        (["why"], "rlmake why: the following arguments are required: targets"),
    ],
)  # fmt: skip
def test_a_wrong_option_of_a_verb_is_one_line_with_the_nearest_name(project, argv, said):
    done = call("rlmake", *argv, cwd=project)
    assert done.returncode == 2 and done.stderr == f"error: {said}; rlmake {argv[0]} --help shows all\n"
