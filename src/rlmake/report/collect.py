"""Reading what a page shows: metrics, manifests, evaluation reports, episodes. What is missing is left out."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmake.core.errors import UserError
from rlmake.core.jsonio import read_json
from rlmake.evals import records
from rlmake.evals.paired import Paired, compare
from rlmake.evals.records import EpisodeRecord
from rlmake.monitors import Row, read, series
from rlmake.report.numbers import between

Points = list[tuple[int, float]]


@dataclass(frozen=True)
class Curve:
    """One chart: its title, the names of the metric (the first that was logged is shown), unit, a remark."""

    title: str
    keys: tuple[str, ...]
    unit: str = ""
    note: str = ""
    noisy: bool = True  # a smooth line is drawn on top of a long series
    producer: str | None = None  # whose metric, where several log one of that name


# Names of the training page and of launch-and-run-dir 4.11. Patterns are full matches.
RL_CURVES = (
    Curve("Reward", (r"reward/all/mean", r"train/agg/all/[^/]+/reward/mean")),
    Curve("Loss", (r"loss/mean",)),
    Curve("Entropy", (r"entropy/all/mean", r"entropy/mean"), "nats"),
    Curve("Mismatch KL", (r"mismatch_kl/all/mean",), "nats", "trainer against the policy that sampled"),
    Curve("Gradient norm", (r"optim/grad_norm",)),
    Curve("Learning rate", (r"optim/lr",), noisy=False),
    Curve("Throughput", (r"perf/throughput",), "tokens/s"),
    Curve("Reply length", (r"train/agg/all/num_output_tokens/mean",), "tokens"),
    Curve("Step time", (r"time/step",), "s", "of the trainer", producer="trainer"),
)
SFT_CURVES = (
    Curve("Loss", (r"loss/mean",)),
    Curve("Validation loss", (r"val/loss(?:/mean)?", r"val/.*loss.*")),
    Curve("Gradient norm", (r"optim/grad_norm",)),
    Curve("Learning rate", (r"optim/lr",), noisy=False),
    Curve("Throughput", (r"perf/throughput",), "tokens/s"),
)


def metrics(run_dir: Path, upto: int | None) -> list[Row]:
    """Rows of a run up to the step that the page is about."""
    return [row for row in read(run_dir) if upto is None or row.step <= upto]


def find(rows: Iterable[Row], patterns: Iterable[str], producer: str | None = None) -> Points:
    """The first metric that a pattern names and that was logged; `[]` when none was."""
    rows = [row for row in rows if producer in (None, row.producer)]
    names = {name for row in rows for name in row.metrics}
    for pattern in patterns:
        for name in sorted(names, key=lambda name: (name.count("/"), name)):
            if re.fullmatch(pattern, name):
                return series(rows, name)
    return []


def online_evaluations(rows: Iterable[Row]) -> dict[str, Points]:
    """`{env: [(step, avg@1 or reward)]}` of the evaluations during a training, where there were at least two."""
    names = {name for row in rows for name in row.metrics}
    found: dict[str, Points] = {}
    for name in sorted(names):
        match = re.fullmatch(r"eval/([^/]+)/(?:.*/)?(?:reward/mean|avg@1)", name)
        if match and match[1] not in found and len(points := series(rows, name)) > 1:
            found[match[1]] = points
    return found


def manifest(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """A lineage row's manifest, None where there is none to read."""
    try:
        return read_json(row["manifest"]) if row.get("manifest") else None
    except UserError:
        return None


def seconds(made: Mapping[str, Any]) -> float | None:
    """What an artefact took, all attempts together; of older records the time from start to end."""
    if isinstance(made.get("seconds"), int | float):
        return float(made["seconds"])
    return between(made.get("started"), made.get("ended"))


def stages(lineage: Iterable[Mapping[str, Any]], evals: Iterable[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """`(name, seconds)` of what was made, exported and evaluated, where a manifest says how long it took."""
    found = []
    for row in lineage:
        found.append((row["name"], manifest(row)))
        if folder := run_dir_of(row):
            export = folder / "exports" / f"step_{row['step']}" / "weights.json"
            found.append((f"{row['name']}: export", manifest({"manifest": export})))
    for row in evals:
        found.append(
            (f"{row['of']}: {row['suite']}", manifest({"manifest": Path(row["report"]).with_name("manifest.json")}))
        )
    return [(name, spent) for name, made in found if made and (spent := seconds(made)) is not None]


def run_dir_of(row: Mapping[str, Any]) -> Path | None:
    """The run directory of a training in the lineage: its manifest lies in `<run>/manifests/`."""
    return Path(row["manifest"]).parent.parent if row["stage"] == "train" and row.get("manifest") else None


@dataclass(frozen=True)
class Evaluated:
    """One evaluation of one environment: `summary` is its entry in report.json, `episodes` its records."""

    suite: str
    env: str
    of: str
    step: int | None
    summary: dict[str, Any]
    episodes: list[EpisodeRecord]

    @property
    def name(self) -> str:
        return f"{self.of} · step {self.step}" if self.step is not None else self.of

    @property
    def mean(self) -> float:
        return float(self.summary["reward"]["mean"])

    @property
    def interval(self) -> list[float] | None:
        return self.summary["reward"].get("ci95")


def evaluations(
    evals: Iterable[Mapping[str, Any]], order: Sequence[str] = ()
) -> dict[tuple[str, str], list[Evaluated]]:
    """`{(suite, env): [before, …, after]}`; `order` lists runs from the oldest to the one that the page is about.

    Raises `UserError` on a report that cannot be read.
    """
    found: dict[tuple[str, str], list[Evaluated]] = {}
    rank = {name: place for place, name in enumerate(order)}
    for entry in sorted(evals, key=lambda entry: (rank.get(entry["of"], -1), entry.get("step") or 0)):
        path = Path(entry["report"])
        envs, episodes = read_json(path)["envs"], path.with_name("episodes.jsonl")
        rows = records.read(episodes) if episodes.is_file() else []
        for env, summary in envs.items():
            if summary["reward"]["mean"] is None:  # no episode was scored
                continue
            mine = [row for row in rows if row.env == env]
            one = Evaluated(entry["suite"], env, entry["of"], entry.get("step"), summary, mine)
            found.setdefault((entry["suite"], env), []).append(one)
    return found


def compared(before: Evaluated, after: Evaluated) -> Paired | None:
    """The difference on the tasks that both have; None where they share none."""
    if {row.key for row in before.episodes}.isdisjoint(row.key for row in after.episodes):
        return None
    return compare(before.episodes, after.episodes)[after.env]
