"""The numbers of a grid: its cells, the variants that they repeat over seeds, and each variant against the baseline.

A variant is what cells have in common that differ in their seed alone (an axis whose key ends in `seed`). A metric's
mean and 95 % interval are over the seeds; the difference to the baseline is paired: seed by seed where both variants
have at least two seeds in common, else (one seed each) task by task where both were evaluated.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlmake.build import lease
from rlmake.core.errors import UserError
from rlmake.core.jsonio import canonical, read_json
from rlmake.core.stats import mean_ci95
from rlmake.monitors import Row
from rlmake.report import collect
from rlmake.report.collect import Evaluated, Points

SCHEMA = 1
# Last values of a training that are compared beside the evaluations: name, patterns of the metric.
LAST = {
    "rl": (
        ("train reward", collect.RL_CURVES[0].keys),
        ("mismatch KL", (r"mismatch_kl/all/mean",)),
        ("entropy", collect.RL_CURVES[2].keys),
    ),
    "sft": (("validation loss", collect.SFT_CURVES[1].keys), ("loss", (r"loss/mean",))),
}


@dataclass(frozen=True)
class CellFacts:
    """One cell as the build knows it. `run_dir` may not be there; `evals`: `{suite, report}`; `manifest`: of its last
    checkpoint. Why it is not among the results: `lost`: it failed for good; `missing`: what there is of it."""

    name: str
    run: str
    values: dict[str, Any]
    texts: dict[str, str]
    baseline: bool
    fingerprint: str
    step: int
    run_dir: Path
    manifest: Path
    evals: list[dict[str, Any]]
    lost: str | None = None
    missing: str | None = None

    @property
    def why(self) -> str | None:
        return self.lost or self.missing


@dataclass(frozen=True)
class GridFacts:
    """What the page of a grid is made from. `kind`: sft or rl; `axes`: keys in the order of the file."""

    name: str
    kind: str
    cells: list[CellFacts]
    axes: list[str]


@dataclass
class Cell:
    """A cell with what was found of it. `state`: done, failed or missing."""

    facts: CellFacts
    state: str
    metrics: dict[str, float] = field(default_factory=dict)
    evaluated: dict[str, Evaluated] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    gpu_hours: float | None = None
    hours: float | None = None
    steps: int = 0  # that the training made, also where it failed

    @property
    def seed(self) -> Any:
        return next((value for key, value in self.facts.values.items() if is_seed(key)), None)


@dataclass
class Variant:
    """Cells that differ in their seed alone."""

    name: str
    texts: dict[str, str]
    cells: list[Cell]
    baseline: bool
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    differences: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def done(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.state == "done"]


@dataclass
class Results:
    """All that a page and the files beside it say."""

    facts: GridFacts
    axes: list[str]
    cells: list[Cell]
    variants: list[Variant]
    metrics: list[str]

    @property
    def baseline(self) -> Variant | None:
        return next((variant for variant in self.variants if variant.baseline), None)


def is_seed(key: str) -> bool:
    return key.rpartition(".")[2] == "seed"


def results(facts: GridFacts) -> Results:
    """Read everything. Raises `UserError` when an evaluation's report.json of a finished cell cannot be read."""
    cells = [_cell(facts.kind, cell) for cell in facts.cells]
    metrics = list(dict.fromkeys(name for cell in cells for name in cell.metrics))
    variants = _variants(cells, facts.axes)
    baseline = next((variant for variant in variants if variant.baseline), None)
    for variant in variants:
        for name in metrics:
            values = [cell.metrics[name] for cell in variant.done if name in cell.metrics]
            if values:
                mean, ci95 = mean_ci95(values)
                variant.metrics[name] = {"mean": mean, "ci95": ci95, "n": len(values)}
            if baseline is not None and variant is not baseline and (found := difference(baseline, variant, name)):
                variant.differences[name] = found
    return Results(facts, facts.axes, cells, variants, metrics)


def _cell(kind: str, facts: CellFacts) -> Cell:
    cell = Cell(facts, "failed" if facts.lost else "missing" if facts.missing else "done")
    cell.rows = collect.metrics(facts.run_dir, facts.step)
    cell.steps = max((row.step for row in cell.rows), default=0)
    made = collect.manifest({"manifest": facts.manifest})
    seconds = collect.seconds(made) if made else lease.spent(facts.run_dir)
    if seconds is not None:
        cell.hours = seconds / 3600
        cell.gpu_hours = made.get("gpu_hours", 0.0) if made else cell.hours * _gpus(facts.run_dir)
    if cell.state == "done":
        evals = [{**entry, "of": facts.run} for entry in facts.evals]
        for (suite, env), (one, *_) in collect.evaluations(evals).items():
            name = suite if suite == env else f"{suite}/{env}"
            cell.evaluated[name] = one
            cell.metrics[name] = one.mean
        for name, patterns in LAST[kind]:
            if points := collect.find(cell.rows, patterns):
                cell.metrics[name] = points[-1][1]
    return cell


