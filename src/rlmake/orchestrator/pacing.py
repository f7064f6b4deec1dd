"""How fast rollouts start: bursts are bounded, and tasks per minute where the user says so."""

import asyncio
import time
from collections import deque

BURST_SECONDS = 5.0


class Burst:
    """At most `limit` starts within 5 s beyond those that take the place of a rollout that finished in the 5 s before
    them, so that a wide-open gate does not flood, and a gate that was closed for a moment leaves no gap."""

    def __init__(self, limit: int):
        self.limit = limit
        self._starts: deque[float] = deque()  # those that took nobody's place
        self._places: deque[float] = deque()  # free since

    def start(self) -> None:
        if self._recent(self._places):
            self._places.popleft()
        else:
            self._starts.append(time.monotonic())

    def finish(self) -> None:
        """A rollout ended by itself: its place is free."""
        self._places.append(time.monotonic())

    def wait(self) -> float:
        """Seconds until the next start is allowed; 0: now."""
        if self._recent(self._places) or len(self._recent(self._starts)) < self.limit:
            return 0.0
        return BURST_SECONDS - (time.monotonic() - self._starts[0])

    def _recent(self, times: deque[float]) -> deque[float]:
        while times and time.monotonic() - times[0] >= BURST_SECONDS:
            times.popleft()
        return times


class TaskRate:
    """A token bucket of `per_minute` tasks; without a limit it never waits."""

    def __init__(self, per_minute: int | None):
        self.per_minute = per_minute
        self._tokens, self._at = 1.0, time.monotonic()

    async def take(self) -> None:
        if self.per_minute is None:
            return
        rate = self.per_minute / 60.0
        now = time.monotonic()
        self._tokens = min(max(1.0, rate), self._tokens + (now - self._at) * rate) - 1.0
        self._at = now
        if self._tokens < 0:
            await asyncio.sleep(-self._tokens / rate)
