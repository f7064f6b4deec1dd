"""Exactly-once accounting: every started rollout is counted as finished, failed, or cancelled for one reason."""

from collections import Counter
from typing import Literal

Reason = Literal["stale", "overload", "superseded"]


class Accounts:
    """Counts since the last report, and the number in flight. `started = finished + failed + cancelled + inflight`."""

    def __init__(self, envs: list[str]):
        self.envs = envs
        self.inflight: Counter[str] = Counter()
        self.started: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.cancelled: Counter[tuple[str, Reason]] = Counter()

    @property
    def total(self) -> int:
        """Training episodes in flight."""
        return self.inflight.total()

    def start(self, env: str) -> None:
        self.started[env] += 1
        self.inflight[env] += 1

    def end(self, env: str, ok: bool) -> None:
        self.inflight[env] -= 1
        (self.finished if ok else self.failed)[env] += 1

    def cancel(self, env: str, reason: Reason, running: int, finished: int = 0, failed: int = 0) -> None:
        """A group is dropped: `running` rollouts end now; those that had ended are counted as cancelled instead."""
        self.inflight[env] -= running
        self.finished[env] -= finished
        self.failed[env] -= failed
        self.cancelled[env, reason] += running + finished + failed

    def cancelled_by_env(self, besides: Reason | None = None) -> dict[str, int]:
        """Episodes given up since the last report, but for one reason."""
        counted = [(env, n) for (env, reason), n in self.cancelled.items() if reason != besides]
        return {env: sum(n for other, n in counted if other == env) for env in self.envs}

    def report(self) -> dict[str, float]:
        """Metrics since the last report, always the full set of names; starts the next period."""
        rows: dict[str, float] = {}
        for name, counts in (("errored", self.failed), ("finished", self.finished), ("started", self.started)):
            rows[f"dispatcher/{name}/train"] = float(sum(counts.values()))
            rows |= {f"dispatcher/{name}/{env}": float(counts[env]) for env in self.envs}
        rows["dispatcher/cancelled/train"] = float(sum(self.cancelled.values()))
        rows |= {f"dispatcher/cancelled/{env}": float(count) for env, count in self.cancelled_by_env().items()}
        for reason in ("stale", "overload", "superseded"):
            rows[f"dispatcher/cancelled/reason/{reason}"] = float(
                sum(n for (_, r), n in self.cancelled.items() if r == reason)
            )
        rows["dispatcher/inflight/train"] = float(self.total)
        for counts in (self.started, self.finished, self.failed, self.cancelled):
            counts.clear()
        return rows
