"""TRL's SFTTrainer on the same model and rows: `python trl_sft.py MODEL SEQ ROWS`, one JSON line per setting.

Needs trl, liger-kernel, accelerate and datasets, which rlmake does not. Rows of one document, all tokens trained.
"""

import json
import sys
import tempfile
import time

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

WARM_UP, STEPS = 3, 20


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *_, **__):
        torch.cuda.synchronize()
        self.times.append(time.perf_counter())


def run(model: str, seq: int, rows: int, *, liger: bool, compiled: bool, recompute: bool) -> dict:
    generator = np.random.default_rng(0)
    count = rows * (WARM_UP + STEPS)
    ids = [generator.integers(2, 151000, seq).tolist() for _ in range(count)]
    data = Dataset.from_dict({"input_ids": ids})
    core = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="b", pad_token="a")
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            output_dir=folder, max_length=seq, packing=False, per_device_train_batch_size=1,
            gradient_accumulation_steps=rows, max_steps=WARM_UP + STEPS, bf16=True, learning_rate=1e-5,
            gradient_checkpointing=recompute, use_liger_kernel=liger, torch_compile=compiled,
            optim="adamw_torch_fused", report_to=[], save_strategy="no", logging_steps=1000,
            dataset_kwargs={"skip_prepare_dataset": True}, dataloader_pin_memory=True, disable_tqdm=True,
        )  # fmt: skip
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")
        trainer = SFTTrainer(loaded, config, train_dataset=data, processing_class=tokenizer, callbacks=[clock])
        trainer.train()
    taken = (clock.times[-1] - clock.times[WARM_UP - 1]) / STEPS
    return {
        "tokens_per_second": seq * rows / taken, "liger": liger, "compiled": compiled, "recompute": recompute,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }  # fmt: skip


if __name__ == "__main__":
    model, seq, rows = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    for options in ({"liger": True, "compiled": False},):
        try:
            print(json.dumps(run(model, seq, rows, recompute=False, **options)), flush=True)
        except Exception as error:
            print(json.dumps({"failed": f"{type(error).__name__}: {error}"[:300], **options}), flush=True)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
