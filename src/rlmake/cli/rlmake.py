"""The build's own verbs: `rlmake plan`, `why`, `ls`, `verify`. Each takes its arguments and returns an exit code."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlmake.build import explain, publish, store
from rlmake.build import plan as build_plan
from rlmake.build.experiments import Run
from rlmake.build.names import OUTPUTS, Target
from rlmake.build.registry import Registry
from rlmake.build.workflow import amount
from rlmake.core.arguments import ArgumentParser
from rlmake.core.errors import UserError, nearest

SHOWN_LINKS = 12


def _arguments(verb: Callable, argv: list[str], *flags: str, targets: str = "*") -> argparse.Namespace:
    parser = ArgumentParser(prog=f"rlmake {verb.__name__}", description=verb.__doc__)
    parser.add_argument("targets", nargs=targets, help="targets, outputs/<run>/<artefact>; default: all")
    if "--json" in flags:
        parser.add_argument("--json", action="store_true", help="print one JSON document")
    if "--retry-failed" in flags:
        parser.add_argument("--retry-failed", action="store_true", help="plan runs that failed for good once more")
    if "--allow-missing" in flags:
        parser.add_argument(
            "--allow-missing", action="store_true", help="reports of grids do without what is not there"
        )
    if "--budget-gpu-hours" in flags:
        parser.add_argument("--budget-gpu-hours", metavar="N", help="exit code 3 when the plan is known to need more")
    if "--slurm" in flags:
        parser.add_argument("--slurm", action="store_true", help="ask SLURM whether it would take the jobs")
    args = parser.parse_args(argv)
    if getattr(args, "budget_gpu_hours", None) is not None:
        args.budget_gpu_hours = amount(args.budget_gpu_hours, "--budget-gpu-hours")
    return args


def plan(argv: list[str]) -> int:
    """What a build would run, why, and what it reuses; the same list as Snakemake's."""
    args = _arguments(plan, argv, "--json", "--retry-failed", "--allow-missing", "--budget-gpu-hours", "--slurm")
    document, stale = _planned(args)
    if args.json:
        print(json.dumps(document, indent=1, ensure_ascii=False))
    else:
        for line in stale:
            print(line)
        _print(document)
    if args.budget_gpu_hours is not None:
        explain.check_budget(document, args.budget_gpu_hours)
    return 0


def why(argv: list[str]) -> int:
    """Why a target would be built: each job with the differences against the last build under its name."""
    args = _arguments(why, argv, "--retry-failed", "--allow-missing", targets="+")
    document, _ = _planned(args)
    if not document["jobs"]:
        print("nothing to be done: it is there, whole, and nothing that it rests on has changed")
    for row in document["jobs"]:
        print(f"{row['rule']} {row['target']}: {_because(row)}")
        for one in row["reuses"]:
            print(f"    reuses {one}")
    return 0


def ls(argv: list[str]) -> int:
    """Runs with what is published of them: name, kind, steps, state of each link."""
    parser = ArgumentParser(prog="rlmake ls", description=ls.__doc__)
    parser.add_argument("names", nargs="*", help="runs, grids or folders of them; default: all")
    args = parser.parse_args(argv)
    registry = Registry.load()
    unlinked: list[str] = []
    asked: dict[str, list[Target]] = {}
    for path in build_plan.targets_of_all(registry, include_manual=True):
        target = registry.target(path)
        asked.setdefault(target.run, []).append(target)
    for run in _under(registry, args.names):
        work = registry.work(run.name)
        reached = store.progress(work.artefact("checkpoint", work.last_step).folder) if work.last_step else 0
        steps = f"{reached} of {work.last_step} steps" if work.last_step else ""
        state = _state(registry, asked.get(run.name, []), unlinked)
        print(f"{run.name:<32} {run.kind:<6} {steps:<14} {work.stage}-{work.fingerprint}  {state}")
    if unlinked:
        rest = f" and {len(unlinked) - SHOWN_LINKS} more" if len(unlinked) > SHOWN_LINKS else ""
        print(f"in the store without a link; this makes it: snakemake -c all {' '.join(unlinked[:SHOWN_LINKS])}{rest}")
    return 0


def _under(registry: Registry, given: list[str]) -> list[Run]:
    """The runs of these names, or below them. Raises `UserError` for a name that none has."""
    wanted = [name.removeprefix(f"{OUTPUTS}/").rstrip("/") for name in given]
    for name in wanted:
        if not any(f"{run}/".startswith(f"{name}/") for run in registry.runs):
            raise UserError(f"{name}: no run, grid or folder{nearest(name, [*registry.runs, *registry.grids])}")
    runs = registry.runs.items()
    return [run for name, run in runs if not wanted or any(f"{name}/".startswith(f"{one}/") for one in wanted)]


