"""Placement on one host: which GPUs, how many threads, and the environment of each process."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from rlmake.config import InferenceConfig
from rlmake.core import procs
from rlmake.core.errors import UserError
from rlmake.core.rundir import ATTEMPT_CONFIGS, ATTEMPT_LOGS, FINGERPRINT, RUN_ID, RUN_NAME, RunContext

DEFAULTS = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "PYTHONUNBUFFERED": "1",
    "OMP_NUM_THREADS": "1",
    "GIT_LFS_SKIP_SMUDGE": "1",
}
TRAINER_DEFAULTS = {
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[rank${rank}] ",
}
INFERENCE_DEFAULTS = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False",
    "VLLM_ENGINE_READY_TIMEOUT_S": "4200",
    "UCX_TLS": "all",
}


def gpu_ids(count: int, skip: int = 0) -> list[str]:
    """`count` GPU ids behind the first `skip`, of those that are visible to the launcher ($CUDA_VISIBLE_DEVICES).

    Inference takes the first ids and the trainer the next. The machine is not asked: without the variable all are
    taken as visible. Raises `UserError` when the variable names too few.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(i) for i in range(skip, skip + count)]
    ids = [part.strip() for part in visible.split(",") if part.strip()]
    if count and len(ids) < skip + count:
        raise UserError(f"deployment: {skip + count} GPUs are wanted, CUDA_VISIBLE_DEVICES={visible} shows {len(ids)}")
    return ids[skip : skip + count]


def engine_gpus(config: InferenceConfig, count: int) -> list[list[str]]:
    """The GPU ids of each engine of a run: `count` cut into as many as hold one copy of the model each.

    On the CPU (`count` 0) there are `vllm.data_parallel_size` engines, without GPUs.
    """
    if count == 0:
        return [[] for _ in range(config.vllm.data_parallel_size)]
    ids, each = gpu_ids(count), config.gpus_per_engine
    return [ids[start : start + each] for start in range(0, count, each)]


def require_gpus(count: int) -> None:
    """Raises `UserError` when GPUs are wanted on a host that has no device of any kind that torch can use."""
    if count and not any(Path("/dev").glob("nvidia[0-9]*")) and not any(map(os.path.exists, ("/dev/kfd", "/dev/dxg"))):
        raise UserError(
            f"deployment: {count} GPUs are wanted and this host has none; "
            "deployment.num_train_gpus = 0 and deployment.num_infer_gpus = 0 run on the CPU"
        )


def environment(
    ctx: RunContext,
    *layers: Mapping[str, str],
    gpus: list[str] | None = None,
    threads: int | None = None,
) -> dict[str, str]:
    """The environment of a process: the launcher's own < defaults < `layers` in order < what the launcher must set.

    `layers`: defaults of the component, then the configuration's env_vars. `gpus`: the ids it may see (none: none).
    `threads`: of a process that computes on the CPU; its results depend on them, so nothing overrides them.
    """
    env = {**os.environ, **DEFAULTS}
    for layer in layers:
        env |= layer
    env |= {
        RUN_ID: ctx.run_id,
        RUN_NAME: ctx.run_name,
        "WANDB_RUN_ID": ctx.run_id,
        ATTEMPT_CONFIGS: str(ctx.config_dir),
        ATTEMPT_LOGS: str(ctx.log_dir),
        "CUDA_VISIBLE_DEVICES": ",".join(gpus or []),
        **procs.READABLE,
    }
    if threads is not None:
        env["OMP_NUM_THREADS"] = env["MKL_NUM_THREADS"] = str(threads)
        # Cores are shared by the processes of a run, and with whatever else runs there: a thread that waits must not
        # hold one. Spinning ones made steps many times as long on a busy machine.
        env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    env.pop(FINGERPRINT, None)
    if ctx.fingerprint:
        env[FINGERPRINT] = ctx.fingerprint
    return env


def torchrun(
    ranks: int,
    shown: list[int],
    log_dir: Path,
    module: str,
    config: Path,
    world: tuple[int, int, str, int, str] | None = None,
) -> list[str]:
    """The command of a trainer on one node: one log per rank, `shown` ranks on top.

    `world`: (this node's number, nodes, master's address, its port, rendezvous id); without it the world is this node,
    on a port of the system's choice.
    """
    if world is None:
        where = ["--standalone", "--local-addr", "127.0.0.1"]
    else:
        number, nodes, address, port, identity = world
        where = ["--nnodes", str(nodes), "--node-rank", str(number), "--rdzv-id", identity]
        where += ["--master-addr", address, "--master-port", str(port)]
    return [
        *(sys.executable, "-m", "rlmake.launch.elastic", *where),
        *("--nproc-per-node", str(ranks), "--max-restarts", "0"),
        *("--log-dir", str(log_dir / "trainer" / "torchrun"), "--redirects", "3", "--tee", "3"),
        *("--local-ranks-filter", ",".join(map(str, shown))),
        *("-m", module, "@", str(config)),
    ]
