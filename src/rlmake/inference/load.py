"""How busy the engines are, read from their `/metrics`: samples for the concurrency controller, and metrics of a step.

Both engines expose vLLM's names (`rlmake.inference.metrics` renders ours). Counters are compared with the previous
reading; an engine that was restarted starts its counters anew.
"""

import asyncio
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import httpx

READ_SECONDS = 5.0
_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:{(.*)})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
Samples = dict[str, list[tuple[dict[str, str], float]]]

GAUGES = {
    "num_requests_running": "vllm:num_requests_running",
    "num_requests_waiting": "vllm:num_requests_waiting",
    "kv_cache_usage": "vllm:kv_cache_usage_perc",
}
COUNTERS = {
    "prompt_tokens": "vllm:prompt_tokens_total",
    "generation_tokens": "vllm:generation_tokens_total",
    "requests": "vllm:request_success_total",
    "preemptions": "vllm:num_preemptions_total",
}
HISTOGRAMS = {
    "time_to_first_token": "vllm:time_to_first_token_seconds",
    "inter_token_latency": "vllm:inter_token_latency_seconds",
    "e2e_request_latency": "vllm:e2e_request_latency_seconds",
    "request_queue_time": "vllm:request_queue_time_seconds",
}


@dataclass(frozen=True)
class Load:
    """One engine at one moment. `preemptions` since the last `read`; `capacity` is its KV cache in tokens."""

    kv_usage: float
    running: int
    waiting: int
    preemptions: int
    capacity: int | None = None
    role: str = ""


class Unreadable(Exception):
    """An engine that does not tell its load."""


def parse(text: str) -> Samples:
    """Prometheus' text format: `{name: [(labels, value)]}`; lines that are no sample are skipped."""
    found: Samples = defaultdict(list)
    for line in text.splitlines():
        if match := _LINE.match(line):
            try:
                value = float(match[3])
            except ValueError:
                continue
            found[match[1]].append((dict(_LABEL.findall(match[2] or "")), value))
    return found


class LoadReader:
    """Reads all engines of a run together. `read` is one round for the controller, `look` one for the metrics alone;
    `report` sums up the rounds of both since the last report."""

    def __init__(self, clients: Sequence[httpx.AsyncClient], roles: Sequence[str] = ()):
        """`clients`: one for each engine, at its root (without /v1). `roles`: of each, "prefill" among them."""
        self.clients = list(clients)
        self.roles = [*roles, *[""] * (len(self.clients) - len(roles))]
        self._counters: list[dict[str, float]] = [{} for _ in self.clients]
        self._preempted = [0.0] * len(self.clients)  # since the last `read`
        self._window = _Window()
        self._reading = asyncio.Lock()

    async def read(self) -> list[Load]:
        """A sample of each engine. Raises `Unreadable` naming the first that gives none."""
        async with self._reading:  # an older page must not be compared with a newer one
            loads = await self._read()
            self._preempted = [0.0] * len(self.clients)
            return loads

    async def look(self) -> None:
        """`read` without taking anything from the next one, which still tells the preemptions seen here."""
        async with self._reading:
            await self._read()

    async def _read(self) -> list[Load]:
        pages = await asyncio.gather(*(_page(client) for client in self.clients))
        now, loads = asyncio.get_running_loop().time(), []
        for number, samples in enumerate(pages):
            counters = {name: _total(samples, series) for name, series in COUNTERS.items()}
            before = self._counters[number]
            grown = {name: max(0.0, value - before.get(name, value)) for name, value in counters.items()}
            self._counters[number] = counters
            self._preempted[number] += grown["preemptions"]
            gauges = {name: _total(samples, series) for name, series in GAUGES.items()}
            loads.append(
                Load(
                    gauges["kv_cache_usage"],
                    int(gauges["num_requests_running"]),
                    int(gauges["num_requests_waiting"]),
                    int(self._preempted[number]),
                    _capacity(samples),
                    self.roles[number],
                )
            )
            self._window.add(f"engine_{number}", gauges, grown, _histograms(samples))
        self._window.tick(now)
        return loads

    def report(self) -> dict[str, float]:
        """`inference/<agg|engine_i>/<metric>/<stat>` since the last report."""
        row = self._window.report(pooled=len(self.clients) > 1)
        self._window = self._window.next()
        return row


async def _page(client: httpx.AsyncClient) -> Samples:
    try:
        reply = await client.get("/metrics", timeout=READ_SECONDS)
        reply.raise_for_status()
        samples = parse(reply.text)
    except httpx.HTTPError as error:
        what = (str(error) or type(error).__name__).splitlines()[0]
        raise Unreadable(f"{client.base_url} gives no /metrics: {what}") from None
    if GAUGES["num_requests_running"] not in samples:
        raise Unreadable(f"{client.base_url}/metrics has no {GAUGES['num_requests_running']}")
    return samples


