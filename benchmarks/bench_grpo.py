"""GRPO on two GPUs, rlmake against TRL's trainer with its vLLM server, in one run: tokens per second once warm.

    python benchmarks/bench_grpo.py --python VLLM_PYTHON [--steps 12] [--only rlmake trl] [--out grpo.json]
    python benchmarks/bench_grpo.py --python VLLM_PYTHON --only rlmake --words 90 --reply 256    # who waits for whom

Qwen3-0.6B's shape with random weights, so every reply is as long as it may be; batch, group, lengths, rate of learning
and reward (a hash of the reply) are the same. vLLM on the first GPU, the trainer on the second. Tokens: of prompts and
replies, of all rollouts of a step. The first four steps are warm-up. `--python` has vLLM, and where TRL is measured
TRL with liger-kernel and accelerate as well: its trainer takes vLLM's side of the transfer from there.

Idle, in shares of the measured time: the trainer while it waits for a batch; the engine while no request runs (its own
gauge, looked at twice a second) or it is paused for new weights.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import bench_transfer
import httpx

BATCH, GROUP, REPLY, WARM_UP = 256, 16, 512, 4
ENGINE = ["inference/agg/num_requests_running/mean", "inference/agg/num_requests_running/min",
          "inference/agg/generation_tokens/rate", "inference/agg/inter_token_latency/mean"]  # fmt: skip
HERE = Path(__file__).parent


def make_model(root: Path, shape: str) -> Path:
    """Every id of the vocabulary has a text, or replies could not be told apart."""
    folder = bench_transfer.make_model(shape, root)
    path = folder / "tokenizer.json"
    table = json.loads(path.read_text())
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    known = {*table["model"]["vocab"].values(), *(token["id"] for token in table["added_tokens"])}
    table["model"]["vocab"] |= {f"<{index}>": index for index in range(size) if index not in known}
    path.write_text(json.dumps(table))
    return folder


def rlmake(model: Path, root: Path, args: argparse.Namespace) -> dict:
    """An RL run as a user starts it; a step's seconds are the trainer's, from batch to batch."""
    from rlmake.monitors import read

    run = root / "run"
    place = {"num_train_gpus": 1, "num_infer_gpus": 1, "gpus_per_node": 2}
    if args.cpu:
        place = {"num_train_gpus": 0, "num_infer_gpus": 0}
    engine = (
        {}
        if args.cpu
        else {"python": args.python, "vllm.max_num_seqs": 2 * args.batch, "vllm.gpu_memory_utilization": 0.6}
    )
    keys = {
        "model.name": model, "max_steps": args.steps, "seq_len": args.seq, "output_dir": run,
        **{f"deployment.{key}": value for key, value in place.items()},
        **{f"inference.{key}": value for key, value in engine.items()},
        "inference.vllm.max_model_len": args.longest or args.reply + 256,
        "orchestrator.batch_size": args.batch, "orchestrator.train.group_size": args.group,
        "orchestrator.train.sampling.max_completion_tokens": args.reply,
        "orchestrator.renderer.name": "custom",
        "orchestrator.renderer.import_path": "rlmake.models.chatml.ChatMLRenderer",
        "trainer.optim.lr": 1e-6,
    }  # fmt: skip
    lines = [
        f"{key} = {json.dumps(value if isinstance(value, int | float) else str(value))}" for key, value in keys.items()
    ]
    (root / "rl.toml").write_text(
        "\n".join(lines) + ("" if args.cpu else "\n[trainer.model.compile]") + "\n"
        f'[[orchestrator.train.source]]\nenv.taskset.id = "hash-task"\nenv.taskset.words = {args.words}\n'
        'env.agent.harness.id = "inproc-chat"\n'
        'env.agent.runtime.type = "subprocess"\nserve = { max_workers = 8, multiplex = 64 }\n'
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", "from rlmake.cli.main import rl; rl()", "@", root / "rl.toml"]
    begun = time.perf_counter()
    gauge = Gauge(run)
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    gauge.stop.set()
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-4000:])
    (folder,) = run.iterdir()
    times = [row.time for row in read(folder) if row.producer == "trainer" and "time/step" in row.metrics]
    rows = [row for row in read(folder) if row.step > WARM_UP]
    steps = [row.metrics for row in rows if row.producer == "trainer" and "time/step" in row.metrics]
    batches = [row.metrics for row in rows if row.producer == "orch" and "seq_len/all/mean" in row.metrics]
    seconds = sum(step["time/step"] for step in steps) / len(steps)
    tokens = sum(batch["seq_len/all/mean"] for batch in batches) / len(batches) * args.batch
    waits = {
        key: round(sum(step.get(key, 0) for step in steps) / len(steps), 3)
        for key in sorted({key for step in steps for key in step if key.startswith("time/")})
    }
    orchestrator = {
        key: round(sum(batch.get(key, 0) for batch in batches) / len(batches), 3)
        for key in sorted({key for batch in batches for key in batch if key.startswith(("time/", "off_policy"))})
    }
    engine = {
        key.removeprefix("inference/agg/"): round(sum(batch[key] for batch in batches) / len(batches), 4)
        for key in ENGINE if all(key in batch for batch in batches)
    }  # fmt: skip
    idle = gauge.idle(times[WARM_UP - 1], times[-1])
    if idle is not None:
        idle += sum(batch.get("watcher/update_seconds", 0) for batch in batches) / len(batches) / seconds
    kl = [step["mismatch_kl/all/mean"] for step in steps if "mismatch_kl/all/mean" in step]
    return {
        "tokens_per_second": tokens / seconds, "step_s": seconds, "tokens_per_step": tokens,
        "whole_s": time.perf_counter() - begun, "engine_up_s": gauge.up and gauge.up - begun,
        "idle": {"trainer": waits.get("time/wait_for_batch", 0) / seconds, "engine": idle},
        "trainer": waits, "orchestrator": orchestrator, "mismatch_kl": kl, "engine": engine,
    }  # fmt: skip


class Gauge(threading.Thread):
    """How many requests run in the engine of the run below `root`, twice a second: the answer costs the engine time."""

    def __init__(self, root: Path):
        super().__init__(daemon=True)
        self.root, self.stop = root, threading.Event()
        self.seen: list[tuple[float, float]] = []
        self.up: float | None = None
        self.start()

    def run(self) -> None:
        address = None
        with httpx.Client(trust_env=False, timeout=5) as client:
            while not self.stop.wait(0.5):
                try:
                    if address is None:
                        (file,) = self.root.rglob("inference.address")
                        address = "http://" + re.search(r"[\w.]+:\d+", file.read_text())[0]
                    said = client.get(f"{address}/metrics").text
                    running = re.search(r"^vllm:num_requests_running\S* (\S+)", said, re.M)
                    self.seen.append((time.time(), float(running[1])))
                    self.up = self.up or time.perf_counter()
                except (httpx.HTTPError, OSError, ValueError, TypeError):
                    continue

    def idle(self, start: float, end: float) -> float | None:
        """The share of looks between two times at which no request ran; None without a look."""
        seen = [running for at, running in self.seen if start < at <= end]
        return sum(running == 0 for running in seen) / len(seen) if seen else None


def trl(model: Path, root: Path, args: argparse.Namespace) -> dict:
    server_env = os.environ | {"CUDA_VISIBLE_DEVICES": "0"}
    command = [
        args.python, "-m", "trl.scripts.vllm_serve", "--model", model, "--port", "8123", "--gpu_memory_utilization",
        "0.6", "--max_model_len", str(args.longest or args.reply + 256), "--dtype", "bfloat16",
        "--max-num-seqs", str(2 * args.batch),
    ]  # fmt: skip
    begun = time.perf_counter()
    with open(root / "serve.log", "w") as log:
        server = subprocess.Popen(command, env=server_env, stdout=log, stderr=log, start_new_session=True)
    try:
        while True:
            try:
                if httpx.get("http://127.0.0.1:8123/health").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            if server.poll() is not None or time.perf_counter() - begun > 240:
                raise RuntimeError((root / "serve.log").read_text()[-4000:])
            time.sleep(0.5)
        command = [args.python, HERE / "trl_grpo.py", model, "8123", *map(str, (
            args.steps, args.batch, args.group, args.reply, WARM_UP, args.rows
        ))]  # fmt: skip
        done = subprocess.run(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": "1"}, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError((done.stdout + done.stderr)[-4000:] + (root / "serve.log").read_text()[-1500:])
        return json.loads([line for line in done.stdout.splitlines() if line.startswith('{"')][-1])
    finally:
        os.killpg(server.pid, 9)
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--only", nargs="*", default=["rlmake", "trl"])
    parser.add_argument("--shape", choices=bench_transfer.SHAPES, default="qwen3-0.6b")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=BATCH, help="rollouts of a step")
    parser.add_argument("--group", type=int, default=GROUP)
    parser.add_argument("--reply", type=int, default=REPLY, help="tokens of a reply")
    parser.add_argument("--longest", type=int, help="tokens of prompt and reply for which the engine is made")
    parser.add_argument("--words", type=int, default=24, help="words of a prompt, of five tokens and more; rlmake's")
    parser.add_argument("--seq", type=int, default=8192, help="tokens of a packed row, rlmake's")
    parser.add_argument("--rows", type=int, default=16, help="rollouts of a micro-batch, TRL's")
    parser.add_argument("--cpu", action="store_true", help="rlmake's embedded engine: to try the script")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model = make_model(root, args.shape)
        for name in args.only:
            try:
                found[name] = (rlmake if name == "rlmake" else trl)(model, root, args)
            except RuntimeError as error:
                found[name] = {"failed": str(error)}
            print(name, json.dumps(found[name]), flush=True)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
