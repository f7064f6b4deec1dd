"""Worlds for tests: one rank in this process, or ranks in forked processes that can be killed for real.

Forking keeps what is imported, so a rank starts in milliseconds. The parent runs torch with one thread, so nothing of
it is lost in a fork.
"""

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from loguru import logger

from rlmake.core import log
from rlmake.core.errors import UserError
from rlmake.core.rundir import RunContext
from rlmake.monitors import setup
from rlmake.trainer import world as worlds
from rlmake.trainer.training import prepare

torch.set_num_threads(1)


@contextmanager
def one_rank() -> Iterator[worlds.World]:
    """A world of one, in this process, torn down afterwards."""
    world = worlds.start(gpu=False, threads=1)
    try:
        yield world
    finally:
        world.close()


class Ranks:
    """`train(config, ctx, world, monitors) -> exit code` in as many forked processes; output in `<run>/log_<k>.txt`."""

    def __init__(self, count: int, train: Callable[..., int], config, attempt: int = 1):
        self.log = Path(config.output_dir) / f"log_{attempt}.txt"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        sys.stdout.flush()
        self.pids = [self._fork(rank, count, port, train, config, attempt) for rank in range(count)]
        self.codes: dict[int, int] = {}

    def _fork(self, rank: int, count: int, port: int, train, config, attempt: int) -> int:
        if pid := os.fork():
            return pid
        code = 1
        try:
            out = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(out, 1), os.dup2(out, 2)
            sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count)}
            os.environ["PRL_ATTEMPT_CONFIG_DIR"] = str(self.log.parent / "configs" / f"attempt_{attempt}")
            if count > 1:
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            log.setup("trainer", "info" if rank == 0 else "error")
            ctx = RunContext.from_env(config.output_dir)
            prepare(config)
            world = worlds.start(gpu=False, threads=1)
            code = train(config, ctx, world, setup(config.monitors, "trainer", ctx, rank))
        except UserError as error:
            logger.error(f"error: {error}")
            code = error.exit_code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def alive(self) -> bool:
        for pid in set(self.pids) - self.codes.keys():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self.codes[pid] = os.waitstatus_to_exitcode(status)
        return len(self.codes) < len(self.pids)

    def wait_until(self, condition: Callable[[], bool], seconds: float = 120.0) -> None:
        """Until the condition holds or all ranks have ended."""
        end = time.monotonic() + seconds
        while not condition() and self.alive():
            assert time.monotonic() < end, self.log.read_text()[-3000:]
            time.sleep(0.005)

    def signal(self, number: int) -> None:
        for pid in self.pids:
            os.kill(pid, number)

    def kill(self) -> None:
        """SIGKILL to every rank, and reap them."""
        for pid in set(self.pids) - self.codes.keys():
            os.kill(pid, signal.SIGKILL)
        while self.alive():
            time.sleep(0.005)

    def finish(self, code: int = 0, seconds: float = 120.0) -> str:
        """Wait for the end; the log. Fails, with the log, when an exit code is another."""
        try:
            self.wait_until(lambda: False, seconds)
        finally:
            self.kill()
        text = self.log.read_text()
        assert set(self.codes.values()) == {code}, (self.codes, text[-4000:])
        return text