def _total(samples: Samples, series: str) -> float:
    """Sum over the label sets of a series (engine cores of one server); a share is averaged."""
    values = [value for _, value in samples.get(series, ())]
    total = math.fsum(values)
    return total / len(values) if values and series == GAUGES["kv_cache_usage"] else total


def _capacity(samples: Samples) -> int | None:
    """Tokens that the KV cache holds."""
    total = 0
    for labels, _ in samples.get("vllm:cache_config_info", ()):
        try:
            total += int(labels["block_size"]) * int(labels["num_gpu_blocks"])
        except (KeyError, ValueError):
            continue
    return total or None


def _histograms(samples: Samples) -> dict[str, dict[float, float]]:
    """`{metric: {upper bound: cumulative count}}`, with the sum of all values under −1."""
    found: dict[str, dict[float, float]] = {}
    for name, series in HISTOGRAMS.items():
        buckets: dict[float, float] = defaultdict(float)
        for labels, value in samples.get(f"{series}_bucket", ()):
            buckets[float(labels["le"])] += value
        if buckets:
            buckets[-1.0] = _total(samples, f"{series}_sum")
            found[name] = dict(buckets)
    return found


class _Window:
    """What was read since the last report, by engine."""

    def __init__(self) -> None:
        self.gauges: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.grown: dict[tuple[str, str], float] = defaultdict(float)
        self.first: dict[tuple[str, str], dict[float, float]] = {}
        self.last: dict[tuple[str, str], dict[float, float]] = {}
        self.began: float | None = None
        self.ended: float | None = None

    def add(self, engine: str, gauges: Mapping[str, float], grown: Mapping[str, float], histograms: Mapping) -> None:
        for name, value in gauges.items():
            self.gauges[engine, name].append(value)
        for name, value in grown.items():
            self.grown[engine, name] += value
        for name, buckets in histograms.items():
            self.first.setdefault((engine, name), buckets)
            self.last[engine, name] = buckets

    def tick(self, now: float) -> None:
        self.began = now if self.began is None else self.began
        self.ended = now

    def next(self) -> "_Window":
        """The window that goes on where this one ends."""
        window = _Window()
        window.began = window.ended = self.ended
        window.first = dict(self.last or self.first)
        return window

    def report(self, pooled: bool) -> dict[str, float]:
        engines = sorted({engine for engine, _ in self.gauges})
        row: dict[str, float] = {}
        for scope, members in (("agg", engines), *(((one, [one]) for one in engines) if pooled else ())):
            row |= self._scope(f"inference/{scope}", members)
        return row

    def _scope(self, prefix: str, members: Iterable[str]) -> dict[str, float]:
        row: dict[str, float] = {}
        members = list(members)
        for name in GAUGES:
            if values := [value for one in members for value in self.gauges[one, name]]:
                row |= {f"{prefix}/{name}/mean": math.fsum(values) / len(values), f"{prefix}/{name}/max": max(values)}
                row[f"{prefix}/{name}/min"] = min(values)
        seconds = (self.ended or 0.0) - (self.began or 0.0)
        if seconds > 0:
            for name in COUNTERS:
                row[f"{prefix}/{name}/rate"] = math.fsum(self.grown[one, name] for one in members) / seconds
        for name in HISTOGRAMS:
            buckets: dict[float, float] = defaultdict(float)
            for one in members:
                if (one, name) in self.last:
                    first = self.first[one, name]
                    for bound, count in self.last[one, name].items():
                        buckets[bound] += max(0.0, count - first.get(bound, 0.0))
            row |= {f"{prefix}/{name}/{stat}": value for stat, value in _quantiles(buckets).items()}
        return row


def _quantiles(buckets: dict[float, float]) -> dict[str, float]:
    """mean, p50, p90, p99 of a cumulative histogram, linear inside a bucket; nothing when it is empty."""
    total, bounds = buckets.get(math.inf, 0.0), sorted(bound for bound in buckets if bound >= 0)
    if total <= 0:
        return {}
    found = {"mean": buckets.get(-1.0, 0.0) / total}
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        low, below = 0.0, 0.0
        for bound in bounds:
            if buckets[bound] >= share * total:
                inside = buckets[bound] - below
                width = (bound - low) if math.isfinite(bound) else 0.0
                found[name] = low + (width * (share * total - below) / inside if inside else 0.0)
                break
            low, below = bound, buckets[bound]
    return found
