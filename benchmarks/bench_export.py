"""Conversions against the disk's own write speed, in one run, with their peak memory (`make bench-export`).

    python benchmarks/bench_export.py [--layers 14 28] [--repeat 5] [--folder DIR]

A checkpoint of fp32 master weights in the shape of Qwen3-0.6B (28 layers: 2.4 GB) becomes bf16 and FP8 and goes back.
Rate: bytes written by a second of the whole conversion, verification of the checkpoint included, source in the page
cache where it fits. Disk: as many bytes written and synced in one go, before and after each conversion. Each is done
`--repeat` times, in turn, and medians are compared: a disk that is shared may take twice as long the next time. Memory:
the peak of the process's own (anonymous) pages beyond those after its imports.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

SHARD = 10**9
HIDDEN, INTERMEDIATE, VOCABULARY = 1024, 3072, 151936


def make_checkpoint(root: Path, layers: int) -> Path:
    """`<root>/checkpoints/step_1` with random weights, and the model directory that its tokenizer comes from."""
    import torch
    import torch.distributed.checkpoint as dcp
    from transformers import Qwen3Config

    from rlmake import checkpoint
    from rlmake.config import InitConfig, parse
    from rlmake.core.jsonio import write_json
    from rlmake.core.rundir import RunContext, step_dir
    from rlmake.models import init, loading

    (root / "text.txt").write_text("some words to make a tokenizer of\n" * 9)
    (root / "base").mkdir()
    init.make(parse(InitConfig, {"tokenizer": {"text": str(root / "text.txt"), "vocab_size": 265}}), root / "base")
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    )  # fmt: skip
    shapes = loading.expected(loading.build(config, attn="eager"))
    torch.manual_seed(0)
    half = checkpoint.begin(step_dir(root, 1), "trainer")
    dcp.save(
        {f"model.{name}": torch.randn(shape) * 0.02 for name, shape in shapes.items()}, checkpoint_id=half, no_dist=True
    )
    facts = {"config": config.to_dict(), "assets": str(root / "base"), "chat_template": None, "prefix": "model."}
    write_json(half / "model.json", {"schema": 1, "lora": None, **facts})
    checkpoint.commit(half, step_dir(root, 1), "trainer")
    context = RunContext.from_env(root)
    checkpoint.publish(root, 1, ("trainer",), policy_version=1, world_size=1, ledger=None, ctx=context)
    return step_dir(root, 1)


def convert(name: str, source: Path, out: Path) -> dict[str, float]:
    """In a process of its own: `{seconds, bytes, memory}`."""
    import torch.distributed.checkpoint  # noqa: F401 (an import of the checkpoint reader, as torch is one)

    from rlmake.export import bf16, dequantize, fp8

    work = {
        "checkpoint → bf16": lambda: bf16.export(source, out, max_shard=SHARD),
        "bf16 → FP8": lambda: fp8.quantize(source, out),
        "checkpoint → FP8": lambda: fp8.export(source, out, max_shard=SHARD),
        "FP8 → bf16": lambda: dequantize.export(source, out),
    }[name]
    before, peak, done = anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start, cpu = time.perf_counter(), time.process_time()
    facts = work()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    done.set()
    watcher.join()
    return {"seconds": seconds, "cpu": cpu, "bytes": facts["bytes"], "memory": max(0, peak - before)}


def anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon in /proc/self/status")


def disk_seconds(folder: Path, size: int) -> float:
    """Seconds to write and sync `size` bytes in pieces of 16 MiB."""
    piece, path = os.urandom(2**24), folder / "disk.bin"
    start = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        for _ in range(max(1, size // len(piece))):
            file.write(piece)
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    path.unlink()
    return seconds


def run(name: str, source: Path, out: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", name, str(source), str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[14, 28])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: the system's temporary folder")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--make", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.make:
        make_checkpoint(Path(arguments.make[0]), int(arguments.make[1]))
        return
    if arguments.one:
        name, source, out = arguments.one
        print(json.dumps(convert(name, Path(source), Path(out))))
        return
    print("| fp32 master | conversion | GB written | s | CPU s | GB/s | disk GB/s | ratio | memory GB |")
    print("|---|---|---|---|---|---|---|---|---|")
    for layers in arguments.layers:
        root = Path(tempfile.mkdtemp(prefix="bench-export-", dir=arguments.folder))
        try:
            subprocess.run(
                [sys.executable, __file__, "--make", str(root), str(layers)], check=True, capture_output=True
            )
            checkpoint = root / "checkpoints" / "step_1"
            master = sum(path.stat().st_size for path in (checkpoint / "trainer").glob("*.distcp"))
            for name, source, out in (
                ("checkpoint → bf16", checkpoint, root / "bf16"),
                ("bf16 → FP8", root / "bf16", root / "fp8"),
                ("checkpoint → FP8", checkpoint, root / "direct"),
                ("FP8 → bf16", root / "fp8", root / "back"),
            ):
                size = int(master / (2 if "bf16" in out.name or out.name == "back" else 4))
                times, runs = [disk_seconds(root, size)], []
                for _ in range(arguments.repeat):
                    shutil.rmtree(out, ignore_errors=True)
                    runs.append(run(name, source, out))
                    times.append(disk_seconds(root, size))
                found = {key: statistics.median(one[key] for one in runs) for key in runs[0]}
                disk, rate = size / statistics.median(times), found["bytes"] / found["seconds"]
                print(
                    f"| {master / 1e9:.1f} GB | {name} | {found['bytes'] / 1e9:.2f} | {found['seconds']:.2f} | "
                    f"{found['cpu']:.1f} | {rate / 1e9:.2f} | {disk / 1e9:.2f} | {rate / disk:.2f} | "
                    f"{max(one['memory'] for one in runs) / 1e9:.2f} |",
                    flush=True,
                )
        finally:
            shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
