"""Submission by an entry point, without a cluster: script, template, the nodes' view, who is the job."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from rlmake.build import shared_folder
from rlmake.config import SFTConfig, parse
from rlmake.core import slurm
from rlmake.core.errors import ConfigError, UserError
from rlmake.core.jsonio import write_json
from rlmake.launch import door
from rlmake.launch.attempt import allocate

RAW = {
    "model": {"name": "m"},
    "data": {"name": "d.jsonl", "batch_size": 4},
    "renderer": {"name": "qwen3"},
    "deployment": {"type": "multi_node", "gpus_per_node": 0, "num_train_nodes": 2},
    "max_steps": 2,
    "clean": True,
}


def written(tmp_path: Path, capsys, **table) -> tuple[str, str]:
    """`(script, what was printed)` of a dry run in a folder whose name needs quoting."""
    run_dir = tmp_path / "it's here" / "a-run"
    cfg = parse(SFTConfig, {**RAW, "slurm": {"project_dir": str(tmp_path), **table}})
    write_json(run_dir / "run.json", {"run_id": "known"})
    door.submit("sft", cfg, run_dir, "a-run", allocate(run_dir), ["--nodes=2", "--nice"], dry_run=True)
    return (run_dir / "launcher" / "sft.sbatch").read_text(), capsys.readouterr().out


def test_the_script_is_valid_and_runs_the_entry_point_again(tmp_path, capsys):
    """The shell takes it, names are quoted, the resolved file neither cleans nor dry-runs, and the mark is set."""
    script, said = written(tmp_path, capsys, pre_run_command="PRE=1", job_name="two words")
    assert '#SBATCH --job-name="two words"' in script and "#SBATCH --nice\n" in script and "\nPRE=1\n" in script
    assert "nothing was submitted" in said
    stub = script.replace("exec ", "env | grep -E '^(RLMAKE|PRL|WANDB|NUM|MASTER|ORCH|GPUS|PRE)'; echo ", 1).replace(
        'scontrol show hostnames "$SLURM_JOB_NODELIST"', "printf 'n1\\nn2\\n'"
    )
    env = {"PATH": os.environ["PATH"], "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "12007"}
    out = subprocess.run(["bash", "-c", stub], capture_output=True, text=True, env=env, check=True)
    assert f"RLMAKE_SUBMITTED={tmp_path}/it's here/a-run\n" in out.stdout and out.stderr == ""
    assert "NUM_TRAIN_NODES=2\n" in out.stdout and "ORCH_PROCID=0\n" in out.stdout
    assert "MASTER_ADDR=n1\n" in out.stdout and "MASTER_PORT=22007\n" in out.stdout and "ORCH_ADDR=n1\n" in out.stdout
    assert "PRL_RUN_ID=known\n" in out.stdout and "WANDB_RUN_ID=known\n" in out.stdout
    assert "PRL_ATTEMPT_CONFIG_DIR=" in out.stdout
    assert "-m rlmake.cli.main sft @" in out.stdout and out.stdout.endswith("/a-run/launcher/sft.json\n")
    again = subprocess.run(
        ["bash", "-c", stub], capture_output=True, text=True, env={**env, "SLURM_RESTART_COUNT": "1"}, check=True
    )
    assert "PRL_ATTEMPT" not in again.stdout, "a requeued life gets an attempt of its own"


def test_the_resolved_file_is_read_by_the_job(tmp_path, capsys):
    from rlmake.config import parse_argv

    written(tmp_path, capsys)
    file = tmp_path / "it's here" / "a-run" / "launcher" / "sft.json"
    cfg, _ = parse_argv(SFTConfig, ["@", str(file)])
    assert (cfg.clean, cfg.dry_run, cfg.run.name) == (False, False, "a-run") and cfg.slurm is not None
    assert Path(cfg.output_dir) / cfg.run.dir == tmp_path / "it's here" / "a-run"


@pytest.mark.parametrize(
    ("text", "words"),
    [("{{ comand }}", "did you mean 'command'"), ("{% if %}", "Expected an expression"), (None, "No such file")],
)
def test_a_template_that_does_not_fit(tmp_path, text, words):
    path = tmp_path / "t.j2"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError) as error:
        door.template(str(path))
    assert words in str(error.value) and "\n" not in str(error.value)


def test_who_is_the_job(tmp_path, monkeypatch):
    """By the script's mark, or where a template does not set it by the record; never outside of a job."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv(door.MARK, str(tmp_path.resolve()))
    assert not door.in_own_job(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert door.in_own_job(tmp_path)
    monkeypatch.setenv(door.MARK, "/elsewhere")
    assert not door.in_own_job(tmp_path)
    write_json(tmp_path / "launcher" / "job.json", {"job": "7"})
    assert door.in_own_job(tmp_path)


def test_a_folder_that_no_other_host_has(monkeypatch):
    monkeypatch.setattr(shared_folder, "foreign_nodes", lambda partition: True)
    assert "the nodes cannot see it" in (shared_folder.unseen(Path("/tmp/x"), None) or "")
    monkeypatch.setattr(shared_folder, "foreign_nodes", lambda partition: False)
    assert shared_folder.unseen(Path("/tmp/x"), None) is None


def test_a_held_job_is_released_or_named(tmp_path, monkeypatch):
    """Nobody follows a job that was submitted directly: who starts it again, or tails it, lets it go."""
    let_go = []
    monkeypatch.setattr(slurm, "release", let_go.append)
    for reason, words in (("launch failed requeued held", "released (1 of 3"), ("JobHeldUser", "scontrol release 7")):
        job = slurm.Job("7", "PENDING", reason, "N/A", "", str(tmp_path), "")
        monkeypatch.setattr(door, "live_job", lambda run_dir, job=job: job)
        with pytest.raises(UserError, match=re.escape(words)):
            door.check_not_queued(tmp_path)
    assert let_go == ["7"]
