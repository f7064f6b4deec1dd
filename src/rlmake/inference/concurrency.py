"""How many episodes may be in flight: grows while the engines have room, shrinks when they are overloaded.

One unit is an episode. The controller reads the engines' load every few seconds (`poll`) and hears of every episode
that ends (`completed`). With equal bounds it is pinned and reads nothing. Rules and numbers: specification, 4.8.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence

from loguru import logger

from rlmake.core.errors import UserError
from rlmake.inference.load import Load, LoadReader, Unreadable

POLL_SECONDS = 5.0
GROWTH_SECONDS = 15.0  # how long a clear signal authorises growth
CLEAR, SOFT, HARD = 0, 1, 2
SOFT_USAGE, TRIM_USAGE, CANCEL_USAGE, TRIM_TO = 0.6, 0.8, 0.9, 0.7
GROWTH = 0.2  # per turnover of what is in flight, with empty caches
QUEUE_SHARE, QUEUE_POLLS, GRACE_POLLS, COOLDOWN_POLLS = 0.5, 6, 6, 6
UNKNOWN_COST = 4096  # tokens of an episode where the engine does not say how long a sequence may get


class Controller:
    """`max_inflight` is the bound of now. Cuts are returned by `poll` as the number of episodes to cancel."""

    def __init__(
        self,
        minimum: int,
        maximum: int | None,
        initial: int | None = None,
        episode_tokens: int | None = None,
        now: Callable[[], float] = time.monotonic,
    ):
        self.minimum, self.maximum, self.now = minimum, maximum, now
        self.episode_tokens = episode_tokens or UNKNOWN_COST
        self.pinned = minimum == maximum
        self.cap = float(initial or minimum)
        self.turnover = 0.0
        self.signal = CLEAR
        self._bootstrap = initial is None and not self.pinned
        self._growth_until, self._usage = -math.inf, 0.0
        self._draining = self._escalated = False
        self._grace = self._cooldown = self._overload_polls = 0
        self._waited: list[bool] = []  # by engine: requests were waiting at the last poll

    @property
    def max_inflight(self) -> int:
        return int(self._clamped(self.cap) + 1e-9)

    def _clamped(self, cap: float) -> float:
        return max(float(self.minimum), min(cap, float(self.maximum or math.inf)))

    def completed(self, inflight: int, generated: bool) -> None:
        """An episode ended by itself; `inflight` counts it. One that generated nothing says nothing about room."""
        inflight = max(1, inflight)
        self.turnover += 1.0 / inflight
        if self.pinned or not generated or self.now() > self._growth_until or inflight < 0.9 * self.max_inflight:
            return
        growth = 1.0 + GROWTH * max(0.0, 1.0 - self._usage / TRIM_USAGE)
        self.cap = self._clamped(self.cap * growth ** (1.0 / inflight))

    def poll(self, loads: Sequence[Load], inflight: int) -> int:
        """A reading of all engines; returns how many of the `inflight` episodes must be cancelled."""
        loads = [load for load in loads if load.role != "prefill"]
        if self.pinned or not loads:
            return 0
        preempted, overloaded = any(load.preemptions > 0 for load in loads), self._overloaded(loads)
        self._usage = max(load.kv_usage for load in loads)
        self.signal = self._signal(loads, preempted, overloaded)
        self._release(inflight, preempted, overloaded)
        queued = any(load.waiting > 0 for load in loads)
        clear = self.signal == CLEAR and not queued and not self._draining
        self._growth_until = self.now() + GROWTH_SECONDS if clear else -math.inf
        self._start(loads)
        self._cooldown = max(0, self._cooldown - 1)
        if self._draining:
            return 0
        if preempted or overloaded:
            return self._cut(inflight, preempted)
        if self._usage > TRIM_USAGE and inflight > 0 and self._cooldown == 0:
            self._cooldown = COOLDOWN_POLLS
            self._lower(inflight * TRIM_TO / self._usage)
            return max(0, inflight - self.max_inflight) if self._usage > CANCEL_USAGE else 0
        return 0

    def _overloaded(self, loads: Sequence[Load]) -> bool:
        """More than half as many requests wait as run, at six polls in a row."""
        waiting, running = sum(load.waiting for load in loads), sum(load.running for load in loads)
        self._overload_polls = self._overload_polls + 1 if waiting > QUEUE_SHARE * running else 0
        return self._overload_polls >= QUEUE_POLLS

    def _signal(self, loads: Sequence[Load], preempted: bool, overloaded: bool) -> int:
        waits = [load.waiting > 0 for load in loads]
        lasting = any(now and before for now, before in zip(waits, self._waited, strict=False))
        self._waited = waits
        if preempted or overloaded:
            return HARD
        return SOFT if lasting or self._usage > SOFT_USAGE else CLEAR

    def _release(self, inflight: int, preempted: bool, overloaded: bool) -> None:
        """Draining ends when the engines have worked off what was cut; only after a quiet while is a cut forgotten."""
        if self._draining:
            if inflight <= self.max_inflight and not preempted and not overloaded:
                self._draining, self._grace = False, GRACE_POLLS
        elif self._grace > 0:
            self._grace -= 1
            if self._grace == 0:
                self._escalated = False

    def _start(self, loads: Sequence[Load]) -> None:
        """Once, without a user's number: as many episodes as the caches hold at full length."""
        if self._bootstrap:
            self._bootstrap = False
            capacity = sum(load.capacity or 0 for load in loads)
            if capacity:
                self.cap = self._clamped(capacity / self.episode_tokens)

    def _cut(self, inflight: int, preempted: bool) -> int:
        share = 0.5 if self._escalated else (0.8 if preempted else 0.9)
        self._lower(inflight * share)
        self._draining = self._escalated = True
        self._overload_polls = 0
        return max(0, inflight - self.max_inflight)

    def _lower(self, target: float) -> None:
        self.cap = self._clamped(min(self.cap, target))

    def metrics(self) -> dict[str, float]:
        return {
            "concurrency/max_inflight": float(self.max_inflight),
            "concurrency/capacity": self._clamped(self.cap),
            "concurrency/turnover": self.turnover,
            "concurrency/signal": float(self.signal),
        }


async def steer(
    controller: Controller, reader: LoadReader, inflight: Callable[[], int], cut: Callable[[int], Awaitable[None]]
) -> None:
    """Read the engines for ever; `cut(n)` is called when n episodes must go. An engine that stops answering warns."""
    told = False
    while True:
        try:
            loads = await reader.read()
            told = False
        except Unreadable as error:
            if not told:
                logger.warning(f"{error}; the number of episodes in flight stays at {controller.max_inflight}")
            told = True
        else:
            before = controller.max_inflight
            excess = controller.poll(loads, inflight())
            if controller.max_inflight < before:
                usage = max(load.kv_usage for load in loads)
                logger.info(
                    f"engines are full (KV cache {100 * usage:.0f} %): {before} -> {controller.max_inflight} "
                    f"episodes in flight, {excess} cancelled"
                )
            if excess:
                await cut(excess)
        await asyncio.sleep(POLL_SECONDS)


async def require(reader: LoadReader, key: str) -> list[Load]:
    """A first reading. Raises `UserError` saying how to do without, for an engine that does not tell its load."""
    try:
        return await reader.read()
    except Unreadable as error:
        raise UserError(
            f"{key}: {error}; adaptive concurrency needs it: pin the number with {key}.min_inflight = "
            f"{key}.max_inflight"
        ) from None
