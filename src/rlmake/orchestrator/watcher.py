"""New weights: from the trainer's offer to the engines, by the handshake of `rlmake.transport.weights`."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from loguru import logger

from rlmake.core.errors import RunFailed
from rlmake.orchestrator.engines import Engines
from rlmake.transport import WeightReceiver

OFFER_POLL_SECONDS, POLL_SECONDS, WARN_SECONDS = 0.02, 0.005, 60.0


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
        on_pending: Callable[[int], Awaitable[None]],
        on_installed: Callable[[int], Awaitable[None]],
    ):
        self.receiver, self.engines, self.timeout = receiver, engines, timeout
        self.version = self.installed = version  # served, and what follows from that is done
        self.on_pending, self.on_installed = on_pending, on_installed
        self.changed = asyncio.Event()  # set and replaced at every new version
        self.seconds: dict[str, float] = {}  # of the last update, by phase
        self.parts: dict[str, float] = {}  # of these the engines' own, by files
        self.waited = 0.0  # seconds of `reach` and `wait` since the last report, without those within `on_installed`
        self._busy, self._since = 0.0, 0.0  # seconds of it before the present one, and when that began; 0: none

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
            await asyncio.sleep(OFFER_POLL_SECONDS)
        offered = time.monotonic()
        await self.on_pending(version)
        record = self.receiver.record(version)
        by_group = record["transport"] != "filesystem"
        if by_group and (reason := await self.engines.refusal(record["group"]["rendezvous"])):
            self.receiver.refuse(version, reason)
            logger.warning(f"weights v{version} are asked for by files: {reason}")
            return await self.next()
        received = await (self._by_group if by_group else self._by_files)(version, record)
        self.version = version
        served = time.monotonic()
        self.seconds = {"receive": received - offered, "update": served - received}
        logger.debug(f"weights v{version} served after {served - offered:.3f} s")
        self._since = served
        try:
            await self.on_installed(version)
        finally:
            self._busy, self._since = self._busy + time.monotonic() - served, 0.0
        self.installed = version
        event, self.changed = self.changed, asyncio.Event()
        event.set()
        return version

    async def _by_files(self, version: int, record: dict) -> float:
        """Take the files, then install them; the moment between the two."""
        self.receiver.ack(version)
        await self._finished(version)
        folder = await asyncio.to_thread(self.receiver.verify, version, not self.engines.check_files)
        received = time.monotonic()
        if self.engines.adapter is not None:
            await self.engines.load_adapter(folder)
            return received
        async with self._frozen():
            self.parts = await self.engines.update_weights(folder, version)
        return received

    async def _by_group(self, version: int, record: dict) -> float:
        """Engines take the version themselves while they stand still. It cannot be repeated: a failure ends the run."""
        group = record["group"]
        async with self._frozen():
            self.receiver.ack(version, self.engines.receivers)
            await self.engines.join(group["rendezvous"], self.timeout)
            received = time.monotonic()
            await self.engines.receive_weights(version, group)
            await self._finished(version)
        return received

    @asynccontextmanager
    async def _frozen(self) -> AsyncIterator[None]:
        """Requests wait inside. The engines must not stay frozen; if they are gone the error of what failed counts."""
        await self.engines.pause()
        try:
            yield
        finally:
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

    def _idle(self) -> float:
        """A clock that stands still while `on_installed` runs."""
        now = time.monotonic()
        return now - self._busy - (now - self._since if self._since else 0.0)

    async def reach(self, version: int) -> None:
        """Receive here until `version` is served. Lock-step; not beside `follow`."""
        start = self._idle()
        while self.version < version:
            await self.next()
        self.waited += self._idle() - start

    async def follow(self) -> None:
        """Receive for ever, in the background."""
        while True:
            await self.next()

    async def wait(self, version: int) -> None:
        """Until `follow` has brought `version`."""
        start = self._idle()
        while self.version < version:
            await self.changed.wait()
        self.waited += self._idle() - start

    async def settled(self, version: int) -> None:
        """Until `version` is there and its evaluations have ended."""
        while self.installed < version:
            await self.changed.wait()