def verify(argv: list[str]) -> int:
    """Hash every file of the targets (default: of all that is stored) again; what is damaged is made stale."""
    args = _arguments(verify, argv)
    registry = Registry.load() if args.targets else None
    wanted = [registry.artefact(registry.target(path)) for path in args.targets] if registry else list(store.stored())
    wanted += [] if registry else store.kept()
    earlier = [] if registry else store.noted()
    damaged = len(earlier)
    for line in earlier:
        print(f"damaged: {line}; found before, not made again yet")
    for artefact in wanted:
        if artefact.done_path.is_file():
            try:
                found = store.faults(artefact, store.read_manifest(artefact.done_path), hashes=True)
            except UserError as error:  # the manifest itself
                found = [str(error)]
        elif store.has_record(artefact):
            found = store.faults_of_checkpoint(artefact.path, hashes=True)
            if not store.has_record(artefact):  # a running training has let it go meanwhile
                continue
        elif registry and (before := store.damage(artefact)):
            print(f"damaged: {before}; found before, not made again yet")
            damaged += 1
            continue
        elif registry:
            raise UserError(f"{artefact.path}: not built")
        else:
            continue
        for line in found:
            print(f"damaged: {line}")
        if found:
            damaged += 1
            store.withdraw(artefact, found)
    count = len(wanted) + len(earlier)
    print(f"{count} artefacts verified, {damaged} damaged" + (" and to be made again" if damaged else ""))
    return 1 if damaged else 0


def _planned(args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """`(the plan, lines about what is damaged, failed or to be asked)`."""
    if not Path("Snakefile").is_file():
        raise UserError("no Snakefile here; run this in the project's root")
    registry = Registry.load(retry=args.retry_failed, allow_missing=args.allow_missing)
    whole = not args.targets or "all" in args.targets
    asked = [*(build_plan.targets_of_all(registry) if whole else []), *(t for t in args.targets if t != "all")]
    needs = build_plan.needs(registry, asked, everything=whole)
    asks = [question for _, question in explain.questions(registry, needs)]
    lines = [*build_plan.notes(needs), *(f"asks: {line}" for line in asks)]
    document = explain.document(registry, needs)
    if getattr(args, "slurm", False):
        from rlmake.build import submission

        submission.check_plan(document["jobs"], registry.works)
    return document | {"asks": asks}, lines


def _print(document: dict[str, Any]) -> None:
    for row in document["jobs"]:
        if not row["rule"].startswith("publish"):
            print(f"{row['rule']:<9} {row['target']}: {_because(row)}{_reused(row)}{_cost(row)}")
    links = [row["target"] for row in document["jobs"] if row["rule"].startswith("publish")]
    if links:
        shown = (
            links
            if len(links) <= SHOWN_LINKS
            else [*links[: SHOWN_LINKS - 1], f"and {len(links) - SHOWN_LINKS + 1} more"]
        )
        print(f"publish   {', '.join(shown)}")
    for record in document["accepted"]:
        print(f"accepted  {record['run']}: {'; '.join(record['changes'])}; reason: {record['reason']}")
    totals = document["totals"]
    if not totals["jobs"]:
        print("nothing to be done", end="")
    else:
        jobs = f"{totals['jobs']} job{'s' * (totals['jobs'] != 1)}"
        print(f"{jobs}, {totals['gpu_hours']:.4g} GPU-hours, {_hours(totals['hours'])}", end="")
        print(f", {totals['unknown']} of unknown cost" if totals["unknown"] else "", end="")
    if totals["reused"]:
        results = f"{totals['reused']} result{'s' * (totals['reused'] != 1)}"
        print(f"; {results} there already", end="")
    free = totals["free"]
    if free["hours"]:
        print(f"; reused for free: {free['gpu_hours']:.4g} GPU-hours, {_hours(free['hours'])}", end="")
    print()


def _reused(row: dict[str, Any]) -> str:
    found = [one for one in row["reuses"] if one.startswith(("resumes", "step"))]
    found = found or [f"begins from {one}" for one in row["reuses"] if "/checkpoints/step_" in one]
    return f"; {'; '.join(found)}" if found else ""


def _cost(row: dict[str, Any]) -> str:
    if row["rule"] not in ("train", "evaluate"):
        return ""
    if row["hours"] is None:
        return " [cost unknown]"
    gpus = f"{row['gpus']} GPUs × " if row["gpus"] else ""
    return f" [{gpus}{_hours(row['hours'])}: {row['rate']}]"


def _hours(hours: float) -> str:
    seconds = hours * 3600
    return f"{seconds:.3g} s" if seconds < 60 else f"{seconds / 60:.3g} min" if hours < 1 else f"{hours:.3g} h"


def _because(row: dict[str, Any]) -> str:
    if not row["changes"]:
        return row["reason"]
    return "; ".join(str(explain.Change(**change)) for change in row["changes"])


def _state(registry: Registry, targets: list[Target], unlinked: list[str]) -> str:
    """What there is of a run's targets; those that only lack their link are added to `unlinked`."""
    found = []
    for target in targets:
        path, artefact = target.path, registry.artefact(target)
        leaf = path.removeprefix(f"{OUTPUTS}/{target.run}/")
        link = Path(path)
        if publish.points(link, artefact.path) and store.finished(artefact):
            found.append(leaf)
        elif store.finished(artefact):
            found.append(f"{leaf} (no link)")
            unlinked.append(path)
        elif failed := registry.failure(artefact):
            found.append(f"{leaf} ({' '.join(failed)})")
        elif link.is_symlink():
            found.append(f"{leaf} (of another version)")
        else:
            found.append(f"{leaf} (not built)")
    return ", ".join(found)
