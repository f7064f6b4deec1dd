"""The orchestrator's row of a step: what was finished since the last one (`all`) and what was shipped (`effective`)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rlmake.orchestrator.records import Group, Unit

Facts = dict[str, Any]
SIZES = ("num_total_tokens", "num_input_tokens", "num_output_tokens", "num_turns", "num_branches")
FLAGS = ("is_truncated", "is_completed", "is_timeout", "is_trainable", "is_admitted", "has_error")
SHARES = ("stop_condition/", "error/")  # absent means it did not happen
FULL_MARKS = 1.0 - 1e-9  # as evaluations count a success


class Window:
    """Facts of the rollouts finished since the last report, which ends it. Cancelled ones are counted without facts."""

    def __init__(self, envs: Sequence[str]):
        self.envs = list(envs)
        self.facts: list[Facts] = []
        self.groups: list[tuple[str, list[float]]] = []  # (env, rewards of its clean traces)
        self.rollouts = 0

    def add(self, group: Group, facts: list[Facts], units: list[Unit], admitted: bool) -> None:
        self.facts += facts
        self.rollouts += group.size
        self.groups.append((group.env, [row["reward"] for row in facts if not row["has_error"] and row["scored"]]))

    def report(self, units: Sequence[Unit], step: int, cancelled: Mapping[str, int]) -> dict[str, float]:
        """Metrics of the period that ends with shipping `units` as batch `step`. CPU work; call it off the event loop.

        `cancelled`: rollouts by environment that were given up in the period.
        """
        shipped = [unit.facts | {"env": unit.env, "agent": unit.agent} for unit in units]
        row: dict[str, float] = {}
        for subset, facts in (("all", self.facts), ("effective", shipped)):
            for scope in ("agg", *self.envs):
                mine = [fact for fact in facts if scope in ("agg", fact["env"])]
                row |= _scope(f"train/{scope}/{subset}", mine)
        for scope in ("agg", *self.envs):
            row |= self._solved(f"train/{scope}/all", scope)
        row |= self._page(cancelled)
        row |= off_policy(units, step)
        row |= _batch(units, self.envs)
        row["batch/rollouts"] = float(self.rollouts + sum(cancelled.values()))
        return row

    def _page(self, given_up: Mapping[str, int]) -> dict[str, float]:
        """The names that the training page lists: `<metric>/{all,<env>}`."""
        row: dict[str, float] = {}
        for scope in ("all", *self.envs):
            mine = [fact for fact in self.facts if scope in ("all", fact["env"])]
            cancelled = sum(given_up.values()) if scope == "all" else given_up[scope]
            first = [fact for fact in mine if fact["first"]]
            total = len(first) + cancelled
            if total:
                row[f"errored_rollouts/{scope}"] = sum(fact["has_error"] for fact in first) / total
                row[f"empty_rollouts/{scope}"] = sum(fact["is_empty"] for fact in first) / total
                row[f"cancelled_rollouts/{scope}"] = cancelled / total
            clean = [fact for fact in mine if not fact["has_error"]]
            row |= _mean(f"reward/{scope}", [fact["reward"] for fact in clean if fact["scored"]])
            names = {"seq_len": "num_total_tokens", "num_turns": "num_turns"}
            names |= {"num_branches": "num_branches", "is_truncated": "is_truncated"}
            for name, key in names.items():
                row |= _mean(f"{name}/{scope}", [fact[key] for fact in clean])
            row |= _mean(f"is_timeout/{scope}", [fact["is_timeout"] for fact in mine])
        return row

    def _solved(self, prefix: str, scope: str) -> dict[str, float]:
        """Shares of groups in which no, every, or some but not every clean rollout has full marks."""
        groups = [rewards for env, rewards in self.groups if rewards and scope in ("agg", env)]
        if not groups:
            return {}
        solved = [np.mean([reward >= FULL_MARKS for reward in rewards]) for rewards in groups]
        none, every = sum(s == 0 for s in solved), sum(s == 1 for s in solved)
        shares = {"none": none, "all": every, "some": len(solved) - none - every}
        return {f"{prefix}/solved_{name}": count / len(solved) for name, count in shares.items()}


def stats(prefix: str, values: Iterable[float]) -> dict[str, float]:
    """mean, max, min, p10 and p90; nothing for no values."""
    array = np.fromiter(values, np.float64)
    if not len(array):
        return {}
    p10, p90 = np.percentile(array, (10, 90))
    numbers = {"mean": array.mean(), "max": array.max(), "min": array.min(), "p10": p10, "p90": p90}
    return {f"{prefix}/{name}": float(value) for name, value in numbers.items()}


def _mean(prefix: str, values: Sequence[float]) -> dict[str, float]:
    return {f"{prefix}/mean": float(np.mean(values))} if values else {}


def _scope(prefix: str, facts: list[Facts]) -> dict[str, float]:
    row: dict[str, float] = {}
    for key in SIZES:
        row |= stats(f"{prefix}/{key}", (fact[key] for fact in facts if key in fact))
    for agent in sorted({fact["agent"] for fact in facts if fact["agent"]}):
        mine = [fact for fact in facts if fact["agent"] == agent]
        row |= _agent(f"{prefix}/{agent}", mine, [fact for fact in mine if not fact["has_error"]])
    return row


def _agent(prefix: str, facts: list[Facts], clean: list[Facts]) -> dict[str, float]:
    """Rewards and metrics over clean traces, a missing reward part counting as 0 in environments that have it; rates
    over all of them."""
    keys = sorted({key for fact in facts for key in fact})
    row = stats(f"{prefix}/reward", (fact["reward"] for fact in clean))
    for flag in FLAGS:
        row |= _mean(f"{prefix}/{flag}", [fact[flag] for fact in facts if flag in fact])
    for key in keys:
        if key.startswith("rewards/"):
            envs = {fact["env"] for fact in facts if key in fact}
            row |= stats(f"{prefix}/{key}", (fact.get(key, 0.0) for fact in clean if fact["env"] in envs))
        elif key.startswith(("metrics/", "timing/")):
            row |= stats(f"{prefix}/{key}", (fact[key] for fact in clean if key in fact))
        elif key.startswith(SHARES):
            row |= _mean(f"{prefix}/{key}", [fact.get(key, 0.0) for fact in facts])
    return row


def off_policy(units: Sequence[Unit], step: int) -> dict[str, float]:
    """Staleness of batch `step`, split into the versions that passed while a rollout ran and while it waited."""
    live = [unit for unit in units if not unit.frozen]
    total = [max(0, (step - 1) - unit.start) for unit in live]
    flight = [min(age, unit.end - unit.start) for age, unit in zip(total, live, strict=True)]
    parts = {"off_policy": total, "off_policy/in_flight": flight}
    parts["off_policy/in_queue"] = [age - part for age, part in zip(total, flight, strict=True)]
    row: dict[str, float] = {}
    for name, values in parts.items():
        row[f"{name}/mean"] = float(np.mean(values)) if values else 0.0
        row[f"{name}/max"] = float(max(values, default=0))
    return row


def _batch(units: Sequence[Unit], envs: Sequence[str]) -> dict[str, float]:
    row = {f"batch/{env}": sum(unit.env == env for unit in units) / max(1, len(units)) for env in envs}
    return row | {"batch/trainable": float(len(units)), "batch/samples": float(sum(len(u.samples) for u in units))}


class Progress:
    """Totals over the whole run, of what was shipped; part of the checkpoint."""

    def __init__(self):
        self.totals = {"tokens": 0, "input_tokens": 0, "output_tokens": 0, "rollouts": 0, "tasks": 0}
        self.last = ""  # trace that was shipped last: its group, and its rollout, may go on in the next batch

    def add(self, units: Sequence[Unit]) -> dict[str, float]:
        """Count a shipped batch; its metrics."""
        tokens = sum(unit.tokens for unit in units)
        output = sum(int(sample.mask.sum()) for unit in units for sample in unit.samples)
        batch = {"tokens": tokens, "input_tokens": tokens - output, "output_tokens": output}
        for depth, name in ((3, "rollouts"), (2, "tasks")):  # <env>/<draw>/<rollout>[/<trace>]
            found = {_head(unit.name, depth) for unit in units}
            batch[name] = len(found)
            self.totals[name] -= _head(self.last, depth) in found
        self.last = units[-1].name if units else self.last
        for name, count in batch.items():
            self.totals[name] += count
        row = {f"progress/{name}": float(count) for name, count in batch.items()}
        return row | {f"progress/total_{name}": float(count) for name, count in self.totals.items()}


def _head(name: str, depth: int) -> str:
    return "/".join(name.split("/")[:depth])


class Clock:
    """Seconds by phase since the last report. `measure(name)` is a context manager."""

    def __init__(self, now: Callable[[], float]):
        self.now, self.start = now, now()
        self.phases: dict[str, float] = {}

    def add(self, name: str, seconds: float) -> None:
        self.phases[name] = self.phases.get(name, 0.0) + seconds

    def measure(self, name: str) -> "_Measure":
        return _Measure(self, name)

    def report(self) -> dict[str, float]:
        end = self.now()
        row = {"time/step": end - self.start} | {f"time/{name}": seconds for name, seconds in self.phases.items()}
        self.start, self.phases = end, {}
        return row


class _Measure:
    def __init__(self, clock: Clock, name: str):
        self.clock, self.name = clock, name

    def __enter__(self) -> None:
        self.begun = self.clock.now()

    def __exit__(self, *_: object) -> None:
        self.clock.add(self.name, self.clock.now() - self.begun)
