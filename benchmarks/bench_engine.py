"""Tokens per second of the embedded engine against `transformers.generate`, on the CPU.

    python benchmarks/bench_engine.py [--threads 2] [--repeats 9] [--model DIR]

Without `--model` it makes the two small models of the table (2 layers of width 128, 3 of 192). Two workloads of 128
requests, 64 at a time, all sampled at temperature 1: `even` (32 prompt tokens, 64 new ones) and `ragged` (4–60 prompt
tokens, 16–128 new ones; `generate` pads each batch of 64 to its longest, only wanted tokens count). Engine and
`generate` take turns, and the median counts, of the rates and of the ratio of each pair: a machine that is shared may
be half as fast a second later. Tokens per CPU second stand beside it.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from transformers import AutoModelForCausalLM

from rlmake.config import InferenceConfig, InitConfig
from rlmake.inference.engines.base import Engine, Sampling
from rlmake.inference.engines.transformers import TransformersEngine

SHAPES = {
    "2 x 128": {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 384},
    "3 x 192": {"num_hidden_layers": 3, "hidden_size": 192, "num_attention_heads": 6, "intermediate_size": 512},
}
BATCH, COUNT = 64, 128
Requests = list[tuple[list[int], int]]  # (prompt, new tokens)


def workloads(vocabulary: int) -> dict[str, Requests]:
    generator = torch.Generator().manual_seed(0)

    def requests(prompt: tuple[int, int], new: tuple[int, int]) -> Requests:
        def draw(low: int, high: int) -> int:
            return int(torch.randint(low, high + 1, (1,), generator=generator))

        return [
            (torch.randint(9, vocabulary, (draw(*prompt),), generator=generator).tolist(), draw(*new))
            for _ in range(COUNT)
        ]

    return {"even": requests((32, 32), (64, 64)), "ragged": requests((4, 60), (16, 128))}


def run_engine(engine: Engine, requests: Requests) -> None:
    futures = [
        engine.submit(tuple(prompt), Sampling(max_tokens=new, seed=seed), None)
        for seed, (prompt, new) in enumerate(requests)
    ]
    for future in futures:
        future.result()


def run_generate(model, requests: Requests) -> None:
    for start in range(0, len(requests), BATCH):
        part = requests[start : start + BATCH]
        longest = max(len(prompt) for prompt, _ in part)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in part])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in part])
        new = max(new for _, new in part)
        with torch.inference_mode():
            options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "eos_token_id": None}
            model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=new, pad_token_id=0, **options)


def measure(run: Callable[[], None], tokens: int) -> tuple[float, float]:
    """Tokens per second, and per second of CPU time of this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return tokens / (time.perf_counter() - wall), tokens / (time.process_time() - cpu)


def bench(name: str, folder: Path, threads: int, repeats: int) -> list[dict]:
    cfg = {"device": "cpu", "engine": "transformers", "cpu_threads": threads, "vllm": {"model": str(folder)}}
    engine = TransformersEngine(InferenceConfig(**cfg, transformers={"max_slots": BATCH}))
    engine.default_stop_ids = frozenset()
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = []
    for workload, requests in workloads(engine.vocab_size).items():
        tokens = sum(new for _, new in requests)
        runs = {
            "engine": lambda r=requests: run_engine(engine, r),
            "generate": lambda r=requests: run_generate(model, r),
        }
        pairs = [{side: measure(run, tokens) for side, run in runs.items()} for _ in range(repeats)]
        wall, cpu = ([pair["engine"][n] / pair["generate"][n] for pair in pairs] for n in (0, 1))
        rows.append(
            {
                "model": name, "workload": workload, "threads": threads,
                **{f"{side}_tokens_per_s": round(median(pair[side][0] for pair in pairs)) for side in runs},
                "ratio": round(median(wall), 2), "cpu_ratio": round(median(cpu), 2),
            }
        )  # fmt: skip
    engine.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--model", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        models = {args.model.name: args.model} if args.model else make_models(Path(folder))
        for name, path in models.items():
            for row in bench(name, path, args.threads, args.repeats):
                print(json.dumps(row), flush=True)


def make_models(root: Path) -> dict[str, Path]:
    from rlmake.models import init

    (root / "text.txt").write_text("hello world, the quick brown fox jumps over the lazy dog\n" * 30)
    tokenizer = {"text": str(root / "text.txt"), "vocab_size": 272}
    made = {}
    for name, shape in SHAPES.items():
        architecture = {**shape, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512}
        made[name] = root / name.replace(" ", "")
        init.make(InitConfig(architecture=architecture, tokenizer=tokenizer, dtype="float32"), made[name])
    return made


if __name__ == "__main__":
    main()
