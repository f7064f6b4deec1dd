"""New weights, from "the trainer has them" to "the engine serves them": by a group and by files, with the real parts.

    python benchmarks/bench_transfer.py --model DIR [--device cuda] [--python .venv-vllm/bin/python] [--engine vllm]
        [--shape qwen3-0.6b] [--folder /dev/shm/x] [--repeats 8] [--starts 2]

Without --model a random one of --shape is made. The engine is a server process (on the first GPU), the trainer's side
this process (on the second): the trainer's `Sender`, the orchestrator's `Watcher` and `Engines`. On a CPU the
group is gloo's. `idle` is measured without requests, `busy` while 64 requests are under way. Prints JSON.

By files, `stages` says where the seconds go (medians). One after the other: the trainer's `gather` (into host memory)
and `finish` (what is not written and hashed by then), `offer` (markers, until the orchestrator has seen them),
`receive` (the orchestrator's), `pause` (pausing, resuming and the calls), the engine's `check` and `load`. Beside them,
summed over threads: the trainer's `copy` (waiting for the GPU), `write` and `hash`. `starts`: of the engine, and
whether compiled files were there from before.
"""

import argparse
import asyncio
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
from types import SimpleNamespace

import httpx
import torch
from torch import nn

from rlmake.config import InitConfig
from rlmake.config.shared import ClientConfig, FilesystemBroadcast, NcclBroadcast
from rlmake.core.rundir import RunContext
from rlmake.models import init, loading
from rlmake.orchestrator.engines import Engines
from rlmake.orchestrator.watcher import Watcher
from rlmake.trainer.broadcast import Sender
from rlmake.transport import WeightReceiver

SHAPES = {
    "qwen3-0.6b": {
        "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "max_position_embeddings": 4096,
    },
    "tiny": {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
        "intermediate_size": 160, "max_position_embeddings": 512,
    },
}  # fmt: skip
VOCABULARY = {"qwen3-0.6b": 151_936}


class Side:
    """The orchestrator's side: follows versions in its own thread, and notes when each is served."""

    def __init__(self, url: str, ctx: RunContext, timeout: float):
        self.served: dict[int, float] = {}
        self.seconds: dict[int, dict] = {}
        self.failure: BaseException | None = None

        async def follow() -> None:
            engines = Engines(ClientConfig(base_url=f"{url}/v1"), "policy", ctx)
            watcher = Watcher(WeightReceiver(ctx.run_dir, ctx), engines, timeout, -1, self.pending, self.installed)
            self.watcher = watcher
            await engines.wait_ready()
            await watcher.follow()

        def run() -> None:
            try:
                asyncio.run(follow())
            except BaseException as error:
                self.failure = error

        threading.Thread(target=run, daemon=True).start()

    async def pending(self, version: int) -> None:
        """Nothing is dropped here."""

    async def installed(self, version: int) -> None:
        self.served[version] = time.perf_counter()
        self.seconds[version] = self.watcher.seconds | self.watcher.parts

    def wait(self, version: int) -> float:
        while version not in self.served:
            if self.failure:
                raise self.failure
            time.sleep(0.001)
        return self.served[version]


def start_server(args: argparse.Namespace, model: Path, root: Path) -> tuple[subprocess.Popen, str, dict]:
    vllm = {"model": str(model), "served_model_name": "policy", "max_model_len": 512}
    if args.engine == "vllm":
        vllm |= {"dtype": "auto" if args.device == "cuda" else "float32", "gpu_memory_utilization": 0.5}
        vllm |= {"enforce_eager": True} if args.eager else {}
    table = {
        "engine": args.engine, "device": args.device, "cpu_threads": 1, "server": {"port": 0}, "vllm": vllm,
        "output_dir": str(root / "server"), "check_weights": args.check,
    }  # fmt: skip
    (root / "server").mkdir(exist_ok=True)
    (root / "inference.json").write_text(json.dumps(table))
    address = root / "address"
    address.unlink(missing_ok=True)
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "vllm"
    cache = Path(os.environ.get("VLLM_CACHE_ROOT", cache)) / "torch_compile_cache"
    compiled = "there" if cache.is_dir() and any(cache.iterdir()) else "none"
    command = [args.python, "-m", "rlmake.inference.server", "@", str(root / "inference.json")]
    env = {**os.environ, "PRL_RUN_ID": "bench", "CUDA_VISIBLE_DEVICES": "0" if args.device == "cuda" else ""}
    start = time.perf_counter()
    with open(args.log or root / "server.log", "w") as log:
        process = subprocess.Popen([*command, "--address-file", str(address)], env=env, stdout=log, stderr=log)
    while not address.exists():
        if process.poll() is not None:
            sys.exit(f"the engine did not start, see {log.name}:\n{Path(log.name).read_text()[-3000:]}")
        time.sleep(0.05)
    return process, address.read_text(), {"s": round(time.perf_counter() - start, 1), "compiled": compiled}


def load(url: str, stop: threading.Event, counter: list[int]) -> None:
    """64 requests under way at a time; `counter` counts tokens."""

    async def one(client: httpx.AsyncClient) -> None:
        body = {"token_ids": list(range(20, 60)), "sampling_params": {"max_tokens": 256, "ignore_eos": True}}
        while not stop.is_set():
            reply = await client.post("/inference/v1/generate", json=body)
            counter[0] += len(reply.json()["choices"][0]["token_ids"])

    async def many() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=64)) as client:
            await asyncio.gather(*(one(client) for _ in range(64)))

    asyncio.run(many())


