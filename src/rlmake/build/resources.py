"""What a job takes: threads and GPUs on this machine, nodes and GPUs on a cluster."""

from typing import Any


def of(kind: str, config: dict[str, Any]) -> dict[str, Any]:
    """`{threads, gpus, nodes, gpus_per_node}` of a job of `kind` with its resolved configuration.

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
    return {"threads": threads, "gpus": gpus, "nodes": nodes, "gpus_per_node": -(-gpus // nodes)}
