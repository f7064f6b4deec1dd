"""Keys and values of what is not built: refused with a reason, never accepted and ignored.

To bring a feature in, delete its line here, and add its field to the schema where it has none. A key stands for itself
in every entry point and below every table that ends so (`model.lora` is also `trainer.model.lora`); `entry:key` is
anchored at the root of that entry point.
"""

import functools
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlmake.config.fields import Config, walk
from rlmake.core.errors import Fault


@dataclass(frozen=True)
class Unbuilt:
    """A refused key. `refuse`: only these values; otherwise any value but null, false, and those in `accept`."""

    key: str
    reason: str
    refuse: tuple[Any, ...] | None = None
    accept: tuple[Any, ...] = ()

    def hits(self, value: Any) -> bool:
        if self.refuse is not None:
            return value in self.refuse
        return value not in (None, False, "None", "false", *self.accept)


UNBUILT = [
    Unbuilt("weight_broadcast.type", "transfer by nixl is not built; use 'nccl' or 'filesystem'", ("nixl",)),
    Unbuilt(
        "sft:weight_broadcast.type", "nccl to the evaluations of SFT is not built yet; use 'filesystem'", ("nccl",)
    ),
    Unbuilt("weight_broadcast.quantize_in_weight_transfer", "sending the engine's quantised form is not built yet"),
    Unbuilt("vllm.api_server_count", "several API servers of one engine are not built", accept=(1, "1")),
    Unbuilt("deployment.type", "separate prefill and decode nodes are not built yet", refuse=("disaggregated",)),
    Unbuilt(
        "slurm.shared_fs",
        "copies of the project on each node are not built yet: every node must see its folder",
        refuse=(False,),
    ),
    Unbuilt("model.ep", "expert parallelism is not built yet", accept=("auto", 1, "1")),
    Unbuilt("model.moe_router_dtype", "routers compute in the type of the model"),
    Unbuilt("model.full_offload", "full offloading is not built yet"),
    Unbuilt("model.quantization", "quantised training is not built yet"),
    Unbuilt("model.vlm", "vision models are not built yet"),
    Unbuilt(
        "model.attn",
        "flash attention kernels are not built yet",
        refuse=(
            "flash_attention_2",
            "flash_attention_3",
            "flash_attention_4",
        ),
    ),
    Unbuilt("enable_router_replay", "router replay is not built yet"),
    Unbuilt("enable_token_export", "token export is not built yet"),
    Unbuilt("metrics_server", "the metrics server is not built yet"),
    Unbuilt("memory_profiler_path", "the memory profiler is not built yet"),
    Unbuilt("heartbeat", "heartbeats are not built yet"),
    Unbuilt("ckpt.skip_scheduler", "the schedule follows from the step; there is no state to skip"),
    Unbuilt("ckpt.wait_for_weights_timeout", "weights are published before the orchestrator resumes; nothing waits"),
    Unbuilt("rollout_transport.hwm", "batches are asked for, step by step; there is no high-water mark"),
    Unbuilt("log.log_data", "logging of samples is not built yet"),
    Unbuilt("log.interval", "periodic progress lines are not built yet"),
    Unbuilt("kv_cache_offload", "offloading of the KV cache is not built yet"),
]


def _indexed() -> dict[str, list[tuple[str, str, Unbuilt]]]:
    """`{last part of the key: [(entry or "", key, item)]}`."""
    index: dict[str, list[tuple[str, str, Unbuilt]]] = {}
    for item in UNBUILT:
        anchor, _, key = item.key.rpartition(":")
        index.setdefault(key.rpartition(".")[2], []).append((anchor, key, item))
    return index


_INDEX = _indexed()


def _matching(entry: str | None, path: str) -> Iterator[Unbuilt]:
    for anchor, key, item in _INDEX.get(path.rpartition(".")[2], ()):
        if (anchor == entry and key == path) if anchor else (path == key or path.endswith(f".{key}")):
            yield item


FREE = ("arguments", "env", "kwargs", "extra_body", "env_vars", "headers")  # tables whose keys belong to the user


@functools.cache
def _refusable(cls: type[Config]) -> list[tuple[str, list[Unbuilt]]]:
    """`(dotted key, what may refuse it)` of a schema's own fields; elements of lists and tables stand under `*`."""
    keys = (key for key in dict.fromkeys(key for key, _, _ in walk(cls)) if key.split(".")[0] not in cls.undumped)
    return [(key, items) for key in keys if (items := list(_matching(cls.entry, key)))]


def faults_of(config: Config) -> list[Fault]:
    """The same of a validated configuration, whose defaults are refused like what was written."""
    found = []
    for key, items in _refusable(type(config)):
        for place, value in _at(config, key):
            found += [Fault(item.reason, place) for item in items if item.hits(value)][:1]
    return found


def _at(node: Any, key: str) -> Iterator[tuple[str, Any]]:
    """`(dotted key, value)` of what stands at `key`; nothing where another variant of a table has no such field."""
    head, star, tail = key.partition(".*.")
    try:
        value = operator.attrgetter(head)(node)
    except AttributeError:
        return
    if not star:
        yield key, value
        return
    for index, item in value.items() if isinstance(value, dict) else enumerate(value or ()):
        for place, inner in _at(item, tail):
            yield f"{head}.{index}.{place}", inner


def faults(entry: str | None, data: Any, path: str = "") -> list[Fault]:
    """One fault per refused key of a raw configuration."""
    found: list[Fault] = []
    if isinstance(data, list):
        for index, item in enumerate(data):
            if isinstance(item, dict | list):
                found += faults(entry, item, f"{path}{index}.")
    if not isinstance(data, dict):
        return found
    for key, value in data.items():
        if key in _INDEX:
            hit = next((item for item in _matching(entry, f"{path}{key}") if item.hits(value)), None)
            if hit is not None:
                found.append(Fault(hit.reason, f"{path}{key}"))
                continue
        if value and isinstance(value, dict | list) and key not in FREE:
            found += faults(entry, value, f"{path}{key}.")
    return found
