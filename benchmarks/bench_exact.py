"""What the exact fp32 forward costs on a CPU: forward and backward of a packed row against plain packed attention.

    python benchmarks/bench_exact.py [--threads 1]

Prints, per length of the documents in a row of 2,048 tokens, milliseconds of CPU time of both (best of five), and
whether the self-test holds on this machine for a few shapes.
"""

import argparse
import time

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlmake.models import exact, packed

SHAPES = (
    {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 384},
    {"num_hidden_layers": 3, "hidden_size": 192, "num_attention_heads": 6, "intermediate_size": 512},
    {"num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, "intermediate_size": 768},
)
STRADDLING = (1, 2, 3, 5, 17, 33, 64, 65, 100, 129, 192, 193, 203, 260, 300, 520, 700)


def model_of(attn: str, shape: dict) -> torch.nn.Module:
    table = {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1024, "max_position_embeddings": 4096, **shape}
    config = Qwen3Config(**table, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    config._attn_implementation = attn
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config)


def step(model: torch.nn.Module, forward, length: int) -> None:
    lens = [length] * (2048 // length)
    ids = torch.randint(0, 1024, (1, sum(lens)))
    hidden = forward(model, ids, torch.arange(length).repeat(len(lens))[None], lens)
    logprobs, _ = exact.token_logprobs(hidden, model.lm_head.weight, ids[0])
    logprobs.sum().backward()


def best_ms(run, repeats: int = 5) -> float:
    run()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return 1e3 * min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    for shape in SHAPES:
        print(shape, exact.self_test(model_of(exact.NAME, shape), lens=STRADDLING, decoded=40), flush=True)
    ours, plain = (model_of(name, SHAPES[0]) for name in (exact.NAME, packed.NAME))
    for length in (16, 32, 64, 128, 256, 1024):
        a = best_ms(lambda n=length: step(ours, exact.packed_forward, n))
        b = best_ms(lambda n=length: step(plain, packed.packed_forward, n))
        print(f"documents of {length}: exact {a:.0f} ms, plain {b:.0f} ms, ratio {a / b:.2f}", flush=True)


if __name__ == "__main__":
    main()
