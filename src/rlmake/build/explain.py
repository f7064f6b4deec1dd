"""Why something is to be built: what differs from the last build under the same name, and what is reused."""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlmake.build import plan, publish, store
from rlmake.build.estimate import Estimates
from rlmake.build.experiments import FOLDER
from rlmake.build.fingerprint import leaves, of_parent
from rlmake.build.names import EXPORTS, OUTPUTS, Target
from rlmake.build.plan import Needs, PlannedJob
from rlmake.build.registry import Registry
from rlmake.build.store import Artefact
from rlmake.build.work import Work
from rlmake.config.layers import Composed
from rlmake.core.errors import UserError
from rlmake.core.jsonio import canonical

LENGTH = "the schedule depends on it, so the run can't be continued and is trained from its start"


@dataclass(frozen=True)
class Change:
    """One difference between two builds, and the file that says the new value.

    `default`: nobody wrote the value, the default in the code has changed. `note`: what follows from it.
    """

    key: str
    before: Any
    after: Any
    default: bool = False
    file: str | None = None
    note: str | None = None

    def __str__(self) -> str:
        note = " (the default in the code has changed)" if self.default else f" ({self.file})" if self.file else ""
        note += f": {self.note}" if self.note else ""
        if self.key.startswith("cells ") and None in (self.before, self.after):
            names = str(self.after or self.before).split(", ")
            more = f" and {len(names) - 3} more" if len(names) > 4 else ""
            return f"{self.key}: {', '.join(names[: 3 if more else 4])}{more}{note}"
        return f"{self.key} {_say(self.before)} → {_say(self.after)}{note}"


def document(registry: Registry, needs: Needs) -> dict[str, Any]:
    """The plan as `rlmake plan --json` prints it.

    `jobs`: {rule, run, target, output, reason, changes, reuses, gpus, gpu_hours, hours, rate} each; `gpu_hours` and
    `hours` are None where nothing like it was measured and no rate is stated; `rate` says what an estimate rests on.
    `totals`: {jobs, gpu_hours, hours, unknown, reused, free}: sums of what is known, trainings and evaluations of
    unknown cost, results that are there and used (of a line the last that is whole), and what went into all of it.
    """
    estimates = Estimates(registry)
    rows = [explain(job, registry, needs, estimates) for job in plan.jobs(registry, needs)]
    unknown = [row for row in rows if row["hours"] is None and row["rule"] in ("train", "evaluate")]
    return {
        "jobs": rows,
        "failed": [{"run": run, "why": text} for run, text in needs.failed.items()],
        "accepted": [record for _, record in sorted(registry.accepted_in_use.items())],
        "totals": {
            "jobs": len(rows),
            "gpu_hours": round(sum(row["gpu_hours"] or 0.0 for row in rows), 4),
            "hours": round(sum(row["hours"] or 0.0 for row in rows), 4),
            "unknown": len(unknown),
            "reused": len(needs.whole),
            "free": estimates.spent(needs.whole),
        },
    }


def explain(job: PlannedJob, registry: Registry, needs: Needs, estimates: Estimates) -> dict[str, Any]:
    """A job as a row of the plan, see `document`."""
    row: dict[str, Any] = {"rule": job.rule, "output": job.output, "changes": [], "reuses": []}
    if job.target is not None:
        reason = needs.stale.get(job.output, "there is no link yet")
        if reason == "there is no link yet" and os.path.islink(job.output):
            reason = "what it shows is made anew"
        return row | {
            "run": job.target.run,
            "target": job.target.path,
            "reason": reason,
            "gpus": 0,
            "gpu_hours": 0.0,
            "hours": 0.0,
            "rate": None,
        }
    artefact = job.artefact
    work = registry.works[artefact.stage, artefact.fingerprint]
    run = work.facts["runs"][0]
    if artefact.stage == "train":  # of several names the one that ends here
        ends = (name for name in work.facts["runs"] if registry.work(name).last_step == artefact.step)
        run = next(ends, run)
        work = registry.work(run)
    if damaged := needs.stale.get(job.output) or store.damage(artefact):
        reason, found = f"damaged: {damaged}", []
    else:
        before = last_build(registry, run, work)
        found = [_with_note(change, work) for change in changes(before, work, artefact.step)] if before else []
        if found:
            reason = "changed since the last build"
        else:
            reason = _unfinished(artefact) or _unbuilt(artefact, _target(artefact, work, run))
    gpus = work.resources["gpus"] if job.rule in ("train", "evaluate", "parity") else 0
    return row | {
        "run": run,
        "target": _target(artefact, work, run).path,
        "reason": reason,
        "changes": [asdict(change) for change in found],
        "reuses": list(_reuses(artefact, work)),
        "gpus": gpus,
        **estimates.of(artefact, gpus),
    }


