"""The numbers of an evaluation.

Episodes of one task are not independent of one another, so the unit is the task: a mean is the mean over tasks of each
task's mean, and its interval is Student's t over the tasks.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rlmake.config.eval import ks
from rlmake.core.stats import mean_ci95, pass_at_k, pass_hat_k
from rlmake.evals.records import EnvResult, EpisodeRecord

SUCCESS = "reward >= 1"
SCORES = ("avg@", "pass@", "pass^")
_FULL_MARKS = 1.0 - 1e-9  # weighted parts that sum to 1 may miss it by a rounding


def succeeded(record: EpisodeRecord) -> bool:
    return record.reward >= _FULL_MARKS


def by_task(records: Sequence[EpisodeRecord]) -> dict[str, list[EpisodeRecord]]:
    """Records by task key, in the order of the tasks."""
    tasks: dict[str, list[EpisodeRecord]] = {}
    for record in records:
        tasks.setdefault(record.key, []).append(record)
    return tasks


def task_means(records: Sequence[EpisodeRecord]) -> dict[str, float]:
    """Mean reward by task key."""
    return {key: _mean([record.reward for record in found]) for key, found in by_task(records).items()}


def summarise(result: EnvResult) -> dict[str, Any]:
    """An environment's entry in report.json.

    `pass@k` (one of k samples succeeds) and `pass^k` (all of them do) are means over tasks of the unbiased
    estimates; they are left out unless every task that was scored has k episodes. `avg@k`, for k the group size, is
    the mean reward. `failed` counts the episodes with an error, `errors` counts them by type; `truncated` and
    `timeouts` are counts too. What needs an episode is null when there is none.
    """
    records = result.records
    entry: dict[str, Any] = {
        "num_tasks": result.num_tasks,
        "group_size": result.group_size,
        "num_planned": result.planned,
        "num_episodes": len(records),
        "partial": result.partial,
        "failed": sum(record.error is not None for record in records),
        "timeouts": sum(record.timeout for record in records),
        "truncated": sum(record.truncated for record in records),
        "errors": dict(sorted(Counter(r.error.partition(":")[0] for r in records if r.error is not None).items())),
        "sampling": dict(result.sampling),
        "success": SUCCESS,
        "reward": {"mean": None, "ci95": None},
        "metrics": {},
    }
    if not records:
        return entry
    mean, ci95 = mean_ci95(list(task_means(records).values()))
    entry["reward"] = {"mean": mean, "ci95": ci95}
    entry["metrics"] = {
        name: _mean([record.metrics[name] for record in records if name in record.metrics])
        for name in sorted({name for record in records for name in record.metrics})
    }
    entry["output_tokens"] = _mean([record.output_tokens for record in records])
    tasks = list(by_task(records).values())
    if all(len(task) == result.group_size for task in tasks):
        entry[f"avg@{result.group_size}"] = mean
    counts = [(len(task), sum(map(succeeded, task))) for task in tasks]
    for label, estimate in (("pass@", pass_at_k), ("pass^", pass_hat_k)):
        for k in ks(result.group_size):
            estimates = [estimate(n, c, k) for n, c in counts]
            if None not in estimates:
                entry[f"{label}{k}"] = _mean(estimates)
    return entry


def metrics(result: EnvResult, entry: Mapping[str, Any], policy_version: int | None = None) -> dict[str, float]:
    """The row `eval/<env>/…` of an evaluation, for the monitors."""
    number = max(1, entry["num_episodes"])
    row = {
        "reward/mean": entry["reward"]["mean"],
        "num_episodes": entry["num_episodes"],
        "num_planned": entry["num_planned"],
        "is_truncated/mean": entry["truncated"] / number,
        "is_timeout/mean": entry["timeouts"] / number,
        "has_error/mean": entry["failed"] / number,
        "num_output_tokens/mean": entry.get("output_tokens"),
        "policy_version": policy_version,
        "time": result.seconds,
        **{key: value for key, value in entry.items() if key.startswith(SCORES)},
        **{f"metrics/{name}": value for name, value in entry["metrics"].items()},
    }
    if entry["reward"]["ci95"] is not None:
        row["reward/ci95_low"], row["reward/ci95_high"] = entry["reward"]["ci95"]
    return {f"eval/{result.env}/{key}": value for key, value in row.items() if value is not None}


def line(result: EnvResult, entry: Mapping[str, Any], step: int) -> str:
    """`Evaluated <env> (Step N) | 3.2s | Reward 0.8731 | avg@1 … | pass@1 … | …` for the console."""
    mean = entry["reward"]["mean"]
    parts = [f"Evaluated {result.env} (Step {step})", f"{result.seconds:.2f}s"]
    parts.append(f"Reward {mean:.4f}" if mean is not None else "Reward –")
    parts += [f"{key} {entry[key]:.4f}" for key in entry if key.startswith(("avg@", "pass@"))]  # pass^k: in the report
    for label, key in (("Truncated", "truncated"), ("Timeouts", "timeouts"), ("Failed", "failed")):
        parts.append(f"{label} {entry[key]}/{entry['num_episodes']}")
    if entry["partial"]:
        parts.append(f"partial: {entry['num_episodes']} of {entry['num_planned']} episodes")
    return " | ".join(parts)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
