"""A rank's process: `torchrun … -m rlmake.trainer.<sft|rl> @ <resolved>/<config>.json`."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from loguru import logger

from rlmake.config import load_resolved
from rlmake.core import log
from rlmake.core.errors import UserError
from rlmake.core.procs import die_with_parent
from rlmake.core.rundir import RunContext
from rlmake.monitors import setup
from rlmake.trainer import world as worlds
from rlmake.trainer.training import prepare


def run(config_class: type, train: Callable[..., int]) -> int:
    """Read the configuration, join the other ranks, train; the exit code."""
    die_with_parent()
    if len(sys.argv) != 3 or sys.argv[1] != "@":
        raise UserError(f"usage: python -m {train.__module__} @ <resolved configuration>.json")
    config = load_resolved(config_class, sys.argv[2])
    log.setup("trainer", config.log.level, config.log.json_logging)
    ctx = RunContext.from_env(config.output_dir)
    prepare(config)
    world = worlds.start(
        gpu=config.device == "cuda",
        threads=config.cpu_threads,
        dp_replicate=config.model.dp_replicate,
        cp=config.model.cp,
        timeout_s=config.dist_timeout_seconds,
    )
    monitors = setup(config.monitors, "trainer", ctx, world.rank, config.max_steps)
    code = None
    try:
        with traced(config.trace_path, world):
            code = train(config, ctx, world, monitors)
        return code
    finally:
        monitors.close(finished=code == 0)
        world.close()


@contextlib.contextmanager
def traced(path: str | None, world: worlds.World) -> Iterator[Any]:
    """Record what this process does on CPU and GPU, and write it to `path` (Chrome's format) on the master."""
    if path is None:
        yield None
        return
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if world.device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profiler:
        yield profiler
    if world.master:
        profiler.export_chrome_trace(path)
        logger.info(f"profiler trace: {path}")
