"""The trainer's speed on one GPU: its real loops against a roofline measured in the same run, and against TRL.

    python benchmarks/bench_trainer.py --out table.json          # everything; `make bench-trainer`
    python benchmarks/bench_trainer.py --only sft-8k --profile   # one setting, with the time of its kernels
    torchrun --nproc-per-node 2 benchmarks/bench_trainer.py --only sft-8k [--copies 2] [--same-batch]    # two GPUs

Qwen3-0.6B's shape with random weights, bf16 products, fp32 weights, AdamW. Rows of `--seq` tokens, `--rows` of them a
step, one a micro-batch. "one document": every row is a single document (the attention costs most). "mix": documents of
log-normal length (median a sixteenth of the row, σ of the logarithm 1, cut to the row), packed by the loader. Every
token is trained.
On several GPUs a step has `--rows` of them for each GPU, or with `--same-batch` as many as on one; the weights are
sharded, or with `--copies` as many GPUs hold whole ones.
Each setting runs 3 steps of warm-up and 20 measured ones; tokens per second are of the whole loop.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch

WARM_UP, STEPS = 3, 20
SHAPE = {
    "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 3072, "vocab_size": 151936, "max_position_embeddings": 40960, "tie_word_embeddings": True,
}  # fmt: skip


def make_model(folder: Path, **changes) -> None:
    """Random weights (deviation 0.02) in bf16, with the configuration of Qwen3-0.6B, or with `changes`."""
    from transformers import Qwen3Config

    from rlmake.models import loading

    config = Qwen3Config(
        **(SHAPE | changes), bos_token_id=None, eos_token_id=1, pad_token_id=0, architectures=["Qwen3ForCausalLM"]
    )
    model = loading.build(config, attn="eager")
    generator = torch.Generator(device="cuda").manual_seed(0)
    tensors = {
        name: torch.ones(shape) if len(shape) == 1
        else torch.empty(shape, device="cuda").normal_(0.0, 0.02, generator=generator).bfloat16().cpu()
        for name, shape in loading.expected(model).items()
    }  # fmt: skip
    loading.save_hf(tensors, folder, config, dtype="bfloat16")


class Rows:
    """Settings of a run: what a row holds, how activations are kept, which loop."""

    def __init__(self, seq: int, rows: int, *, mix: bool = False, rl: bool = False, same: bool = False, **keys):
        """`keys`: of `[model]`."""
        self.seq, self.rows, self.mix, self.rl, self.same, self.keys = seq, rows, mix, rl, same, keys
        self.gpus = self.copies = 1

    def spread(self, gpus: int, copies: int, same_batch: bool) -> None:
        """Run on several GPUs."""
        self.gpus, self.copies = gpus, copies
        self.rows *= 1 if same_batch else gpus

    def config(self, model: Path, run_dir: Path, steps: int):
        from rlmake.config import SFTConfig, TrainerConfig, parse

        raw = {
            "model": {
                "name": str(model),
                "compile": {},
                "seq_len": self.seq,
                "dp_replicate": self.copies,
                **self.keys,
            },
            "deterministic": self.same,
            "optim": {"lr": 1e-5},
            "max_steps": steps,
            "output_dir": str(run_dir),
            "log": {"level": "warning"},
        }
        if self.rl:
            fake = {"batch_size": self.rows, "generate_samples": self.mix}
            return parse(TrainerConfig, raw | {"device": "cuda", "data": {"fake": fake}})
        data = {"type": "fake", "batch_size": self.rows, "seq_len": self.seq, "input_ids": "random"}
        data["length"] = "variable" if self.mix else "fixed"
        return parse(SFTConfig, raw | {"data": data, "deployment": {"num_train_gpus": self.gpus, "num_infer_gpus": 0}})


def run(settings: Rows, model: Path, measured: int = STEPS, warm_up: int = WARM_UP) -> dict | None:
    """One run of the real loop in this process; tokens per second, MFU, memory and seconds until the first step.

    None on all ranks but the first.
    """
    from rlmake.core.rundir import RunContext
    from rlmake.monitors import read, setup
    from rlmake.trainer import rl, sft
    from rlmake.trainer import world as worlds
    from rlmake.trainer.training import prepare

    with tempfile.TemporaryDirectory() as folder:
        config = settings.config(model, Path(folder), warm_up + measured)
        os.environ["PRL_ATTEMPT_CONFIG_DIR"] = f"{folder}/configs/attempt_1"
        torch.cuda.reset_peak_memory_stats()
        prepare(config)
        world = worlds.start(gpu=True, threads=8, dp_replicate=config.model.dp_replicate)
        ctx = RunContext.from_env(folder)
        monitors = setup(config.monitors, "trainer", ctx, world.rank)
        begun = time.perf_counter()
        try:
            (rl if settings.rl else sft).train(config, ctx, world, monitors)
        finally:
            monitors.close()
            world.close()
        rows = [row.metrics for row in read(Path(folder)) if "loss/mean" in row.metrics]
    gc.enable()
    gc.collect()
    torch.cuda.empty_cache()
    if not world.master:
        return None
    warm, timed = rows[:warm_up], rows[warm_up:]
    tokens = settings.rows * settings.seq
    if not settings.rl:
        tokens = (timed[-1]["progress/num_tokens"] - warm[-1]["progress/num_tokens"]) / measured
    seconds = float(np.mean([row["time/step"] for row in timed]))
    return {
        "tokens_per_second": tokens / seconds,
        "ms_per_row": 1e3 * seconds * settings.gpus / settings.rows,
        "mfu": timed[-1]["perf/mfu"],
        "fill": timed[-1].get("packing/fill", 1.0),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "step_ms": {
            key.removeprefix("time/"): round(1e3 * float(np.mean([row[key] for row in timed])), 2)
            for key in timed[-1]
            if key.startswith("time/")
        },
        "first_step_s": rows[0]["time/step"],
        "whole_s": time.perf_counter() - begun,
        "loss": [rows[0]["loss/mean"], rows[-1]["loss/mean"]],
    }


def seconds(action, repeats: int = 10) -> float:
    """Median seconds of an action on the GPU."""
    for _ in range(3):
        action()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        action()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]


def roofline(seq: int) -> dict:
    """Milliseconds of a row of one document: products 6·P·tokens at the rate of a large product, attention as measured.

    `products_at_their_shapes_ms`: the same products one after the other, each at the rate of its own shape.
    """
    from rlmake.trainer.families import qwen3

    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    rate = 2 * size**3 / seconds(lambda: a @ b)
    layers, h, i, vocab = SHAPE["num_hidden_layers"], 1024, 3072, SHAPE["vocab_size"]
    block = [(h, 2048), (h, 1024), (h, 1024), (2048, h), (h, i), (h, i), (i, h)]
    shapes = layers * sum(_three_products(seq, *dims) for dims in block) + _three_products(seq, h, vocab)
    parameters = qwen3.active_parameters(argparse.Namespace(**SHAPE))
    products = 6 * parameters * seq / rate
    again = 2 * (parameters - h * vocab) * seq / rate  # the blocks' forward pass once more
    forward, both = _attention(seq)
    row, recomputed = products + layers * both, products + again + layers * (both + forward)
    return {
        "large_product_tflops": rate / 1e12,
        "attention_forward_ms": 1e3 * forward,
        "attention_ms": 1e3 * both,
        "products_ms": 1e3 * products,
        "products_at_their_shapes_ms": 1e3 * shapes,
        "row_ms": 1e3 * row,
        "tokens_per_second": seq / row,
        "tokens_per_second_at_shapes": seq / (shapes + layers * both),
        "recompute_tokens_per_second": seq / recomputed,
    }


def _three_products(tokens: int, width: int, out: int) -> float:
    """Seconds of a linear layer: forward, gradient of its input, gradient of its weight."""
    x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(out, width, device="cuda", dtype=torch.bfloat16)
    g = torch.randn(tokens, out, device="cuda", dtype=torch.bfloat16)
    return seconds(lambda: x @ w.T) + seconds(lambda: g @ w) + seconds(lambda: g.T @ x)


def _attention(seq: int) -> tuple[float, float]:
    """Seconds of attention over one document in one layer: forward, and forward with backward."""
    from rlmake.models import packed, varlen

    q, k, v = (
        torch.randn(seq, heads, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for heads in (16, 8, 8)
    )
    grad, row = torch.randn_like(q), packed.Row.of([seq], q.device, q.dtype)

    def forward():
        return varlen.attention(q, k, v, row.offsets, row.lens, 128**-0.5)

    return seconds(forward), seconds(lambda: torch.autograd.grad(forward(), (q, k, v), grad))


def profile(settings: Rows, model: Path, warm_up: int = 2) -> list[tuple[str, float]]:
    """(kernel, milliseconds per row) of one step behind `warm_up` others, most expensive first; the idle share last."""
    from rlmake.trainer import rl, sft

    loop = rl if settings.rl else sft
    step, count, found = loop.step, 0, []

    def watched(*args):
        nonlocal count
        count += 1
        if count != warm_up + 1:
            return step(*args)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profiler:
            result = step(*args)
            torch.cuda.synchronize()
        found.extend(event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA)
        return result

    loop.step = watched
    try:
        run(settings, model, measured=1, warm_up=warm_up)
    finally:
        loop.step = step
    total: Counter[str] = Counter()
    busy = end = 0.0
    found.sort(key=lambda event: event.time_range.start)
    for event in found:
        total[event.name[:110]] += event.time_range.elapsed_us()
        start = max(event.time_range.start, end)
        busy, end = busy + max(event.time_range.end - start, 0), max(event.time_range.end, end)
    span = end - found[0].time_range.start
    rows = [(name, value / 1e3 / settings.rows) for name, value in total.most_common(45)]
    return [*rows, ("(all)", span / 1e3 / settings.rows), ("(share of that in which nothing ran)", 1 - busy / span)]


def start_up(settings: Rows, model: Path) -> dict:
    """Seconds from the start of a trainer's process until its first step is reported, and until it has ended."""
    from rlmake.config import dump
    from rlmake.monitors import read

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sft.json"
        path.write_text(json.dumps(dump(settings.config(model, Path(folder), 1))))
        begun = time.perf_counter()
        command = [sys.executable, "-m", "rlmake.trainer.sft", "@", path]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        first = None
        while process.poll() is None:
            if first is None and any("loss/mean" in row.metrics for row in read(Path(folder))):
                first = time.perf_counter() - begun
            time.sleep(0.05)
        if process.returncode:
            raise RuntimeError(f"the trainer ended with {process.returncode}")
        return {"first_step_s": first, "process_s": time.perf_counter() - begun}


