"""Why something is to be built: what differs from the last build under the same name, and what is reused."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmake.build import plan, store
from rlmake.build.dryrun import PlannedJob
from rlmake.build.fingerprint import leaves
from rlmake.build.names import OUTPUTS, Target
from rlmake.build.registry import Registry, Work
from rlmake.build.workflow import RULES, Driver
from rlmake.core.errors import UserError
from rlmake.core.jsonio import canonical

PUBLISHES = {
    "publish_data": "data", "publish_weights": "weights", "publish_export": "weights", "publish_report": "report",
    "publish_checkpoint": "checkpoint", "publish_evaluation": "eval", "publish_evaluation_of_step": "eval",
}  # fmt: skip


@dataclass(frozen=True)
class Change:
    """One difference between two builds. `default`: nobody wrote the value, the default in the code has changed."""

    key: str
    before: Any
    after: Any
    default: bool = False

    def __str__(self) -> str:
        note = " (the default in the code has changed)" if self.default else ""
        return f"{self.key} {_say(self.before)} → {_say(self.after)}{note}"


def explain(job: PlannedJob, driver: Driver) -> dict[str, Any]:
    """A job as a row of `rlmake plan --json`: {rule, run, target, reason, changes, reuses, gpus, gpu_hours}.

    `gpu_hours` is None: not known before speeds of earlier builds are looked up.
    """
    registry = driver.registry
    if job.rule in PUBLISHES:
        target = registry.target(job.output)
        reason = driver.needs.stale.get(Path(job.output), "there is no link yet")
        return _row(job, target.run, target.path, reason, [], [], 0)
    stage = RULES[job.rule]
    work = registry.works[stage, job.wildcards["fp"]]
    run, step = work.facts["runs"][0], int(job.wildcards["n"]) if "n" in job.wildcards else None
    if Path(job.output) in driver.needs.stale:
        reason, found = driver.needs.stale[Path(job.output)], []
    else:
        before = last_build(registry, run, work, job.rule)
        found = changes(before, work, step) if before else []
        reason = "changed since the last build" if found else "not built yet" if not before else "its result is missing"
    gpus = work.resources["gpus"] if job.rule in ("train", "evaluate") else 0
    return _row(job, run, _target(job, work, run, step), reason, found, _reuses(job, work, step), gpus)


def _row(job: PlannedJob, run: str, target: str, reason: str, found: list[Change], reuses: list[str], gpus: int):
    return {
        "rule": job.rule,
        "run": run,
        "target": target,
        "output": job.output,
        "reason": reason,
        "changes": [{"key": c.key, "before": c.before, "after": c.after, "default": c.default} for c in found],
        "reuses": reuses,
        "gpus": gpus,
        "gpu_hours": None if gpus else 0.0,
    }


def last_build(registry: Registry, run: str, work: Work, rule: str) -> dict[str, Any] | None:
    """The specification of what is published under a run's name now, None when nothing (of this stage) is."""
    leaf = {"evaluate": f"evals/{work.facts.get('suite')}", "report": "report.html", "data": "data"}.get(
        rule, "weights"
    )
    link = Path(OUTPUTS) / run / leaf
    if not link.is_symlink():
        return None
    found = Path(os.path.normpath(link.parent / os.readlink(link))).parts
    root = len(store.STORE.parts)
    if found[:root] != store.STORE.parts or len(found) <= root:
        return None
    stage, _, fingerprint = found[root].partition("-")
    if stage != work.stage:
        return None
    try:
        return store.read_spec(stage, fingerprint)
    except UserError:
        return None


def changes(before: dict[str, Any], work: Work, step: int | None = None) -> list[Change]:
    """What differs in identity between a specification and the work that is planned now; a raised last step too."""
    found = []
    defaults = work.defaults()
    old, new = dict(leaves(before["semantic"])), dict(leaves(work.semantic))
    for key in dict.fromkeys([*old, *new]):
        a, b = old.get(key), new.get(key)
        if canonical(a) != canonical(b) and not _points(key):
            default = key in before["defaults"] and key in defaults
            found.append(Change(key, a, b, default))
    was = {parent["role"]: parent for parent in before["parents"]}
    for parent in work.parents:
        old_parent = was.pop(parent["role"], None)
        a, b = _parent(old_parent), _parent(parent)
        if a != b:
            found.append(Change(parent["role"], a, b))
    found += [Change(role, _parent(parent), None) for role, parent in was.items()]
    for key in dict.fromkeys([*before["revisions"], *work.revisions]):
        a, b = before["revisions"].get(key), work.revisions.get(key)
        if a != b:
            found.append(Change(f"revision of {key}", a, b))
    if step is not None and before["fingerprint"] == work.fingerprint and before["steps"]:
        last = max(before["steps"])
        if step > last:
            found.append(Change("max_steps", last, step))
    return found


def _points(key: str) -> bool:
    """Leaves inside a replaced value (`….parent.0`): the parents' own rows say it better."""
    return ".parent." in f".{key}." or key.endswith(".rest")


def _parent(record: dict[str, Any] | None) -> str | None:
    if record is None:
        return None
    step = f" step {record['step']}" if record["step"] is not None else ""
    return f"{record['stage']}-{record['fingerprint'][:8]}{step}"


def _reuses(job: PlannedJob, work: Work, step: int | None) -> list[str]:
    found = []
    if job.rule == "train" and step is not None:
        reached = plan.progress(work.artefact("checkpoint", step).folder)
        if reached:
            found.append(f"goes on behind step {reached}" if reached <= step else f"step {reached} was reached before")
    for parent in work.parents if job.rule != "export" else []:
        if store.finished(store.artefact_of(parent)):
            found.append(parent["ref"] or _parent(parent) or "")
    return found


def _target(job: PlannedJob, work: Work, run: str, step: int | None) -> str:
    if job.rule == "evaluate":
        return work.facts["target"]
    kind = {"train": "checkpoint", "export": "weights", "model": "weights"}.get(job.rule, job.rule)
    return Target(run, kind, None if kind == "weights" and step == work.last_step else step).path


def _say(value: Any) -> str:
    return value if isinstance(value, str) else "none" if value is None else json.dumps(value, ensure_ascii=False)
