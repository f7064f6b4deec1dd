"""SFT under kills: a run of many steps, killed over and over, must stay the run that nobody killed, byte for byte.

Two configurations: one has a cosine schedule, accumulation, two data sources with ratios, a packing pool, two loader
workers and several epochs; the other trains an adapter with dropout.
"""

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))

import moments
from moments import Kill, Moment
from trainer_samples import rows, write_jsonl
from trainer_worlds import FORKS, rank_main

from rlmake.config import InitConfig, SFTConfig, parse
from rlmake.models import init
from rlmake.models.renderer import CHATML

MOMENTS = [
    Moment("forward", "rlmake.trainer.policy:Policy.forward", 24, 0.004),
    Moment("update", "rlmake.trainer.training:Training.update", 6, 0.004),
    Moment("save", "rlmake.trainer.checkpoint:save", 3, 0.05),
    Moment("publish", "rlmake.checkpoint:publish", 3, 0.01),
    Moment("retention", "rlmake.checkpoint:retain", 3, 0.01),
    Moment("evaluation", "rlmake.trainer.sft:validate", 2, 0.02),
    Moment("export", "rlmake.export.bf16:export", 1, 0.08),
    Moment("resume", "rlmake.trainer.training:Training.resume", 1, 0.05),
    Moment("loading", "rlmake.trainer.data.loader:SFTLoader.step", 6, 0.003),
]
INTERVAL = 2
STEPS_A_KILL = 8  # more than any moment lets a run get on


def prepare(root: Path) -> dict[str, Any]:
    """A model of two layers, two sources of rows, held-out rows; the parts of a configuration that name them."""
    for name, count in (("a", 41), ("b", 23)):
        write_jsonl(root / "data" / name / "train.jsonl", rows(count))
    write_jsonl(root / "data" / "heldout.jsonl", rows(13))
    text = root / "text.txt"
    text.write_text("\n".join(f"{row['prompt']}\n{row['completion']}" for row in rows(200)))
    architecture = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 128}
    tokenizer = {"vocab_size": 320, "text": str(text)}
    (root / "model").mkdir()
    table = {"architecture": architecture, "tokenizer": tokenizer, "dtype": "float32"}
    init.make(parse(InitConfig, table), root / "model")
    return {"model": str(root / "model"), "data": str(root / "data"), "heldout": str(root / "data" / "heldout.jsonl")}


def config(places: dict[str, Any], run: Path, steps: int, lora: bool, resume: int | None) -> SFTConfig:
    data = {"batch_size": 4, "micro_batch_size": 1, "seq_len": 64, "num_workers": 0 if lora else 2}
    mixed = {"subsets": ["a", "b"], "probabilities": [0.7, 0.3], "stopping_strategy": "all_exhausted"}
    return parse(
        SFTConfig,
        {
            "model": {"name": places["model"]} | ({"lora": {"rank": 4, "dropout": 0.1}} if lora else {}),
            "data": {"name": places["data"], **data, **mixed},
            "val": {"interval": 3, "data": {"name": places["heldout"], **data, "num_workers": 0}},
            "renderer": {"name": "custom", "import_path": CHATML},
            "deployment": {"num_train_gpus": 0, "num_infer_gpus": 0, "cpu_threads": 1},
            "optim": {"lr": 1e-2},
            "scheduler": {"type": "cosine", "warmup_steps": 2},
            "ckpt": {"interval": INTERVAL, "keep_last": 3},
            "max_steps": steps,
            "output_dir": str(run),
            "resume": {"step": resume} if resume else None,
        },
    )


def attempt(cfg: SFTConfig, number: int, kill: Kill | None) -> int:
    """Run in a fresh process; its exit code, −9 when it was killed. A step of a busy machine takes 5 s at most."""
    seconds = 100 + 5 * cfg.max_steps
    log = Path(cfg.output_dir) / f"log_{number}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    process = FORKS.Process(target=_main, args=(cfg, number, str(log), kill))
    process.start()
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise RuntimeError(f"attempt {number} did not end within {seconds} s; see {log}")
    if process.exitcode not in (0, -9):
        raise RuntimeError(f"attempt {number} ended with {process.exitcode}: {log.read_text()[-2000:]}")
    return process.exitcode


def _main(cfg: SFTConfig, number: int, log: str, kill: Kill | None) -> None:
    from rlmake.trainer import sft

    if kill:
        moments.install(kill)
    rank_main(0, 1, 0, sft.train, cfg, number, log)


def export(checkpoint: Path, out: Path, lora: bool, kill: Kill | None) -> int:
    """Export in a fresh process; its exit code."""
    process = FORKS.Process(target=_export, args=(str(checkpoint), str(out), lora, kill))
    process.start()
    process.join(120)
    return process.exitcode


def _export(checkpoint: str, out: str, lora: bool, kill: Kill | None) -> None:
    from rlmake.export import bf16, merge

    os.environ.pop(moments.MARK, None)
    if kill:
        moments.install(kill)
    (merge.export if lora else bf16.export)(Path(checkpoint), Path(out), max_shard=60_000)