def measure(args: argparse.Namespace, url: str, model: nn.Module, config: object, root: Path, name: str) -> dict:
    """Seconds of `repeats` versions; the first (which makes the group) stands apart."""
    run_dir = root / name
    run_dir.mkdir(parents=True)
    ctx = RunContext(run_dir, "bench", "bench", 1, None, run_dir, run_dir)
    side = Side(url, ctx, 120)
    device = next(model.parameters()).device
    world = SimpleNamespace(master=True, device=device, on_master=lambda action: action())
    policy = SimpleNamespace(named=lambda: list(model.named_parameters()), exact=args.device == "cpu")
    settings = SimpleNamespace(weight_broadcast=config, check_weights=args.check)
    training = SimpleNamespace(config=settings, world=world, policy=policy, facts={"lora": None}, step=0, ctx=ctx)
    sender = Sender(training)
    found: dict[str, list] = {"first": [], "idle": [], "busy": []}
    phases = {"idle": [], "busy": []}
    stop, counter, thread = threading.Event(), [0], None
    for version in range(2 * args.repeats + 1):
        if version == args.repeats + 1:
            thread = threading.Thread(target=load, args=(url, stop, counter), daemon=True)
            thread.start()
            time.sleep(3)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.0001)
        if device.type == "cuda":
            torch.cuda.synchronize()
        kind = "first" if version == 0 else "busy" if thread else "idle"
        training.step, begun = version, time.perf_counter()
        sender.send()
        found[kind].append(side.wait(version) - begun)
        if kind != "first":
            phases[kind].append({"total": found[kind][-1]} | side.seconds[version] | sender.seconds)
    stop.set()
    if thread:
        thread.join(120)
    medians = {f"{kind}_s": round(statistics.median(values), 4) for kind, values in found.items() if values}
    worst = {f"{kind}_worst_s": round(max(values), 4) for kind, values in found.items() if values and kind != "first"}
    parts = {
        f"{kind}_{key}_s": round(statistics.median(phase[key] for phase in values), 4)
        for kind, values in phases.items()
        for key in ("receive", "update")
    }
    record = json.loads((run_dir / "broadcasts" / f"step_{version}" / "version.json").read_text())
    report = {"transport": record["transport"], **medians, **worst, **parts, "tokens_meanwhile": counter[0]}
    if sender.seconds:
        report["stages"] = {kind: stages(values) for kind, values in phases.items()}
    return report


def stages(versions: list[dict]) -> dict:
    """Medians of the parts of a transfer by files, in their order; see above."""
    for found in versions:
        found["offer"] = found["total"] - sum(found[key] for key in ("gather", "finish", "receive", "update"))
        found["pause"] = found["update"] - found["check"] - found["load"]
    keys = ("gather", "finish", "offer", "receive", "pause", "check", "load")
    found = {key: round(statistics.median(one[key] for one in versions), 4) for key in (*keys, "copy", "write", "hash")}
    return {"one_after_the_other": {key: found.pop(key) for key in keys}, "in_threads": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--engine", choices=("vllm", "transformers"), default="transformers")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--folder", type=Path, help="where files are passed through; a temporary folder when absent")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--starts", type=int, default=1, help="start the engine so many times; the last one serves")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--check", action="store_true", help="with check_weights")
    parser.add_argument("--log", help="where the server's output goes")
    parser.add_argument("--wait-for", type=Path, help="begin when this file is there")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="transfer-", dir=args.folder))
    process = None
    try:
        model_dir = args.model or make_model(args.shape, root)
        starts = []
        for _ in range(args.starts):
            if process is not None:
                process.terminate()
                process.wait(30)
            process, url, start = start_server(args, model_dir, root)
            starts.append(start)
        cuda = args.device == "cuda"
        model = loading.load(model_dir, attn="sdpa" if cuda else "eager", dtype="float32")
        model = model.to(f"cuda:{min(1, torch.cuda.device_count() - 1)}" if cuda else "cpu")
        while args.wait_for and not args.wait_for.exists():
            time.sleep(0.2)
        group = NcclBroadcast(backend="nccl" if cuda else "gloo", timeout=120)
        megabytes = sum(p.numel() for p in model.parameters()) * (2 if cuda else 4) / 1e6
        report = {"engine": args.engine, "megabytes": round(megabytes, 1), "starts": starts}
        report["group"] = measure(args, url, model, group, root, "group")
        report["files"] = measure(args, url, model, FilesystemBroadcast(timeout=120), root, "files")
        if cuda:
            report |= {"card": torch.cuda.get_device_name(0), "torch": torch.__version__}
            report["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        print(json.dumps(report, indent=1))
    finally:
        if process is not None:
            process.terminate()
            process.wait(30)
        shutil.rmtree(root, ignore_errors=True)


def make_model(shape: str, root: Path) -> Path:
    """A random model of a shape. Its tokenizer is small; embedding and head have the shape's rows all the same."""
    (root / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    tokenizer = {"text": str(root / "text.txt"), "vocab_size": 300}
    small = SHAPES[shape] if shape == "tiny" else SHAPES[shape] | {"num_hidden_layers": 1}
    init.make(InitConfig(architecture=small, tokenizer=tokenizer, dtype="float32"), root / "model")
    if shape != "tiny":
        config = loading.load_config(root / "model")
        config.vocab_size, config.num_hidden_layers = VOCABULARY[shape], SHAPES[shape]["num_hidden_layers"]
        config.layer_types = ["full_attention"] * config.num_hidden_layers
        model = loading.build(config, attn="eager", dtype="bfloat16", device="cpu")
        loading.save_hf(model.state_dict(), root / "model", config, dtype="bfloat16")
    return root / "model"


if __name__ == "__main__":
    main()
