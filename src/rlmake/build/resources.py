"""What a job takes: threads and GPUs on this machine, nodes and GPUs and SLURM's other options on a cluster."""

from typing import Any

from rlmake.core import slurm

SMALL = ("partition", "account", "pre_run_command")  # what jobs that belong to a run take over from its [slurm]

DIRECT = {"template_path": None, "project_dir": "."}  # keys that count for direct submissions, with their defaults


def of(kind: str, config: dict[str, Any], near: dict[str, Any] | None = None) -> dict[str, Any]:
    """`{threads, gpus, nodes, gpus_per_node, slurm}` of a job of `kind` with its resolved configuration.

    On a CPU a job takes as many threads as its largest process uses: trainer and engine take turns. So two trainings
    don't run side by side on two cores, unless they are configured with one thread each. `near` is the [slurm] table of
    the run that a job without a table of its own belongs to.
    """
    place = config.get("deployment") or {}
    nodes, per_node = 1, place.get("gpus_per_node", 0)
    ranks = place.get("num_train_ranks", 1)
    if kind == "inference":
        nodes = place.get("num_nodes", 1)
        gpus = nodes * per_node if nodes > 1 or config["device"] == "cuda" else 0
    elif place.get("type") == "multi_node":
        managed = bool(config.get("inference"))
        each = 1 if place["num_infer_nodes"] is None else place["num_infer_nodes"]
        nodes = place["num_train_nodes"] + (each * place["num_infer_replicas"] if managed else 0)
        gpus = nodes * per_node
    elif kind == "eval":
        gpus = place.get("num_infer_gpus", 0) if config.get("inference") else 0
    else:
        uses_engine = kind == "rl" or bool(config.get("inference"))
        parts = (place.get("num_train_gpus", 0), place.get("num_infer_gpus", 0) if uses_engine else 0)
        gpus = max(parts) if place.get("share_gpus") else sum(parts)
        ranks = 1 if place.get("num_train_gpus") else ranks
    table = options(config["slurm"]) if config.get("slurm") else small(near)
    if config.get("slurm") and _exclusive(config["slurm"]["exclusive"], nodes, gpus, per_node):
        table["extra"] = ["--exclusive", *table["extra"]]
    return {
        "threads": (place if "cpu_threads" in place else config).get("cpu_threads", 1) * ranks,
        "gpus": gpus,
        "nodes": nodes,
        "gpus_per_node": -(-gpus // nodes),
        "slurm": table,
    }


def options(table: dict[str, Any]) -> dict[str, Any]:
    """A run's [slurm] table as a job needs it: `time` in minutes, `memory` in MB, the rest as options of sbatch."""
    places = [f"--{key}={table[key]}" for key in ("constraint", "nodelist", "exclude") if table[key]]
    return {
        "partition": table["partition"],
        "account": table["account"],
        "time": slurm.minutes(table["time"]) if table["time"] else None,
        "memory": slurm.megabytes(table["memory"]) if table["memory"] else None,
        "extra": [*places, *table["extra"]],
        "pre_run_command": table["pre_run_command"],
        "save_before_end": table["save_before_end"],
        "job_name": table["job_name"],
        "unused": [f"{key} = '{table[key]}'" for key, default in DIRECT.items() if table[key] != default],
    }


def small(table: dict[str, Any] | None) -> dict[str, Any]:
    """Options of a small job beside a run: where it may run and who pays, not how long or how large."""
    empty = dict.fromkeys(("time", "memory", "save_before_end", "job_name"), None)
    return {**empty, "extra": [], "unused": [], **{key: (table or {}).get(key) for key in SMALL}}


def near(config: dict[str, Any]) -> dict[str, Any] | None:
    """What jobs beside a run take over from its [slurm], None where it has none."""
    table = config.get("slurm")
    return table and {key: table[key] for key in SMALL}


def _exclusive(wanted: bool | str, nodes: int, gpus: int, per_node: int) -> bool:
    return (nodes > 1 or 0 < per_node <= gpus) if wanted == "auto" else bool(wanted)