def questions(registry: Registry, needs: Needs) -> list[tuple[Work, str]]:
    """`(work, what to ask)` where an earlier build differs by nothing but defaults in the code."""
    found = []
    for stage, fingerprint in dict.fromkeys((artefact.stage, artefact.fingerprint) for artefact in needs.missing):
        work = registry.works[stage, fingerprint]
        run = work.facts["runs"][0]
        before = last_build(registry, run, work) if work.declared is not None else None
        if before is None or before["fingerprint"] == fingerprint:
            continue
        differ = changes(before, work)
        if differ and all(change.default for change in differ):
            target = Target(run, "eval", work.facts["asked_step"], work.facts["suite"]) if stage == "eval" else None
            path = (target or Target(run, store.KIND_OF_STAGE.get(stage, "weights"))).path
            what = "; ".join(map(str, differ))
            hint = f"keep it by `rlmake accept {path} --reason …`, or build it anew by --config defaults=new"
            found.append((work, f"{path} is there, built before {what}: {hint}"))
    return found


def check_budget(planned: dict[str, Any], budget: float) -> None:
    """Raise `BudgetExceeded` when what is known to be needed is more than `budget` GPU-hours."""
    totals = planned["totals"]
    if totals["gpu_hours"] > budget:
        costly = max(planned["jobs"], key=lambda row: row["gpu_hours"] or 0.0)
        raise BudgetExceeded(
            f"the plan needs {totals['gpu_hours']:.4g} GPU-hours, the budget is {budget:.4g}; "
            f"most of it: {costly['target']}, {costly['gpu_hours']:.4g}; nothing was started"
        )


class BudgetExceeded(UserError):
    """The plan costs more than was allowed."""

    exit_code = 3


def last_build(registry: Registry, run: str, work: Work) -> dict[str, Any] | None:
    """The specification of what is published under a run's name now (of a training without weights: of the one whose
    logs are, once it has a checkpoint), else of its latest finished build in the store (a grid's cell of which only the
    report was asked for has no link); None when there is none."""
    return _published(run, work) or registry.built.get((work.stage, run, work.facts.get("leaf")))


def _published(run: str, work: Work) -> dict[str, Any] | None:
    if not os.path.isdir(f"{OUTPUTS}/{run}"):
        return None
    leaf = {
        "eval": work.facts.get("leaf"),
        "parity": "parity/report.json",
        "report": "report.html",
        "grid": "report.html",
        "best": "exports/best/weights",
    }
    leaf |= {"data": "data", "model": "weights", "train": "weights"}
    links = [Path(OUTPUTS, run, leaf[work.stage])]
    if work.stage == "train":
        links += [*sorted(Path(OUTPUTS, run, "exports").glob("step_*/weights")), Path(OUTPUTS, run, "logs")]
    for link in links:
        found = published_unit(link)
        begun = link.name != "logs" or (found and store.progress(store.STORE / "-".join(found)))
        if found and found[0] == work.stage and begun:
            try:
                return store.read_spec(*found)
            except UserError:
                continue
    return None


def published_unit(link: Path) -> tuple[str, str] | None:
    """`(stage, fingerprint)` of what a link into the store points to, the build's or a user's own (absolute, or a link
    to a link); None when it is none."""
    if not link.is_symlink():
        return None
    direct = Path(os.path.normpath(link.parent / os.readlink(link)))
    if not direct.is_relative_to(store.STORE):
        real, root = os.path.realpath(link), os.path.realpath(store.STORE)
        direct = store.STORE / os.path.relpath(real, root) if real.startswith(f"{root}/") else Path()
    if not direct.is_relative_to(store.STORE) or direct == store.STORE:
        return None
    stage, _, fingerprint = direct.relative_to(store.STORE).parts[0].partition("-")
    return stage, fingerprint


