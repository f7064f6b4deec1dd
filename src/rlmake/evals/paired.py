"""Two evaluations on the same tasks compared: the difference task by task, and its 95 % interval.

Tasks differ in difficulty far more than models do; the difference on the same task leaves that out (the paired t-test).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlmake.core.errors import UserError
from rlmake.core.stats import mean_ci95
from rlmake.evals import records
from rlmake.evals.records import EpisodeRecord
from rlmake.evals.summary import task_means


@dataclass(frozen=True)
class Paired:
    """`after − before` over the tasks that both have; `unpaired` tasks are in one of them only.

    `ci95` is None for a single task.
    """

    env: str
    num_tasks: int
    unpaired: int
    before: float
    after: float
    difference: float
    ci95: list[float] | None

    @property
    def excludes_zero(self) -> bool:
        return self.ci95 is not None and not self.ci95[0] <= 0.0 <= self.ci95[1]


def compare(before: Sequence[EpisodeRecord], after: Sequence[EpisodeRecord]) -> dict[str, Paired]:
    """By environment, the rewards of two lists of records compared. Raises `UserError` when no task is in both."""
    result = {}
    for env in sorted({record.env for record in before} & {record.env for record in after}):
        first = task_means([record for record in before if record.env == env])
        second = task_means([record for record in after if record.env == env])
        if not (common := [key for key in first if key in second]):
            raise UserError(f"env {env!r}: the two evaluations have no task in common")
        difference, ci95 = mean_ci95([second[key] - first[key] for key in common])
        result[env] = Paired(
            env,
            len(common),
            len(first.keys() ^ second.keys()),
            mean_ci95([first[key] for key in common])[0],
            mean_ci95([second[key] for key in common])[0],
            difference,
            ci95,
        )
    if not result:
        raise UserError("the two evaluations have no environment in common")
    return result


def compare_reports(before: Path, after: Path) -> dict[str, Paired]:
    """`compare` for two report.json (or their folders), by the episodes.jsonl beside them."""
    return compare(
        *(records.read((path if path.is_dir() else path.parent) / "episodes.jsonl") for path in (before, after))
    )
