"""What the page of a run is made from. The build collects it; all else is read from the files named here."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ReportFacts:
    """Facts for the page of one training at one step.

    `lineage`: what the run descends from, oldest first, itself last, each
        `{name, stage: data|model|train, kind, fingerprint, step, manifest}`; `manifest` is the path of a manifest (of a
        training `<run directory>/manifests/step_<n>.json`), or None for a run started directly.
    `evals`: `{suite, of, step, report}`: `of` is the run whose weights were evaluated, `report` the path of its
        report.json, with `episodes.jsonl` beside it. Ordered by lineage, the first of a suite counts as "before", the
        last as "after".
    `spec`: the run's specification (design §10); of a run started directly `{"config": resolved configuration}`.
    """

    name: str
    run_dir: Path
    step: int
    spec: dict[str, Any]
    lineage: list[dict[str, Any]] = field(default_factory=list)
    evals: list[dict[str, Any]] = field(default_factory=list)