def killed(folder: Path) -> dict:
    """A small model's deterministic run on the GPU, uninterrupted, killed (SIGKILL) and resumed, repeated: equal?"""
    import torch.distributed.checkpoint as dcp

    from rlmake import checkpoint
    from rlmake.config import SFTConfig, dump, parse

    model = folder / "small"
    make_model(model, hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4,
               head_dim=64, intermediate_size=1536, vocab_size=32768)  # fmt: skip

    def start(run_dir: Path, resume: int | None = None) -> subprocess.Popen:
        raw = {
            "model": {"name": str(model), "compile": {}}, "optim": {"lr": 1e-3}, "deterministic": True, "max_steps": 8,
            "data": {"type": "fake", "length": "variable", "input_ids": "random", "batch_size": 4, "seq_len": 2048},
            "ckpt": {"interval": 2}, "deployment": {"num_train_gpus": 1}, "output_dir": str(run_dir),
            "resume": resume and {"step": resume},
        }  # fmt: skip
        run_dir.mkdir(exist_ok=True)
        path = run_dir / f"sft-{resume}.json"
        path.write_text(json.dumps(dump(parse(SFTConfig, raw))))
        with open(run_dir / "log.txt", "ab") as log:
            return subprocess.Popen([sys.executable, "-m", "rlmake.trainer.sft", "@", path], stdout=log, stderr=log)

    straight, cut = folder / "straight", folder / "cut"
    first, second = start(straight), start(cut)
    while checkpoint.newest(cut) is None and second.poll() is None:
        time.sleep(0.01)
    second.kill()
    second.wait()
    step = checkpoint.newest(cut)
    code = start(cut, step).wait()
    repeated = folder / "repeated"
    if first.wait() or code or start(repeated).wait():
        return {"failed": [path.read_text()[-800:] for path in folder.glob("*/log.txt")]}

    def tensors(run_dir: Path) -> dict:
        half = run_dir / "checkpoints" / "step_8" / "trainer"
        entries = dcp.FileSystemReader(half).read_metadata().state_dict_metadata
        state = {key: torch.empty(entry.size, dtype=entry.properties.dtype) for key, entry in entries.items()}
        dcp.load(state, storage_reader=dcp.FileSystemReader(half), no_dist=True)
        return state

    a = tensors(straight)
    different = {
        path.name: sum(not torch.equal(a[key], value) for key, value in tensors(path).items())
        for path in (cut, repeated)
    }
    return {"killed_behind_step": step, "tensors": len(a), "different": different}