def changes(before: dict[str, Any], work: Work, step: int | None = None) -> list[Change]:
    """What differs in identity between a specification and the work that is planned now; a raised last step too."""
    found = []
    defaults = work.defaults()
    raw = work.declared.raw if work.declared else {}
    if work.kind == "grid":
        file = f"{FOLDER}/{work.facts['grid']}.toml"
        found += [*_of_grid(before["semantic"], work.semantic, file), *_cells_anew(before, work)]
    else:
        old, new = dict(leaves(before["semantic"])), dict(leaves(work.semantic))
        silent: list[Change] = []  # of a table that only one of the two has, and nobody wrote
        for key in dict.fromkeys([*old, *new]):
            a, b = old.get(key), new.get(key)
            if key.rpartition(".")[2] == "max_steps" and None in (a, b):  # it counts under one of the schedules only
                a, b = (_at(config, key) for config in (before.get("config") or {}, work.config))
            if canonical(a) != canonical(b) and (not of_parent(key) or _inside(key, a, b)):
                default = key in before["defaults"] and key in defaults
                unsaid = (key not in old and key in defaults) or (key not in new and key in before["defaults"])
                file = None if default or unsaid else _origin(raw, key, work)
                key, file = (f"experiment.best.{key}", work.facts["file"]) if work.kind == "best" else (key, file)
                change = _of_file(before, work, key, a, b, file) or Change(key, a, b, default, file)
                (silent if unsaid else found).append(change)
        found += _parents_changed(before, work)
        found = found or silent
    for key in dict.fromkeys([*before["revisions"], *work.revisions]):
        a, b = before["revisions"].get(key), work.revisions.get(key)
        if a != b:
            found.append(Change(f"revision of {key}", a, b))
    if step is not None and before["fingerprint"] == work.fingerprint and before["steps"]:
        last = max(before["steps"])
        if step > last:
            found.append(Change("max_steps", last, step, file=_origin(raw, "max_steps", work)))
    return found


def _of_file(before: dict[str, Any], work: Work, key: str, a: Any, b: Any, file: str | None) -> Change | None:
    """Of a leaf that stands for a file (its content, or where it lies in a parent): the content of the file that is
    named as before, else its name."""
    setting = key.removesuffix(".content").removesuffix(".rest")
    then, now = (_at(config, setting) for config in (before.get("config") or {}, work.config))
    if setting == key or not (isinstance(then, str) and isinstance(now, str)):
        return None
    return Change(f"content of {now}", a[:8], b[:8]) if then == now else Change(setting, then, now, file=file)


def _inside(key: str, a: Any, b: Any) -> bool:
    """Whether two values name different files of parents; of the parents themselves their own rows say it better."""
    return key.endswith(".rest") and bool(a and b)


def _at(config: Any, key: str) -> Any:
    """The value at a dotted key of a configuration; None where there is none."""
    for part in key.split("."):
        step = config.get(part) if isinstance(config, dict) else None
        config = config[int(part)] if isinstance(config, list) and part.isdecimal() else step
    return config


def _with_note(change: Change, work: Work) -> Change:
    """Why a training is not continued although only its length has changed."""
    length = work.fixed_length and change.key.rpartition(".")[2] == "max_steps" and change.before is not None
    return replace(change, note=LENGTH) if length else change


def _parents_changed(before: dict[str, Any], work: Work) -> list[Change]:
    was = {parent["role"]: parent for parent in before["parents"]}
    pairs = [(parent["role"], _parent(was.pop(parent["role"], None)), _parent(parent)) for parent in work.parents]
    pairs += [(role, _parent(parent), None) for role, parent in was.items()]
    return [Change(role, a, b) for role, a, b in pairs if a != b]


def _cells_anew(before: dict[str, Any], work: Work) -> list[Change]:
    """Of a grid the cells whose training or evaluations are others than before, although their names are the same."""
    both = (change for change in _parents_changed(before, work) if None not in (change.before, change.after))
    changed = {change.key for change in both}
    cells = [
        cell["name"]
        for cell in work.facts["cells"]
        if not changed.isdisjoint(f"{cell['name']}.{role}" for role in ("run", *(e["suite"] for e in cell["evals"])))
    ]
    return [Change("cells made anew", None, ", ".join(cells))] if cells else []


