"""`inference` in a SLURM job over several nodes: engines, the router in front of them, and the URL to use."""

import math
from collections.abc import Sequence
from pathlib import Path

from loguru import logger

from rlmake.config import InferenceConfig
from rlmake.core import log, slurm
from rlmake.core.errors import UserError
from rlmake.launch import rundir
from rlmake.launch.allocation import Allocation
from rlmake.launch.nodes import NodeComponents
from rlmake.launch.supervise import Supervisor, kill_leftovers
from rlmake.launch.train import open_attempt


def over_nodes(cfg: InferenceConfig, run_dir: Path, argv: Sequence[str], files: Sequence[Path]) -> None:
    """Serve until the job is taken away or an engine dies. Raises as `train.run`, `UserError` outside of a job."""
    job, place = slurm.own_job(), cfg.deployment
    nodes = slurm.nodes_of(job)[: place.num_nodes] if job else []
    if job is None or len(nodes) < place.num_nodes:
        raise UserError(f"deployment.num_nodes = {place.num_nodes}: there are {len(nodes)} nodes of a SLURM job here")
    log.setup("launcher", cfg.log.level)
    allocation = Allocation(job, tuple(nodes), (), nodes[0], place.gpus_per_node, slurm.addresses(nodes))
    with rundir.Held(run_dir):
        kill_leftovers(run_dir)
        attempt, ctx = open_attempt("inference", run_dir, argv, files, None, cfg.run.name or run_dir.name)
        components = NodeComponents.of(ctx, attempt, allocation)
        with Supervisor() as supervisor:
            address = components.start_inference(supervisor, cfg, place.gpus_per_node)
            url = components.await_inference(supervisor, address)
            logger.success(f"{len(components.engines(address) or ())} engines behind {url}")
            supervisor.wait_until(lambda: False, math.inf, "the end of the job")
