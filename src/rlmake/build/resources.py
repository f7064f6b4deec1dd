"""What a job takes: threads and GPUs on this machine, and what SLURM is to be asked for."""

import re
from typing import Any

SLURM_FIELDS = {"partition": "slurm_partition", "account": "slurm_account"}


def of(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    """`{threads, gpus, nodes, gpus_per_node, slurm: {…}, minutes}` of a job of `kind` with its resolved configuration.

    On a CPU a job takes as many threads as its largest process uses: trainer and engine take turns. So two trainings
    don't run side by side on two cores, unless they are configured with one thread each.
    """
    place = config.get("deployment") or {}
    nodes = 1
    if place.get("type") == "multi_node":
        nodes = place["num_train_nodes"] + (place["num_infer_nodes"] or 0)
        gpus = nodes * place["gpus_per_node"]
    elif kind == "eval":
        gpus = place.get("num_infer_gpus", 0) if config.get("inference") else 0
    else:
        uses_engine = kind == "rl" or bool(config.get("inference"))
        gpus = place.get("num_train_gpus", 0) + (place.get("num_infer_gpus", 0) if uses_engine else 0)
    threads = place.get("cpu_threads", 1) * (place.get("num_train_ranks", 1) if not place.get("num_train_gpus") else 1)
    slurm = config.get("slurm") or {}
    return {
        "threads": threads,
        "gpus": gpus,
        "nodes": nodes,
        "gpus_per_node": -(-gpus // nodes),
        "minutes": minutes(slurm["time"]) if slurm.get("time") else None,
        "slurm": {theirs: slurm[ours] for ours, theirs in SLURM_FIELDS.items() if slurm.get(ours)},
    }


def minutes(text: str) -> int:
    """A SLURM time (`m`, `m:s`, `h:m:s`, `d-h`, `d-h:m`, `d-h:m:s`; sbatch(1)) in minutes, rounded up."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if not match:
        raise ValueError(f"slurm.time: expected minutes, hours:minutes:seconds or days-hours:minutes, not '{text}'")
    days, a, b, c = (int(part) if part else None for part in match.groups())
    if days is not None:
        seconds = days * 86400 + a * 3600 + (b or 0) * 60 + (c or 0)
    elif c is not None:
        seconds = a * 3600 + b * 60 + c
    else:
        seconds = a * 60 + (b or 0)
    return -(-seconds // 60)
