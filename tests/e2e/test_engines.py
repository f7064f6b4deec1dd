"""RL with each engine and each way of weight transfer, as `rl @ file.toml` starts it: trainer, engine, environments.

Embedded engine here; `make test-vllm` sets RLMAKE_TEST_ENGINES=vllm and adds the vLLM engine in its own environment.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlmake.monitors import read

ENGINES = os.environ.get("RLMAKE_TEST_ENGINES", "transformers").split(",")
VLLM_PYTHON = os.environ.get("RLMAKE_VLLM_PYTHON", str(Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"))
STEPS = 5

RL = """
model.name = "{model}"
max_steps = {steps}
seq_len = 256
[run]
name = "run"
[deployment]
num_train_gpus = 0
num_infer_gpus = 0
cpu_threads = 1
[weight_broadcast]
{transfer}
timeout = 1200
[inference]
check_weights = true
{engine}
[inference.vllm]
max_model_len = 64
{options}
[orchestrator]
batch_size = 16
{asynchronous}
[orchestrator.renderer]
name = "custom"
import_path = "rlmake.models.chatml.ChatMLRenderer"
[orchestrator.train]
group_size = 4
sampling.max_completion_tokens = 8
[[orchestrator.train.source]]
env.taskset.id = "reverse-text"
env.taskset.path = "{data}"
env.agent.harness.id = "inproc-chat"
env.agent.runtime.type = "subprocess"
[trainer.optim]
lr = 1e-3
[ckpt]
"""
# A second source, whose rollouts the run's own first model scores.
TEACHER = """
[[orchestrator.train.source]]
name = "taught"
group_size = 1
algo.type = "opd"
algo.teacher.name = "{model}"
env.taskset.id = "reverse-text"
env.taskset.path = "{data}"
"""
FILES, GROUP = 'type = "filesystem"', 'type = "nccl"\nbackend = "gloo"'


def run(folder: Path, parts: dict, engine: str, transfer: str, options: str = "", more: str = "") -> Path:
    """A whole run; its directory."""
    vllm = engine == "vllm"
    text = RL.format(
        **parts,
        steps=STEPS,
        transfer=transfer,
        engine=f'engine = "vllm"\npython = "{VLLM_PYTHON}"' if vllm else "",
        options=('dtype = "float32"\nenforce_eager = true\n' if vllm else "") + options,
        asynchronous="concurrency.max_inflight = 16" if vllm else "",
    )
    (folder / "rl.toml").write_text(text + more.format(**parts))
    command = [sys.executable, "-c", "from rlmake.cli.main import rl; rl()", "@", "rl.toml"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1100)
    logs = "\n".join(path.read_text(errors="replace")[-3000:] for path in folder.glob("outputs/run/logs/latest/*.log"))
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}\n{logs}"
    return folder / "outputs" / "run"


def check(run_dir: Path, bound: float, engines: int = 1, line: str = "check_weights: all ") -> dict[int, dict]:
    """Rewards are finite, versions advance, every engine takes each and has what was sent (`line` in its log), trainer
    and engine agree. The metrics by step."""
    rows: dict[int, dict] = {}
    for row in read(run_dir / "monitors" / "file" / "metrics.jsonl"):
        rows.setdefault(row.step, {}).update(row.metrics)
    assert sorted(step for step in rows if step) == list(range(1, STEPS + 1))
    versions = [rows[step]["watcher/version"] for step in range(1, STEPS + 1)]
    assert versions == sorted(versions) and versions[-1] >= STEPS - 2
    rewards = [row[key] for row in rows.values() for key in row if key.startswith("reward/") and key.endswith("/mean")]
    assert rewards and all(map(math.isfinite, rewards))
    for step in range(1, STEPS + 1):
        assert rows[step]["mismatch_kl/all/mean"] <= bound, rows[step]["mismatch_kl/all/mean"]
    logs = [log for log in (run_dir / "logs" / "latest").glob("inference*.log") if "frozen" not in log.name]
    assert len(logs) == engines
    for log in logs:
        assert log.read_text().count(line) == STEPS + 1, log.read_text()[-3000:]
    return rows


@pytest.mark.skipif("transformers" not in ENGINES, reason="the other engine's turn")
def test_a_group_brings_the_same_weights_as_files_do(tmp_path, parts):
    found = {}
    for name, transfer in (("files", FILES), ("group", GROUP)):
        (tmp_path / name).mkdir()
        run_dir = run(tmp_path / name, parts, "transformers", transfer)
        check(run_dir, 0.0)
        record = json.loads((run_dir / "broadcasts" / f"step_{STEPS}" / "version.json").read_text())
        assert record["transport"] == {"files": "filesystem", "group": "nccl"}[name]
        done = json.loads((run_dir / "checkpoints" / f"step_{STEPS}" / "COMPLETE").read_text())
        weights = [one for one in done["files"] if one["path"].endswith(".distcp")]
        found[name] = (weights[0]["blake3"], done["ledger"])
    assert found["files"] == found["group"]


@pytest.mark.skipif("vllm" not in ENGINES, reason="make test-vllm")
@pytest.mark.timeout(1200)
def test_rl_with_vllm_by_files_and_a_teacher(tmp_path, parts):
    run_dir = run(tmp_path, parts, "vllm", FILES, more=TEACHER)
    found = [row["ref_kl/all/mean"] for row in check(run_dir, 0.01).values() if "ref_kl/all/mean" in row]
    assert found and all(map(math.isfinite, found))
    assert (run_dir / "logs" / "latest" / "inference-frozen-0.log").is_file()


@pytest.mark.skipif("vllm" not in ENGINES, reason="make test-vllm")
@pytest.mark.timeout(1200)
def test_rl_with_two_engines_of_vllm_by_a_group(tmp_path, parts):
    check(run(tmp_path, parts, "vllm", GROUP, "data_parallel_size = 2"), 0.01, engines=2)


@pytest.mark.skipif("vllm" not in ENGINES, reason="make test-vllm")
@pytest.mark.timeout(1200)
def test_rl_with_vllm_and_an_adapter(tmp_path, parts):
    run_dir = run(tmp_path, parts, "vllm", FILES, more="[trainer.model.lora]\nrank = 4\n")
    check(run_dir, 0.01, line="weights v")
    record = json.loads((run_dir / "broadcasts" / f"step_{STEPS}" / "version.json").read_text())
    assert record["kind"] == "adapter"
