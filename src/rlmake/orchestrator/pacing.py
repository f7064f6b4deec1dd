"""How fast rollouts start: bursts are bounded, and tasks per minute where the user says so."""

import asyncio
import time
from collections import deque

BURST_SECONDS = 5.0


class Burst:
    """At most `limit` starts within 5 s beyond what finished meanwhile, so that a wide-open gate does not flood."""

    def __init__(self, limit: int):
        self.limit = limit
        self._starts: deque[float] = deque()

    def start(self) -> None:
        self._starts.append(time.monotonic())

    def finish(self) -> None:
        """A rollout that ended by itself gives its place back."""
        if self._starts:
            self._starts.popleft()

    def wait(self) -> float:
        """Seconds until the next start is allowed; 0: now."""
        now = time.monotonic()
        while self._starts and now - self._starts[0] >= BURST_SECONDS:
            self._starts.popleft()
        return 0.0 if len(self._starts) < self.limit else BURST_SECONDS - (now - self._starts[0])


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
