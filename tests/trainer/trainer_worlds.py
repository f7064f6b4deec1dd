"""Worlds for tests: one rank in this process, or ranks in processes of their own that can be killed for real.

Ranks are forked from a server that has imported the trainer and has never run anything, so they start at once and
inherit no threads.
"""

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from rlmake.core import log
from rlmake.core.errors import UserError
from rlmake.core.rundir import RunContext
from rlmake.monitors import setup
from rlmake.trainer import world as worlds
from rlmake.trainer.training import prepare

torch.set_num_threads(1)
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["trainer_worlds", "rlmake.trainer.sft", "rlmake.trainer.rl"])


@contextmanager
def one_rank() -> Iterator[worlds.World]:
    """A world of one, in this process, torn down afterwards."""
    world = worlds.start(gpu=False, threads=1)
    try:
        yield world
    finally:
        world.close()


def rank_main(rank: int, count: int, port: int, train: Callable[..., int], config, attempt: int, output: str) -> None:
    """One rank: what the modules' `main` does, behind a redirected output."""
    out = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ["PRL_ATTEMPT_CONFIG_DIR"] = str(Path(output).parent / "configs" / f"attempt_{attempt}")
    if count > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    log.setup("trainer", "info" if rank == 0 else "error")
    ctx = RunContext.from_env(config.output_dir)
    prepare(config)
    world = worlds.start(
        gpu=config.device == "cuda", threads=1, dp_replicate=config.model.dp_replicate, cp=config.model.cp
    )
    try:
        code = train(config, ctx, world, setup(config.monitors, "trainer", ctx, rank))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = error.exit_code
    os._exit(code)


class Ranks:
    """`train(config, ctx, world, monitors) -> exit code` in as many processes; output in `<run>/log_<attempt>.txt`."""

    def __init__(self, count: int, train: Callable[..., int], config, attempt: int = 1):
        self.log = Path(config.output_dir) / f"log_{attempt}.txt"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.touch()
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        arguments = (count, port, train, config, attempt, str(self.log))
        self.processes = [FORKS.Process(target=rank_main, args=(rank, *arguments)) for rank in range(count)]
        for process in self.processes:
            process.start()

    def alive(self) -> bool:
        return any(process.exitcode is None for process in self.processes)

    def wait_until(self, condition: Callable[[], bool], seconds: float = 200.0) -> None:
        """Until the condition holds or all ranks have ended."""
        end = time.monotonic() + seconds
        while not condition() and self.alive():
            assert time.monotonic() < end, self.log.read_text()[-3000:]
            time.sleep(0.005)

    def signal(self, number: int) -> None:
        for process in self.processes:
            os.kill(process.pid, number)

    def kill(self) -> None:
        """SIGKILL to every rank that is left."""
        for process in self.processes:
            if process.exitcode is None:
                os.kill(process.pid, signal.SIGKILL)
            process.join()

    def finish(self, code: int = 0, seconds: float = 200.0) -> str:
        """Wait for the end; the log. Fails, with the log, when an exit code is another."""
        try:
            self.wait_until(lambda: False, seconds)
        finally:
            self.kill()
        text, codes = self.log.read_text(), {process.exitcode for process in self.processes}
        assert codes == {code}, (codes, text[-4000:])
        return text