SETTINGS = {
    "sft-8k": Rows(8192, 4),
    "sft-8k-deterministic": Rows(8192, 4, same=True),
    "sft-16k": Rows(16384, 2),
    "sft-8k-recompute": Rows(8192, 4, ac={}),
    "sft-16k-recompute": Rows(16384, 2, ac={}),
    "sft-8k-ac-offloading": Rows(8192, 4, ac={}, ac_offloading={}),
    "sft-8k-optim-offload": Rows(8192, 4, optim_cpu_offload=True),
    "sft-8k-fsdp-offload": Rows(8192, 4, fsdp_cpu_offload=True),
    "sft-8k-mix": Rows(8192, 4, mix=True),
    "sft-16k-mix": Rows(16384, 2, mix=True),
    "rl-8k": Rows(8192, 4, rl=True),
    "rl-16k": Rows(16384, 2, rl=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="*", default=None, help=f"of {', '.join(SETTINGS)}, roofline, start-up, killed, trl"
    )
    parser.add_argument("--profile", action="store_true", help="three steps of each setting, and its kernels")
    parser.add_argument("--steps", type=int, default=STEPS, help="measured steps")
    parser.add_argument("--copies", type=int, default=1, help="how many of the GPUs' groups hold a whole model")
    parser.add_argument("--same-batch", action="store_true", help="on several GPUs: as many rows as on one")
    parser.add_argument("--out", type=Path, default=None, help="write everything as JSON")
    args = parser.parse_args()
    rank, gpus = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.cuda.set_device(rank)
    everything = [*SETTINGS, "roofline", "start-up", "killed", "trl"]
    wanted = args.only if args.only is not None else everything if gpus == 1 else ["sft-8k", "sft-16k", "rl-8k"]
    found: dict = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "date": time.strftime("%F")}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_model(model)
        for name in [name for name in wanted if name in SETTINGS]:
            settings = SETTINGS[name]
            settings.spread(gpus, args.copies, args.same_batch)
            if args.profile:
                found[name] = profile(settings, model)
                print(f"\n{name}, ms per row:", *(f"{value:8.3f}  {key}" for key, value in found[name]), sep="\n")
                continue
            found[name] = run(settings, model, measured=args.steps)
            if found[name]:
                print(name, json.dumps(found[name]), flush=True)
        if "roofline" in wanted:
            for seq in (8192, 16384):
                found[f"roofline-{seq // 1024}k"] = roofline(seq)
                print(f"roofline {seq}", json.dumps(found[f"roofline-{seq // 1024}k"]), flush=True)
        if "start-up" in wanted:
            found["start-up"] = start_up(SETTINGS["sft-8k"], model)
            print("start-up", found["start-up"], flush=True)
        if "killed" in wanted:
            found["killed"] = killed(Path(folder))
            print("killed", found["killed"], flush=True)
        if "trl" in wanted:
            for seq, rows in ((8192, 4), (16384, 2)):
                command = [sys.executable, Path(__file__).with_name("trl_sft.py"), str(model), str(seq), str(rows)]
                done = subprocess.run(command, capture_output=True, text=True)
                lines = [line for line in done.stdout.splitlines() if line.startswith('{"')]  # TRL prints {'…
                found[f"trl-{seq // 1024}k"] = [json.loads(line) for line in lines] or done.stderr[-2000:]
                print(f"trl {seq}", found[f"trl-{seq // 1024}k"], flush=True)
    if args.out and rank == 0:
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
