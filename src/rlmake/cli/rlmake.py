"""The build's own verbs: `rlmake plan`, `why`, `ls`, `verify`. Each takes its arguments and returns an exit code."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlmake.build import store
from rlmake.build.names import OUTPUTS
from rlmake.cli.tail import VERBS as TAIL
from rlmake.core.errors import UserError
from rlmake.export.cli import VERBS as EXPORT
from rlmake.report.overview import VERBS as OVERVIEW
from rlmake.report.summary import VERBS as SUMMARY

ORDER = ("data", "model", "train", "export", "evaluate", "report")


def _arguments(verb: Callable, argv: list[str], *flags: str, targets: str = "*") -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"rlmake {verb.__name__}", description=verb.__doc__)
    parser.add_argument("targets", nargs=targets, help="targets, outputs/<run>/<artefact>; default: all")
    if "--json" in flags:
        parser.add_argument("--json", action="store_true", help="print one JSON document")
    if "--retry-failed" in flags:
        parser.add_argument("--retry-failed", action="store_true", help="plan runs that failed for good once more")
    return parser.parse_args(argv)


def plan(argv: list[str]) -> int:
    """What a build would run, why, and what it reuses; the list is Snakemake's own."""
    args = _arguments(plan, argv, "--json", "--retry-failed")
    document = _planned(args.targets, args.retry_failed)
    if args.json:
        print(json.dumps(document, indent=1, ensure_ascii=False))
        return 0
    for row in document["jobs"]:
        if not row["rule"].startswith("publish"):
            print(f"{row['rule']:<9} {row['target']}: {_because(row)}")
    links = [row["target"] for row in document["jobs"] if row["rule"].startswith("publish")]
    if links:
        print(f"publish   {', '.join(links)}")
    totals = document["totals"]
    print(f"{totals['jobs']} jobs" if totals["jobs"] else "nothing to be done", end="")
    print(f", {totals['reused']} of what is asked for is there already" if totals["reused"] else "")
    return 0


def why(argv: list[str]) -> int:
    """Why a target would be built: each job with the differences against the last build under its name."""
    args = _arguments(why, argv, "--retry-failed", targets="+")
    document = _planned(args.targets, args.retry_failed)
    if not document["jobs"]:
        print("nothing to be done: it is there, whole, and nothing that it rests on has changed")
    for row in document["jobs"]:
        print(f"{row['rule']} {row['target']}: {_because(row)}")
        for one in row["reuses"]:
            print(f"    reuses {one}")
    return 0


def ls(argv: list[str]) -> int:
    """Runs with what is published of them: name, kind, last step, state of each link."""
    from rlmake.build.registry import Registry

    parser = argparse.ArgumentParser(prog="rlmake ls", description=ls.__doc__)
    parser.parse_args(argv)
    registry = Registry.load()
    for run in registry.runs.values():
        work = registry.work(run.name)
        steps = f"{work.last_step} steps" if work.last_step else ""
        print(f"{run.name:<32} {run.kind:<6} {steps:<12} {work.stage}-{work.fingerprint}  {_state(registry, run.name)}")
    return 0


def verify(argv: list[str]) -> int:
    """Hash every file of the targets (default: of all that is stored) again; what is damaged is made stale."""
    from rlmake.build.registry import Registry

    args = _arguments(verify, argv)
    registry = Registry.load() if args.targets else None
    wanted = [registry.artefact(registry.target(path)) for path in args.targets] if registry else list(store.stored())
    damaged = 0
    for artefact in wanted:
        if not artefact.done_path.is_file():
            raise UserError(f"{artefact.path}: not built")
        found = store.faults(artefact, store.read_manifest(artefact.done_path), hashes=True)
        for line in found:
            print(f"damaged: {line}")
        if found:
            damaged += 1
            store.withdraw(artefact)
    print(f"{len(wanted)} artefacts verified, {damaged} damaged" + (" and to be made again" if damaged else ""))
    return 1 if damaged else 0


VERBS: dict[str, Callable[[list[str]], int]] = {
    "plan": plan,
    "why": why,
    "ls": ls,
    "verify": verify,
    **TAIL,
    **EXPORT,
    **SUMMARY,
    **OVERVIEW,
}


def _planned(targets: list[str], retry_failed: bool) -> dict[str, Any]:
    from rlmake.build.dryrun import dry_run
    from rlmake.build.explain import explain

    jobs, driver = dry_run(targets, retry_failed=retry_failed)
    rows = [explain(job, driver) for job in jobs]
    rows.sort(key=lambda row: ORDER.index(row["rule"]) if row["rule"] in ORDER else len(ORDER))
    known = [row["gpu_hours"] for row in rows]
    return {
        "jobs": rows,
        "failed": [{"run": run, "why": text} for run, text in driver.needs.failed.items()],
        "totals": {
            "jobs": len(rows),
            "gpu_hours": None if None in known else sum(known),
            "reused": len({link for link, artefact in driver.needs.links.items() if artefact in driver.needs.whole}),
        },
    }


def _because(row: dict[str, Any]) -> str:
    from rlmake.build.explain import Change

    if not row["changes"]:
        return row["reason"]
    return "; ".join(str(Change(**change)) for change in row["changes"])


def _state(registry: Any, name: str) -> str:
    from rlmake.build import plan as build_plan
    from rlmake.build import publish

    found = []
    for path in (path for path in build_plan.targets_of_all(registry) if path.startswith(f"{OUTPUTS}/{name}/")):
        target = registry.target(path)
        if target.run != name:
            continue
        leaf, artefact = path.removeprefix(f"{OUTPUTS}/{name}/"), registry.artefact(target)
        link = Path(path)
        if publish.points(link, artefact.path) and store.finished(artefact):
            found.append(leaf)
        elif link.is_symlink():
            found.append(f"{leaf} (of another version)")
        else:
            found.append(f"{leaf} (not built)")
    return ", ".join(found)