def _gpus(run_dir: Path) -> int:
    """GPUs that a training asked for."""
    try:
        return read_json(run_dir / "spec.json")["resources"]["gpus"]
    except (UserError, KeyError, TypeError):
        return 0


def _variants(cells: Sequence[Cell], axes: Sequence[str]) -> list[Variant]:
    groups: dict[bytes, list[Cell]] = {}
    for cell in cells:
        same = [[key, cell.facts.values.get(key)] for key in axes if not is_seed(key)]
        groups.setdefault(canonical(same), []).append(cell)
    found = []
    for members in groups.values():
        own = members[0].facts.texts
        texts = {key: own[key] for key in axes if key in own and not is_seed(key)}
        name = ", ".join(f"{key.rpartition('.')[2]} {text}" for key, text in texts.items()) or "all"
        first = all(cell.facts.baseline for cell in members) and not any(one.baseline for one in found)
        found.append(Variant(name, texts, members, first))
    return found


def difference(baseline: Variant, variant: Variant, metric: str) -> dict[str, Any] | None:
    """`{mean, ci95, n, over}`: `variant − baseline`, paired over `seeds` or `tasks`; None where there is no pair."""
    first, second = (
        {canonical(cell.seed): cell for cell in side.done if metric in cell.metrics} for side in (baseline, variant)
    )
    common = [seed for seed in first if seed in second]
    if not common:
        return None
    if len(common) > 1:
        mean, ci95 = mean_ci95([second[seed].metrics[metric] - first[seed].metrics[metric] for seed in common])
        return {"mean": mean, "ci95": ci95, "n": len(common), "over": "seeds"}
    before, after = first[common[0]], second[common[0]]
    both = metric in before.evaluated and metric in after.evaluated
    if both and (paired := collect.compared(before.evaluated[metric], after.evaluated[metric])):
        return {"mean": paired.difference, "ci95": paired.ci95, "n": paired.num_tasks, "over": "tasks"}
    return {"mean": after.metrics[metric] - before.metrics[metric], "ci95": None, "n": 1, "over": "seeds"}


def mean_curve(cells: Sequence[Cell], patterns: Sequence[str], producer: str | None = None) -> Points:
    """The mean over cells of a metric at the steps that all of them have."""
    found = [dict(points) for cell in cells if (points := collect.find(cell.rows, patterns, producer))]
    if not found:
        return []
    common = set(found[0]).intersection(*found[1:])
    return [(step, sum(points[step] for points in found) / len(found)) for step in sorted(common)]


def totals(cells: Sequence[Cell]) -> tuple[float, float]:
    """GPU-hours and hours of trainings, cells that are one and the same training counted once."""
    once: Mapping[str, Cell] = {cell.facts.fingerprint: cell for cell in cells}
    return sum(cell.gpu_hours or 0.0 for cell in once.values()), sum(cell.hours or 0.0 for cell in once.values())


def as_json(found: Results) -> dict[str, Any]:
    """The record `results.json`."""
    gpu_hours, hours = totals(found.cells)
    return {
        "schema": SCHEMA,
        "grid": found.facts.name,
        "kind": found.facts.kind,
        "axes": found.axes,
        "metrics": found.metrics,
        "baseline": found.baseline.name if found.baseline else None,
        "cells": [
            {
                "name": cell.facts.name,
                "run": cell.facts.run,
                "values": cell.facts.values,
                "baseline": cell.facts.baseline,
                "fingerprint": cell.facts.fingerprint,
                "state": cell.state,
                "why": cell.facts.why,
                "steps": cell.steps,
                "metrics": cell.metrics,
                "gpu_hours": cell.gpu_hours,
                "hours": cell.hours,
            }
            for cell in found.cells
        ],
        "variants": [
            {
                "name": variant.name,
                "values": variant.texts,
                "baseline": variant.baseline,
                "cells": [cell.facts.name for cell in variant.cells],
                "done": len(variant.done),
                "metrics": variant.metrics,
                "differences": variant.differences,
            }
            for variant in found.variants
        ],
        "totals": {"gpu_hours": gpu_hours, "hours": hours},
    }


def as_csv(found: Results) -> str:
    """`results.csv`: a row per cell."""
    file = io.StringIO()
    out = csv.writer(file, lineterminator="\n")
    head = ["cell", "run", *found.axes, "state", "why", "steps", *found.metrics, "gpu_hours", "hours"]
    out.writerow(head)
    for cell in found.cells:
        facts = cell.facts
        axes = [facts.texts.get(key, "") for key in found.axes]
        metrics = [cell.metrics.get(name, "") for name in found.metrics]
        rest = ["" if value is None else value for value in (cell.gpu_hours, cell.hours)]
        out.writerow([facts.name, facts.run, *axes, cell.state, facts.why or "", cell.steps, *metrics, *rest])
    return file.getvalue()
