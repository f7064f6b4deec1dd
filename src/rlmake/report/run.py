"""The page of one run: what was reached, how, from what, with what and in how much time."""

from pathlib import Path
from typing import Any

from rlmake import __version__
from rlmake.core.jsonio import write_bytes
from rlmake.report import collect, sections
from rlmake.report.facts import ReportFacts
from rlmake.report.html import join, page, tag
from rlmake.report.rollouts import rollouts

TITLE = "report.html"


def make(out: Path, facts: ReportFacts) -> dict[str, Any]:
    """Write `out/report.html`. Returns `{headline: …, files: ["report.html"]}` for the manifest.

    Raises `UserError` when an evaluation's report.json cannot be read; anything else that is missing is left out.
    """
    rows = collect.metrics(facts.run_dir, facts.step)
    evaluations = collect.evaluations(facts.evals, [row["name"] for row in facts.lineage])
    body = tag(
        "main",
        sections.header(facts),
        sections.headline(facts, rows, evaluations),
        sections.evaluation(evaluations),
        sections.training(facts, rows),
        sections.earlier_training(facts),
        rollouts(evaluations),
        sections.time_spent(facts, rows),
        sections.configuration(facts.spec),
        sections.lineage(facts),
        sections.provenance(facts),
        tag("footer", f"Made by rlmake {__version__}. This page stands alone: it loads nothing."),
    )
    write_bytes(out / TITLE, page(f"{facts.name} · rlmake", join([body])).encode(errors="replace"))
    return {"headline": sections.summary(rows, evaluations), "files": [TITLE]}
