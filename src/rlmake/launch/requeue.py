"""A run that left because its time is over is put back into SLURM's queue by itself, from inside its job."""

import contextlib
import time
from collections.abc import Iterator

from loguru import logger

from rlmake.core import slurm
from rlmake.core.errors import RunFailed
from rlmake.launch.supervise import RunStopped

LAST_SECONDS = 120.0  # for SLURM to take this job away once it has accepted the requeue


@contextlib.contextmanager
def continued() -> Iterator[None]:
    """Around a run in its job. One that saved and left at the early signal of its time limit is requeued: same job,
    same place, no driver needed. Raises `RunFailed` when it left without having come any further, for the next life
    would do no better; outside of SLURM, and where requeueing is not allowed, the run's own `RunStopped` (75).
    """
    try:
        yield
    except RunStopped as stopped:
        job = slurm.own_job()
        if job is None or not stopped.early:
            raise
        if not stopped.progressed:
            raise RunFailed(
                "the time limit came before a single new checkpoint was saved; not requeued, it would do so for ever: "
                "raise slurm.time"
            ) from stopped
        if said := slurm.requeue(job):
            logger.warning(f"SLURM does not requeue job {job}: {said}")
            raise
        logger.info(f"job {job} is back in the queue and goes on from its checkpoint")
        time.sleep(LAST_SECONDS)
        raise
