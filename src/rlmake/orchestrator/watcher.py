"""New weights: from the trainer's offer to the engines, by the handshake of `rlmake.transport.weights`."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from loguru import logger

from rlmake.core.errors import RunFailed
from rlmake.orchestrator.engines import Engines
from rlmake.transport import WeightReceiver

POLL_SECONDS, WARN_SECONDS = 0.02, 60.0


class Watcher:
    """`version` is what the engines serve; −1 before the first.

    `on_pending(v)` runs before the engines are paused (stale work is dropped there), `on_installed(v)` after they
    serve v, before anything else is received: an evaluation in it measures exactly one version.
    """

    def __init__(
        self,
        receiver: WeightReceiver,
        engines: Engines,
        timeout: float,
        version: int,
        on_pending: Callable[[int], None],
        on_installed: Callable[[int], Awaitable[None]],
    ):
        self.receiver, self.engines, self.timeout = receiver, engines, timeout
        self.version = self.installed = version  # served, and what follows from that is done
        self.on_pending, self.on_installed = on_pending, on_installed
        self.changed = asyncio.Event()  # set and replaced at every new version
        self.seconds: dict[str, float] = {}  # of the last update, by phase
        self.waited = 0.0  # seconds that `reach` and `wait` took since the last report

    async def next(self) -> int:
        """Wait for the next offer, however long, and install it; the version."""
        waiting = time.monotonic()
        warned = waiting
        while (version := self.receiver.poll(self.version)) is None:
            if (now := time.monotonic()) - warned > WARN_SECONDS:
                logger.warning(
                    f"waiting for weights beyond v{self.version} from the trainer since {now - waiting:.0f} s"
                )
                warned = now
            await asyncio.sleep(POLL_SECONDS)
        offered = time.monotonic()
        self.on_pending(version)
        self.receiver.ack(version)
        await self._finished(version)
        folder = await asyncio.to_thread(self.receiver.verify, version)
        received = time.monotonic()
        await self._install(folder, version)
        self.version = version
        served = time.monotonic()
        self.seconds = {"receive": received - offered, "update": served - received}
        logger.debug(f"weights v{version} served after {served - offered:.3f} s")
        await self.on_installed(version)
        self.installed = version
        event, self.changed = self.changed, asyncio.Event()
        event.set()
        return version

    async def _install(self, folder: Path, version: int) -> None:
        if self.engines.adapter is not None:
            await self.engines.load_adapter(folder)
            return
        await self.engines.pause()
        try:
            await self.engines.update_weights(folder, version)
        finally:
            # The engines must not stay frozen; if they are gone the update's own error counts.
            with suppress(RunFailed):
                await self.engines.resume()

    async def _finished(self, version: int) -> None:
        deadline = time.monotonic() + self.timeout
        while not self.receiver.finished(version):
            if time.monotonic() > deadline:
                raise RunFailed(
                    f"the trainer offered weights v{version} and did not finish sending in {self.timeout:g} s"
                )
            await asyncio.sleep(POLL_SECONDS)

    async def reach(self, version: int) -> None:
        """Receive here until `version` is served. Lock-step; not beside `follow`."""
        start = time.monotonic()
        while self.version < version:
            await self.next()
        self.waited += time.monotonic() - start

    async def follow(self) -> None:
        """Receive for ever, in the background."""
        while True:
            await self.next()

    async def wait(self, version: int) -> None:
        """Until `follow` has brought `version`."""
        start = time.monotonic()
        while self.version < version:
            await self.changed.wait()
        self.waited += time.monotonic() - start

    async def settled(self, version: int) -> None:
        """Until `version` is there and its evaluations have ended."""
        while self.installed < version:
            await self.changed.wait()
