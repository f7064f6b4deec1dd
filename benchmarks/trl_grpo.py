"""TRL's GRPOTrainer beside its vLLM server: `python trl_grpo.py MODEL PORT STEPS BATCH GROUP REPLY WARM_UP ROWS`.

Started by bench_grpo.py; one JSON line. Needs trl, liger-kernel, accelerate and datasets.
"""

import json
import sys
import tempfile

import torch
from datasets import Dataset
from hash_task import prompt, score
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl_sft import Clock


def main() -> None:
    model, port, *numbers = sys.argv[1:]
    steps, batch, group, reply, warm_up, rows = map(int, numbers)
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": prompt(index)}]} for index in range(4096)])
    clock, lengths = Clock(), []
    tokenizer = AutoTokenizer.from_pretrained(model)

    def reward(prompts, completions, completion_ids, **_):
        lengths.extend(map(len, completion_ids))
        return [score(completion[0]["content"]) for completion in completions]

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=rows,
            gradient_accumulation_steps=batch // rows, num_generations=group, max_completion_length=reply, beta=0.0,
            learning_rate=1e-6, bf16=True, use_vllm=True, vllm_mode="server", vllm_server_port=int(port),
            gradient_checkpointing=False, use_liger_kernel=True, optim="adamw_torch_fused", temperature=1.0,
            report_to=[], save_strategy="no", logging_steps=1000, disable_tqdm=True, log_completions=False,
            model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        )  # fmt: skip
        trainer = GRPOTrainer(
            model, reward, args=config, train_dataset=data, processing_class=tokenizer, callbacks=[clock]
        )
        trainer.train()
    count = len(clock.times) - warm_up
    seconds = (clock.times[-1] - clock.times[warm_up - 1]) / count
    asked = tokenizer.apply_chat_template(data[0]["prompt"], add_generation_prompt=True)
    asked = len(asked["input_ids"] if hasattr(asked, "keys") else asked)
    mean = sum(lengths) / len(lengths)
    tokens = (asked + mean) * batch
    print(json.dumps({
        "tokens_per_second": tokens / seconds, "step_s": seconds, "tokens_per_step": tokens, "reply_tokens": mean,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
