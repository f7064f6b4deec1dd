"""The orchestrator by itself: CPU per episode, event-loop stalls, packing, and what asynchronous collection brings.

    python benchmarks/bench_rl.py [overhead] [packing] [asynchronous]

`overhead`: the real orchestrator in this process, everything around it scripted in another (`rl_stand_in.py`); its CPU
time per episode, the longest turn of its event loop, and how late that was at most. `packing`: 100,000 samples onto
8 ranks. `asynchronous`: steps per hour against lock-step with episodes whose time has a long tail. CPU times and ratios
in one run: they hold on a machine that is shared, lateness only on an idle one.
"""

import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from loguru import logger

from rlmake.config import OrchestratorConfig, parse
from rlmake.core.offload import favour_loop
from rlmake.core.rundir import RunContext
from rlmake.envs.client import EnvHandle, EnvTask
from rlmake.envs.wire import Wire
from rlmake.orchestrator.orchestrator import Orchestrator
from rlmake.orchestrator.packing import CostModel, plan

QWEN3_8B = {
    "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 12288, "vocab_size": 151936,
}  # fmt: skip


class Measured(NamedTuple):
    """Of one run: the orchestrator's CPU seconds and episodes, wall seconds, the loop's worst lateness and its longest
    turn in CPU time, both in ms."""

    cpu: float
    episodes: int
    wall: float
    lag: float
    turn: float


def run(
    *, tokens: int, latency: tuple[float, float], steps: int, batch: int, inflight: int, train_s: float, **more
) -> Measured:
    """One run to its end."""
    with tempfile.TemporaryDirectory() as folder:
        given = {"tokens": tokens, "latency": latency, "steps": steps, "train_s": train_s}
        command = [sys.executable, str(Path(__file__).with_name("rl_stand_in.py")), folder, json.dumps(given)]
        around = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            place = json.loads(around.stdout.readline())
            return asyncio.run(_run(Path(folder), place, tokens, steps, batch, inflight, more))
        finally:
            around.kill()
            around.wait()


async def _run(folder: Path, place: dict, tokens: int, steps: int, batch: int, inflight: int, more: dict) -> Measured:
    raw = {
        "model": {"name": "toy", "client": {"base_url": place["url"]}}, "renderer": {"name": "qwen3"},
        "batch_size": batch, "seq_len": tokens, "max_steps": steps, "output_dir": str(folder),
        "concurrency": {"min_inflight": inflight, "max_inflight": inflight},
        "train": {"group_size": 8, "source": [{"name": "toy", "env": {"taskset": {"id": "toy"}}}]},
        "monitors": {"file": None}, **more,
    }  # fmt: skip
    ctx = RunContext(folder, "run", "run", 1, None, folder / "configs/attempt_1", folder / "logs")
    favour_loop()
    orchestrator = Orchestrator(parse(OrchestratorConfig, raw), ctx)

    async def connect(split, sources):
        tasks = [EnvTask(n, f"k{n}", "", "Task", {"idx": n, "prompt": "p" * 256}) for n in range(1000)]
        return {one.name: EnvHandle(one.name, iter(tasks), True, Wire(place["address"])) for one in sources}

    orchestrator._connect = connect
    lags: list[float] = []
    task = asyncio.ensure_future(orchestrator.run())
    while not hasattr(orchestrator, "lag"):
        await asyncio.sleep(0.01)
    report = orchestrator.lag.report

    def noted() -> dict[str, float]:
        lags.extend(orchestrator.lag.lags)
        return report()

    orchestrator.lag.report = noted
    started, cpu = time.monotonic(), time.process_time()  # connected, nothing dispatched yet
    ended, count = orchestrator.accounts.end, 0

    def end(env: str, ok: bool) -> None:
        nonlocal count
        count += 1
        ended(env, ok)

    orchestrator.accounts.end = end
    turns = _watch_turns()
    await task
    return Measured(
        time.process_time() - cpu, count, time.monotonic() - started, 1e3 * max(lags, default=0.0), 1e3 * max(turns)
    )


def _watch_turns() -> list[float]:
    """CPU seconds of each turn of the running loop, in its own thread, from now on."""
    loop, turns = asyncio.get_running_loop(), []
    turn = loop._run_once

    def timed() -> None:
        began = time.thread_time()
        turn()
        turns.append(time.thread_time() - began)

    loop._run_once = timed
    return turns


def overhead() -> None:
    """Two sizes: their difference is what an episode costs, without the start of the run and the filling of memory."""
    for tokens in (512, 4096):
        given = {"tokens": tokens, "latency": (5.0, 0.3), "batch": 1024, "inflight": 2048, "train_s": 0.1}
        run(**given | {"latency": (0.1, 0.0), "batch": 64, "inflight": 64}, steps=1)  # imports
        short, long = (run(**given, steps=steps) for steps in (3, 9))
        each = (long.cpu - short.cpu) / (long.episodes - short.episodes)
        print(
            f"overhead, {tokens} tokens a trace, 2,048 in flight: {1e3 * each:.2f} ms CPU per episode "
            f"({1e3 * long.cpu / long.episodes:.2f} with the start of the run; {short.episodes} and {long.episodes} "
            f"episodes), longest turn of the event loop {max(short.turn, long.turn):.0f} ms of CPU, late by "
            f"{max(short.lag, long.lag):.0f} ms at most"
        )


def packing() -> None:
    draw = random.Random(0)
    lengths = [min(8192, max(16, int(draw.lognormvariate(6.5, 1.0)))) for _ in range(100_000)]
    cost = CostModel.of_config(QWEN3_8B)
    began = time.process_time()
    ranks = plan(lengths, 8192, 8, cost)
    seconds = time.process_time() - began
    rows = [row for rank in ranks for row in rank]
    padding = 1 - sum(lengths) / (8192 * len(rows))
    loads = [sum(cost([lengths[i] for i in row]) for row in rank) for rank in ranks]
    print(
        f"packing 100,000 samples: {seconds:.2f} s CPU, padding {100 * padding:.2f} %, "
        f"rank imbalance {100 * (max(loads) / (sum(loads) / len(loads)) - 1):.3f} %"
    )


def asynchronous() -> None:
    """The asynchronous run has more steps: its start is slow (50 s to come to 128 in flight), and counted."""
    given = {"tokens": 512, "latency": (0.4, 1.0), "batch": 64, "inflight": 128, "train_s": 0.2}
    hours = {}
    for name, deterministic, steps in (("lock-step", True, 15), ("asynchronous", False, 60)):
        seconds = run(**given, steps=steps, deterministic=deterministic).wall
        hours[name] = 3600 * steps / seconds
        print(f"{name}: {hours[name]:.0f} steps an hour")
    gain = hours["asynchronous"] / hours["lock-step"]
    print(f"asynchronous against lock-step, episodes of 0.4 s with sigma 1.0: {gain:.2f} x")


if __name__ == "__main__":
    logger.remove()
    logger.add(sys.stderr, level="ERROR")
    for name in sys.argv[1:] or ("overhead", "packing", "asynchronous"):
        {"overhead": overhead, "packing": packing, "asynchronous": asynchronous}[name]()
