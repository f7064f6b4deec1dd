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
FILES, GROUP = 'type = "filesystem"', 'type = "nccl"\nbackend = "gloo"'


def run(folder: Path, parts: dict, engine: str, transfer: str, *flags: str, options: str = "") -> Path:
    """A whole run; its directory."""
    vllm = engine == "vllm"
    text = RL.format(
        **parts,
        steps=STEPS,
        transfer=transfer,
        engine=f'engine = "vllm"\npython = "{VLLM_PYTHON}"' if vllm else "check_weights = true",
        options=('dtype = "float32"\nenforce_eager = true\n' if vllm else "") + options,
        asynchronous="concurrency.max_inflight = 16" if vllm else "",
    )
    (folder / "rl.toml").write_text(text)
    command = [sys.executable, "-c", "from rlmake.cli.main import rl; rl()", "@", "rl.toml", *flags]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
    logs = "\n".join(path.read_text(errors="replace")[-3000:] for path in folder.glob("outputs/run/logs/latest/*.log"))
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}\n{logs}"
    return folder / "outputs" / "run"


def check(run_dir: Path, bound: float, line: str) -> None:
    """Rewards are finite, versions advance, and trainer and engine agree. `line`: in the server's log, per version."""
    rows: dict[int, dict] = {}
    for row in read(run_dir / "monitors" / "file" / "metrics.jsonl"):
        rows.setdefault(row.step, {}).update(row.metrics)
    assert sorted(step for step in rows if step) == list(range(1, STEPS + 1))
    versions = [rows[step]["watcher/version"] for step in range(1, STEPS + 1)]
    assert versions == sorted(versions) and versions[-1] >= STEPS - 2
    for step in range(1, STEPS + 1):
        rewards = [value for key, value in rows[step].items() if key.startswith("reward/") and key.endswith("/mean")]
        assert rewards and all(map(math.isfinite, rewards))
        assert rows[step]["mismatch_kl/all/mean"] <= bound, rows[step]["mismatch_kl/all/mean"]
    log = (run_dir / "logs" / "latest" / "inference.log").read_text()
    assert log.count(line) == STEPS + 1, log[-3000:]


@pytest.mark.skipif("transformers" not in ENGINES, reason="the other engine's turn")
def test_a_group_brings_the_same_weights_as_files_do(tmp_path, parts):
    found = {}
    for name, transfer in (("files", FILES), ("group", GROUP)):
        (tmp_path / name).mkdir()
        run_dir = run(tmp_path / name, parts, "transformers", transfer)
        check(run_dir, 0.0, "check_weights: all ")
        record = json.loads((run_dir / "broadcasts" / f"step_{STEPS}" / "version.json").read_text())
        assert record["transport"] == {"files": "filesystem", "group": "nccl"}[name]
        done = json.loads((run_dir / "checkpoints" / f"step_{STEPS}" / "COMPLETE").read_text())
        weights = [one for one in done["files"] if one["path"].endswith(".distcp")]
        found[name] = (weights[0]["blake3"], done["ledger"])
    assert found["files"] == found["group"]


@pytest.mark.skipif("vllm" not in ENGINES, reason="make test-vllm")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("transfer", [FILES, GROUP], ids=["files", "group"])
def test_rl_with_vllm(tmp_path, parts, transfer):
    check(run(tmp_path, parts, "vllm", transfer), 0.01, "weights v")
