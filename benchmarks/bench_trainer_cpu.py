"""The SFT loop on the CPU against a bare PyTorch loop of the same model, rows and optimizer: CPU seconds, alternating.

    python benchmarks/bench_trainer_cpu.py

A small Qwen3 (4 layers, 256 wide, 8,192 tokens), 4 rows of 1,024 tokens a step, one document each. The bare loop calls
transformers' model with SDPA, `cross_entropy` over all tokens, clipping and fused AdamW; it has no data to prepare, no
metrics and no schedule. CPU time of the process is compared, so that other work on the machine does not count.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

ROWS, SEQ, STEPS, WARM_UP = 4, 1024, 4, 1


def make_model(folder: Path) -> None:
    from transformers import Qwen3Config

    from rlmake.models import loading

    config = Qwen3Config(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        intermediate_size=768, vocab_size=8192, max_position_embeddings=4096, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=1, pad_token_id=0, architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    g = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=g) * 0.02
        for name, shape in loading.expected(loading.build(config, attn="eager")).items()
    }
    loading.save_hf(tensors, folder, config, dtype="float32")


def bare(model: Path) -> list[float]:
    from rlmake.models import loading

    net = loading.load(model, attn="sdpa").train()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-4, fused=True)
    g = torch.Generator().manual_seed(1)
    taken = []
    for _ in range(WARM_UP + STEPS):
        start = time.process_time()
        for _ in range(ROWS):
            ids = torch.randint(0, net.config.vocab_size, (1, SEQ + 1), generator=g)
            logits = net(input_ids=ids[:, :-1], use_cache=False).logits[0]
            (F.cross_entropy(logits.float(), ids[0, 1:], reduction="sum") / (ROWS * SEQ)).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        taken.append(time.process_time() - start)
    return taken[WARM_UP:]


def ours(model: Path, attn: str) -> list[float]:
    from rlmake.config import SFTConfig, parse
    from rlmake.core.rundir import RunContext
    from rlmake.monitors import setup
    from rlmake.trainer import sft
    from rlmake.trainer import world as worlds

    taken, step = [], sft.step

    def watched(*args):
        start = time.process_time()
        result = step(*args)
        taken.append(time.process_time() - start)
        return result

    with tempfile.TemporaryDirectory() as folder:
        raw = {
            "model": {"name": str(model), "attn": attn}, "optim": {"lr": 1e-4}, "max_steps": WARM_UP + STEPS,
            "data": {"type": "fake", "input_ids": "random", "batch_size": ROWS, "seq_len": SEQ},
            "deployment": {"num_train_gpus": 0, "num_infer_gpus": 0, "cpu_threads": torch.get_num_threads()},
            "output_dir": folder, "log": {"level": "warning"},
        }  # fmt: skip
        config = parse(SFTConfig, raw)
        world = worlds.start(gpu=False, threads=torch.get_num_threads())
        ctx = RunContext.from_env(folder)
        monitors = setup(config.monitors, "trainer", ctx, 0)
        sft.step = watched
        try:
            sft.train(config, ctx, world, monitors)
        finally:
            sft.step = step
            monitors.close()
            world.close()
    return taken[WARM_UP:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found: dict[str, list[float]] = {"bare": [], "exact": [], "varlen": []}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_model(model)
        for _ in range(args.repeats):
            found["bare"] += bare(model)
            for attn in ("exact", "varlen"):
                found[attn] += ours(model, attn)
    least = {name: min(values) for name, values in found.items()}
    print(json.dumps({name: {"cpu_s": value, "ratio": value / least["bare"]} for name, value in least.items()}))


if __name__ == "__main__":
    main()
