"""RL under kills: launcher, engine, env servers, orchestrator and trainer as users start them, all killed at once.

Two sources with ratios, one of them drawing tasks by difficulty, an evaluation every few steps, a learning rate that is
not constant.
"""

import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import moments
from moments import Kill, Moment

from rlmake.config import DataConfig, InitConfig, parse
from rlmake.envs import data
from rlmake.models import init

MOMENTS = [
    Moment("forward", "rlmake.trainer.policy:Policy.forward", 6, 0.02),
    Moment("broadcast", "rlmake.transport:broadcast", 4, 0.05),
    Moment("save", "rlmake.trainer.checkpoint:save", 2, 0.05),
    Moment("rollout", "rlmake.orchestrator.rollouts:Rollouts.run", 30, 0.05),
    Moment("publish", "rlmake.checkpoint:publish", 2, 0.02),
    Moment("evaluation", "rlmake.orchestrator.evaluation:Evaluator._run", 1, 0.1),
    Moment("other half", "rlmake.orchestrator.checkpoints:_write", 2, 0.02),
    Moment("export", "rlmake.export.bf16:export", 1, 0.08),
    Moment("shipping", "rlmake.orchestrator.orchestrator:Orchestrator._ship", 4, 0.02),
]
INTERVAL = 2
STEPS_A_KILL = 3
SECONDS = 600  # for an attempt

FILE = """
model.name = "{model}"
output_dir = "{output}"
max_steps = {steps}
seq_len = 256
run.name = "{name}"
[deployment]
num_train_gpus = 0
num_infer_gpus = 0
cpu_threads = 1
[inference.vllm]
max_model_len = 64
[orchestrator]
batch_size = 8
[orchestrator.renderer]
name = "custom"
import_path = "rlmake.models.chatml.ChatMLRenderer"
[orchestrator.train]
group_size = 4
sampling.max_completion_tokens = 8
[[orchestrator.train.source]]
name = "often"
ratio = 3.0
env.taskset.id = "reverse-text"
env.taskset.path = "{data}/train.jsonl"
curriculum.sampler.type = "difficulty_pool"
[[orchestrator.train.source]]
name = "seldom"
ratio = 1.0
env.taskset.id = "reverse-text"
env.taskset.path = "{data}/heldout.jsonl"
[orchestrator.eval]
interval = 4
select.limit = 4
sampling.max_completion_tokens = 8
[[orchestrator.eval.source]]
name = "held"
env.taskset.id = "reverse-text"
env.taskset.path = "{data}/heldout.jsonl"
[trainer.optim]
lr = 1e-3
[trainer.scheduler]
type = "linear"
warmup_steps = 3
decay_steps = 3
[ckpt]
interval = {interval}
{keep}
"""


def prepare(root: Path) -> dict[str, str]:
    """A model of one layer and phrases to reverse."""
    source = {"type": "pydoc-phrases", "min_chars": 4, "max_chars": 8, "num_train": 64, "num_heldout": 16}
    (root / "data").mkdir(parents=True)
    data.make(parse(DataConfig, {"source": source}), root / "data")
    architecture = {
        "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 32, "intermediate_size": 128, "max_position_embeddings": 256,
    }  # fmt: skip
    tokenizer = {"vocab_size": 272, "text": str(root / "data" / "train.jsonl")}
    (root / "model").mkdir()
    table = {"architecture": architecture, "tokenizer": tokenizer, "dtype": "float32"}
    init.make(parse(InitConfig, table), root / "model")
    return {"model": str(root / "model"), "data": str(root / "data"), "root": str(root)}


def attempt(
    places: dict[str, str], run: Path, steps: int, resume: int | None, kill: Kill | None, keep_all: bool
) -> int:
    """`rl @ file.toml`, with `--resume` once there is a checkpoint; 0, or −9 when it was killed."""
    file, log = Path(places["root"]) / f"{run.name}.toml", Path(places["root"]) / f"{run.name}.log"
    keep = "" if keep_all else "keep_last = 3"
    table = {"output": run.parent, "name": run.name, "steps": steps, "interval": INTERVAL, "keep": keep}
    file.write_text(FILE.format(**places, **table))
    mark = uuid.uuid4().hex
    command = [sys.executable, "-c", "from rlmake.cli.main import main; main()", "rl", "@", str(file)]
    command += ["--resume"] if resume else ["--clean"] if run.exists() else []
    env = {**os.environ, **moments.environment(kill, mark)}
    with open(log, "ab") as out:
        code = subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True).wait(SECONDS)
    gone = time.monotonic() + 30
    while (left := moments.members(mark)) and time.monotonic() < gone:
        time.sleep(0.1)
    if left or code not in (0, -9):
        text = log.read_text(errors="replace")[-3000:]
        raise RuntimeError(f"{run.name} ended with {code}, processes left: {left}; {text}")
    return code


def export(checkpoint: Path, out: Path, kill: Kill | None) -> int:
    """Export in a fresh process; its exit code."""
    import sft

    return sft.export(checkpoint, out, False, kill)