def _of_grid(before: dict[str, Any], now: dict[str, Any], file: str) -> list[Change]:
    """Cells by their names: which came, went, failed, or are missing, and whether another one is the baseline."""
    old, new = ({cell[0]: cell for cell in one.get("cells", ())} for one in (before, now))
    found = []
    if before.get("grid") != now.get("grid"):
        found.append(Change("grid", before.get("grid"), now.get("grid"), file=file))
    if added := [name for name in new if name not in old]:
        found.append(Change("cells added", None, ", ".join(added), file=file))
    if gone := [name for name in old if name not in new]:
        found.append(Change("cells removed", ", ".join(gone), None, file=file))
    base = [next((name for name, cell in cells.items() if cell[2]), None) for cells in (old, new)]
    if base[0] != base[1]:
        found.append(Change("baseline", *base, file=file))
    missing = ("missing", "missing", "missing at the last report")
    for key, word, after in (("lost", "failed", "no longer failed"), missing):
        was, lost = (one.get(key) or {} for one in (before, now))
        if more := [name for name in lost if lost[name] != was.get(name)]:
            found.append(Change(f"cells {word}", None, ", ".join(more)))
        if back := [name for name in was if name not in lost and name in new]:
            found.append(Change(f"cells {after}", None, ", ".join(back)))
    return found


def _origin(raw: Any, key: str, work: Work) -> str | None:
    """The file that says the value of a key, also where a shared key of the root has filled it."""
    if not isinstance(raw, Composed):
        return None
    parts = tuple(key.split("."))
    places = [*(parts[start:] for start in range(len(parts))), *(parts[:end] for end in range(len(parts) - 1, 0, -1))]
    return next((raw.origins[place] for place in places if place in raw.origins), getattr(work.declared, "file", None))


def _parent(record: dict[str, Any] | None) -> str | None:
    if record is None:
        return None
    step = f" step {record['step']}" if record["step"] is not None else ""
    return f"{record['stage']}-{record['fingerprint'][:8]}{step}"


def _unfinished(artefact: Artefact) -> str | None:
    """What an earlier attempt has left of a training."""
    if artefact.kind != "checkpoint" or not (reached := store.progress(artefact.folder)):
        return None
    if store.is_kept(artefact):
        on_the_way = " on the way to another step" if artefact.step != reached else ""
        return f"kept{on_the_way}, only to be recorded"
    assert artefact.step is not None
    return f"unfinished: step {reached} of {artefact.step}" if reached < artefact.step else "this step was not kept"


def _unbuilt(artefact: Artefact, target: Target) -> str:
    if store.finished(artefact):
        return "there, only to be recorded"
    lost = os.path.islink(target.path) and publish.points(target.path, artefact.path)
    return "its result is missing" if lost else "not built yet"


def _reuses(artefact: Artefact, work: Work) -> Iterator[str]:
    if artefact.kind == "checkpoint" and (reached := store.progress(artefact.folder)) and not store.is_kept(artefact):
        assert artefact.step is not None
        yield f"resumes from step {reached}" if reached <= artefact.step else f"step {reached} was reached before"
    if artefact.kind not in EXPORTS or artefact.stage != "train":
        for parent in work.parents:
            made = store.artefact_of(parent)
            if store.finished(made) or store.is_kept(made):
                yield parent["ref"] or _parent(parent) or ""


def _target(artefact: Artefact, work: Work, run: str) -> Target:
    if artefact.stage == "eval":
        return Target(run, "eval", work.facts["asked_step"], work.facts["suite"])
    if artefact.stage == "grid":
        return Target(run, "grid", rest="report.html")
    kind = "best" if artefact.stage == "best" else artefact.kind
    return Target(run, kind, None if kind in EXPORTS and artefact.step == work.last_step else artefact.step)


def _say(value: Any) -> str:
    return value if isinstance(value, str) else "none" if value is None else json.dumps(value, ensure_ascii=False)
