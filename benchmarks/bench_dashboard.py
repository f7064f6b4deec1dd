"""The dashboard on a large run: 100,000 episodes in 5 GB of traces, 2,000 metrics × 10,000 steps, in a real Chromium.

    make bench-dashboard                    # writes about 6 GB to a temporary folder, measures, removes it
    python benchmarks/bench_dashboard.py --keep /data/bench     # keeps the run and uses it again

Times are from the start of navigation until the thing is on the screen, in a browser that runs already, with nothing of
the page in its cache; those marked "cold" with a server that has read nothing yet. Beside each: the CPU time that the
server and the page's process took until then, which say more than the clock where the machine does other things too
(its load is printed). Memory is the server's resident size, polling the CPU time an open page costs it.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec

from rlmake.core.rundir import RunContext
from rlmake.monitors import mark_attempt
from rlmake.monitors.traces import Work, layout, records
from rlmake.monitors.traces.chunks import Chunks, to_line

EPISODES, TRACE_BYTES, METRICS, STEPS = 100_000, 5_000_000_000, 2_000, 10_000
BIG_NODES, BIG_TOKENS = 500, 100_000
POLL_SECONDS = 30
ROWS = "document.querySelectorAll('tr[data-pick]').length > 50"
CHARTS = "document.querySelectorAll('.chart .plot path.line')"


def make(run: Path, scale: float) -> None:
    """A run as the monitors write it; the filling is the same text everywhere, which costs the reader as much."""
    episodes, steps = max(200, int(EPISODES * scale)), max(50, int(STEPS * scale))
    folder = run / "configs/attempt_1/resolved"
    folder.mkdir(parents=True)
    (folder / "orchestrator.json").write_text(json.dumps({"model": {"name": "bench"}, "max_steps": steps}))
    (run / "logs/attempt_1").mkdir(parents=True)
    ctx = RunContext(run, "bench", "bench", 1, None, run / "configs/attempt_1", run / "logs/attempt_1")
    mark_attempt(ctx, 0)
    rng = random.Random(0)
    with open(run / "monitors/file/metrics.jsonl", "ab") as file:
        names = ["reward/all/mean", "loss/mean", *(f"train/agg/all/metric_{n:04d}/mean" for n in range(METRICS - 2))]
        for step in range(1, steps + 1):
            row = {"step": step, "time": 1.8e9 + step, "producer": "orch", "attempt": 1}
            file.write(msgspec.json.encode(row | {name: rng.random() for name in names}) + b"\n")
    root = run / "monitors/file" / layout.FOLDER
    chunks = Chunks(layout.stream(root), layout.index(root), 5 << 40, compress=False)
    filling = "lorem ipsum dolor sit amet " * int(TRACE_BYTES / EPISODES / 2 / 27)  # of two messages each
    for number in range(episodes):
        big = number == episodes - 1
        row = record(
            number, 1 + number * steps // episodes, rng.random(), BIG_NODES if big else 3, "text" if big else filling
        )
        line = to_line(row)
        chunks.append(line, records.index_row(row))
    chunks.close()
    notes = Chunks(layout.annotations(root, "orch"), layout.annotation_index(root, "orch"), 5 << 40, compress=False)
    for number in range(episodes):
        trace = records.trace_id("bench", f"env/{number}/0")
        info = {"advantage": 0.5, "effective": True, "ship": {"step": 1 + number * steps // episodes, "version": 0}}
        row = records.annotation(trace, 1, info)
        notes.append(to_line(row), records.annotation_index_row(row))
    notes.close()


def record(number: int, step: int, reward: float, nodes: int, text: str) -> dict:
    tokens = BIG_TOKENS // nodes if nodes == BIG_NODES else 20
    made = [
        {
            "parent": n - 1 if n else None, "sampled": n % 2 == 1, "timestamp": 1.8e9 + n,
            "message": {"role": "assistant" if n % 2 else "user", "content": text if n else "task"},
            "token_ids": [n] * tokens, "mask": [n % 2 == 1] * tokens, "is_content": [True] * tokens,
            "logprobs": [-0.1234] * (tokens if n % 2 else 0),
        }
        for n in range(nodes)
    ]  # fmt: skip
    trace = {
        "agent": {"name": "agent"}, "nodes": made, "rewards": {"score": {"score": reward}}, "ok": True,
        "calls": [{"node": n, "time": {"start": 1.8e9 + n - 1, "end": 1.8e9 + n}} for n in range(1, nodes, 2)],
    }  # fmt: skip
    plain = {"env": {"name": "env"}, "task": {"key": f"t{number}"}, "ok": True, "traces": [trace | {"id": "x"}]}
    work = Work("train", "env", f"env/{number // 8}", f"env/{number}/0", step, step - 1, 1.8e9 + number)
    episode = SimpleNamespace(to_record=lambda _: plain)
    return records.record(records.Arrival(work, episode, step - 1, 1.8e9 + number + 5), "bench", 1, 4)


class Server:
    """The real command in a process of its own."""

    def __init__(self, outputs: Path):
        code = "import sys; from rlmake.dashboard.server import main; main(sys.argv[1:])"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(outputs), "--port", "0"], stdout=subprocess.PIPE, text=True
        )
        self.url = self.process.stdout.readline().split()[-1]

    def cpu(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory(self, what: str = "VmRSS") -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition(f"{what}:")[2].split()[0]) / 1024

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)


def measure(outputs: Path) -> Iterator[str]:
    """Lines of the result."""
    from playwright.sync_api import sync_playwright

    def line(what: str, value: float, rest: str = "") -> str:
        return f"{what:<48} {value:8.2f}   {rest}load {os.getloadavg()[0]:.1f}"

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])

        def until(name: str, path: str, ready: str, server: Server) -> str:
            page = browser.new_page(viewport={"width": 1280, "height": 860})
            tools = page.context.new_cdp_session(page)
            tools.send("Performance.enable")
            start, cpu = time.perf_counter(), server.cpu()
            page.goto(server.url + path, wait_until="commit")
            page.wait_for_function(f"() => {ready}", timeout=120_000, polling=20)
            wall, cpu = time.perf_counter() - start, server.cpu() - cpu
            found = {one["name"]: one["value"] for one in tools.send("Performance.getMetrics")["metrics"]}
            page.close()
            return line(name + " (s)", wall, f"server {cpu:.2f} s, page {found['TaskDuration']:.2f} s of CPU; ")

        count = (outputs / "bench/monitors/file/traces/stream.index.jsonl").read_bytes().count(b"\n")
        big = f"/?run=bench&tab=traces&line={count - 1}"
        messages = f"document.querySelectorAll('article.message').length >= {BIG_NODES}"
        tokens = "document.querySelectorAll('.tokens span').length > 400"
        for name, path, ready in (
            ("list of episodes, cold", "/?run=bench&tab=traces", ROWS),
            ("first chart, cold", "/?run=bench", f"{CHARTS}.length >= 1"),
            ("metrics' first four charts, cold", "/?run=bench&tab=metrics", f"{CHARTS}.length >= 4"),
            ("episode of 500 messages, cold", big, messages),
        ):
            server = Server(outputs)
            yield until(name, path, ready, server)
            server.close()
        server = Server(outputs)
        page = browser.new_page()
        page.goto(f"{server.url}/?run=bench&tab=metrics")
        while json.loads(browser_get(server, "/api/runs/bench/keys"))["progress"] < 0.999:
            time.sleep(1)
        yield line("all metrics taken in, CPU of the server (s)", server.cpu())
        while not json.loads(browser_get(server, "/api/runs/bench/rollouts"))["whole"]:
            time.sleep(1)
        yield line("episodes too, CPU of the server (s)", server.cpu())
        page.close()
        yield until("list again", "/?run=bench&tab=traces", ROWS, server)
        yield until("first chart again", "/?run=bench", f"{CHARTS}.length >= 1", server)
        yield until("episode of 500 messages again", big, messages, server)
        yield until("its tokens", f"{big}&overlay=logprob", tokens, server)
        yield line("server's memory, all taken in (MB)", server.memory())
        yield line("server's memory, peak (MB)", server.memory("VmHWM"))
        page = browser.new_page()
        for name, tab in (("the list", "traces"), ("the overview", "overview")):
            page.goto(f"{server.url}/?run=bench&tab={tab}")
            time.sleep(5)
            cpu = server.cpu()
            time.sleep(POLL_SECONDS)
            yield line(f"polling of {name} (% of a core)", 100 * (server.cpu() - cpu) / POLL_SECONDS)
        browser.close()
        server.close()


def browser_get(server: Server, path: str) -> bytes:
    import urllib.request

    with urllib.request.urlopen(server.url + path, timeout=60) as answer:
        return answer.read()


def chromium() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    sys.exit("error: no chromium here; apt-get install chromium")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--keep", type=Path, help="folder of the run; kept, and used again when it is there")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full size")
    args = parser.parse_args()
    chromium()
    folder = args.keep or Path(tempfile.mkdtemp(prefix="bench-dashboard-"))
    try:
        run = folder / "outputs" / "bench"
        if not run.exists():
            start = time.perf_counter()
            make(run, args.scale)
            size = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
            print(f"made {size / 1e9:.1f} GB in {time.perf_counter() - start:.0f} s", flush=True)
        for line in measure(folder / "outputs"):
            print(line, flush=True)
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
