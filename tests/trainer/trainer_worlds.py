"""Worlds for tests: one rank in this process, or several under torchrun."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlmake.trainer import world as worlds


@contextmanager
def one_rank() -> Iterator[worlds.World]:
    """A world of one, in this process, torn down afterwards."""
    world = worlds.start(gpu=False, threads=1)
    try:
        yield world
    finally:
        world.close()


def torchrun(ranks: int, module: str, config: Path, run_dir: Path, attempt: int = 1) -> subprocess.Popen:
    """Start a trainer as the launcher does; its output goes to `<run_dir>/log_<attempt>.txt`."""
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PRL_ATTEMPT_CONFIG_DIR": str(run_dir / "configs" / f"attempt_{attempt}"),
    }
    env.pop("PRL_RUN_ID", None)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(ranks), "-m", module, "@", str(config)]
    if ranks == 1:
        command = [sys.executable, "-m", module, "@", str(config)]
    with open(run_dir / f"log_{attempt}.txt", "wb") as log:
        return subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
