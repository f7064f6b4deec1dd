"""The saved view `overview` of a W&B project: the handful of metrics that matter, by section and environment.

It is made once per project. A run with other environments (or a newer list of metrics) gets `overview-v2`, and so on:
nobody's view is overwritten. Which metrics: those marked `overview` in `monitors/names.py`.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from rlmake.monitors import names

NAME = "overview"
VIEWS = """
query RlmakeViews($entityName: String, $name: String, $viewType: String) {
  project(name: $name, entityName: $entityName) {
    allViews(viewType: $viewType) { edges { node { id displayName spec } } }
  }
}
"""
Sections = dict[str, list[str]]


def sections(resolved: Mapping[str, Any]) -> Sections:
    """`{section: [metric]}` for the environments of the resolved configurations `{component: configuration}`."""
    orchestrator = resolved.get("orchestrator") or {}
    train, held_out = (_sources(orchestrator.get(split)) for split in ("train", "eval"))
    if "sft" in resolved:
        held_out = held_out or _sources(resolved["sft"].get("eval"))
    producers = {"orch", "trainer"} if orchestrator else {"sft", "trainer"} if "sft" in resolved else {"eval"}
    found: Sections = {section: [] for section in names.SECTIONS}
    for metric in names.METRICS:
        if metric.overview and metric.producer in producers:
            found[metric.section] += [
                name for name in names.expand(metric, train, held_out) if name not in found[metric.section]
            ]
    return {section: metrics for section, metrics in found.items() if metrics}


def _sources(split: Mapping[str, Any] | None) -> list[str]:
    return [str(source["name"]) for source in (split or {}).get("source") or ()]


def ensure(entity: str, project: str, resolved: Mapping[str, Any]) -> str:
    """The name of the view that shows these sections: one that is there, or a new one, which is then saved."""
    import wandb
    import wandb_workspaces.reports.v2 as panels
    import wandb_workspaces.workspaces as workspaces
    from wandb_workspaces._graphql import execute_graphql

    wanted = sections(resolved)
    variables = {"entityName": entity, "name": project, "viewType": "project-view"}
    reply = execute_graphql(wandb.Api(), VIEWS, variables)
    edges = (((reply or {}).get("project") or {}).get("allViews") or {}).get("edges") or []
    there = {edge["node"]["displayName"]: edge["node"]["spec"] for edge in edges}
    mine = {name: spec for name, spec in there.items() if re.fullmatch(rf"{NAME}(-v\d+)?", name)}
    for name, spec in mine.items():
        if shown(spec) == wanted:
            return name
    latest = max((int(name.rpartition("-v")[2]) if "-v" in name else 1 for name in mine), default=0)
    name = NAME if not latest else f"{NAME}-v{latest + 1}"
    workspaces.Workspace(
        entity=entity,
        project=project,
        name=name,
        auto_generate_panels=False,
        sections=[
            workspaces.Section(
                name=section, is_open=True, panels=[panels.LinePlot(title=y, x="step", y=[y]) for y in metrics]
            )
            for section, metrics in wanted.items()
        ],
    ).save()
    return name


def shown(spec: str) -> Sections:
    """The sections of a saved view; `{}` where it can't be read: then it is not ours."""
    try:
        bank = json.loads(spec)["section"]["panelBankConfig"]["sections"]
        return {
            part["name"]: [name for panel in part["panels"] for name in panel["config"].get("metrics", [])]
            for part in bank
        }
    except (ValueError, KeyError, TypeError):
        return {}
