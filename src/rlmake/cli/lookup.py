"""`rlmake card`, `diff`: what is known of a result, and how two runs differ."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlmake.build import card as cards
from rlmake.build import explain, names, store
from rlmake.build.experiments import FOLDER
from rlmake.build.fingerprint import leaves
from rlmake.build.registry import Registry
from rlmake.build.work import Work
from rlmake.core.arguments import ArgumentParser
from rlmake.core.errors import UserError, nearest
from rlmake.core.jsonio import canonical, read_json


def _parent(one: dict[str, Any]) -> str:
    return " ".join([f"{one['role']}:", *filter(None, [one["ref"]]), f"{one['stage']}-{one['fingerprint']}"])


def card(argv: list[str]) -> int:
    """Everything that is known of an artefact: a target, a place in the store, or a directory copied elsewhere."""
    parser = ArgumentParser(prog="rlmake card", description=card.__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--json", action="store_true", help="print the whole record")
    args = parser.parse_args(argv)
    record = cards.find(_there(args.path))
    if args.json:
        print(json.dumps(record, indent=1, ensure_ascii=False))
        return 0
    step = f" step {record['step']}" if record["step"] is not None else ""
    code = record["code"]
    commit = (code.get("commit") or ("no git" if "commit" in code else "not known"))[:12]
    commit += f" + changes {code['dirty']}" if code.get("dirty") else ""
    rows = [
        ("name", ", ".join(record["runs"])),
        ("what", f"{record['work']} {record['kind']}{step} ({record['origin']})"),
        *(("chosen", said) for said in [cards.chosen(record)] if said),
        ("identity", f"{record['stage']}-{record['fingerprint']}"),
        ("content", record["content"]),
        *(("set", f"{key} = {value}") for key, value in sorted(record["set"].items())),
        *(("parent", _parent(one)) for one in record["parents"]),
        *(("differs", one) for one in record["differences"]),
        *(("revision", f"{key}: {value}") for key, value in record["revisions"].items()),
        *(("accepted", f"{'; '.join(one['changes'])}; reason: {one['reason']}") for one in record["accepted"]),
        *(("evaluated", _evaluated(entry)) for entry in record["evaluations"]),
        ("commit", commit),
        ("versions", ", ".join(f"{name} {version}" for name, version in record["versions"].items())),
        ("hardware", _hardware(record["hardware"])),
        ("made", f"{record['started']} to {record['ended']}" if record["started"] else f"until {record['ended']}"),
        ("cost", _cost(record)),
        *(("lineage", f"{row['name']} {row['stage']}-{row['fingerprint']}{_at(row)}") for row in record["lineage"]),
    ]
    for key, value in rows:
        print(f"{key:<10} {value}")
    return 0


def _hardware(found: dict[str, Any]) -> str:
    parts = [found.get("machine"), found.get("cpu")]
    parts += [f"{found['cores']} cores"] if found.get("cores") else []
    parts += [f"{found['memory_gib']} GiB"] if found.get("memory_gib") else []
    return ", ".join(filter(None, [*parts, *found.get("gpus", [])])) or "not known"


def _cost(record: dict[str, Any]) -> str:
    known = record["seconds"] is not None
    own = f"{record['seconds']} s, {record['gpu_hours'] or 0.0} GPU-hours" if known else "not known"
    return f"{own}; its line {record['gpu_hours_of_lineage']} GPU-hours"


def _there(path: Path) -> Path:
    """The path, or the place in the store of a target whose link is not there."""
    name = path.as_posix()
    elsewhere = (path.is_absolute() or name.startswith("..")) and not names.fault_of_spelling(name)
    if elsewhere or not FOLDER.is_dir():
        return path
    if os.path.lexists(path):
        folder = names.is_output(name) and path.is_dir() and not path.is_symlink()
        if folder and (fault := Registry.load().whole(name)):
            raise UserError(fault)
        return path
    registry = Registry.load()
    artefact = registry.artefact(registry.target(name))
    if not store.finished(artefact):
        raise UserError(f"{path}: not built; build it with: snakemake -c all {path}")
    return artefact.path


def _at(row: dict[str, Any]) -> str:
    return f" step {row['step']}" if row["step"] is not None else ""


def _evaluated(entry: dict[str, Any]) -> str:
    parts = []
    for env, found in entry["envs"].items():
        reward = found["reward"]
        span = f" (95 % {reward['ci95'][0]:.3f} to {reward['ci95'][1]:.3f})" if reward.get("ci95") else ""
        parts.append(f"{env} reward " + ("–" if reward["mean"] is None else f"{reward['mean']:.3f}") + span)
    return f"{entry['suite']}: {', '.join(parts)}"


def diff(argv: list[str]) -> int:
    """How two runs differ: what counts for the result, then settings that do not count; and what each reached."""
    parser = ArgumentParser(prog="rlmake diff", description=diff.__doc__)
    parser.add_argument("first", help="a run")
    parser.add_argument("second", help="a run")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args(argv)
    registry = Registry.load()
    first, second = (_named(registry, name) for name in (args.first, args.second))
    if first.kind != second.kind:
        raise UserError(f"{args.first} is of kind {first.kind}, {args.second} of kind {second.kind}")
    before = {key: getattr(first, key) for key in ("config", "semantic", "parents", "revisions", "fingerprint")}
    counts = explain.changes(before | {"defaults": first.defaults(), "steps": []}, second)
    counts = [replace(change, default=False) for change in counts]
    if first.last_step != second.last_step:
        counts = [change for change in counts if change.key.rpartition(".")[2] != "max_steps"]
        counts.append(explain.Change("max_steps", first.last_step, second.last_step))
    shown = {change.key for change in counts}
    others = _others(first, second, shown)
    results = _results(registry, first, second)
    if args.json:
        rows = [{"key": c.key, "first": c.before, "second": c.after, "counts": True} for c in counts]
        rows += [{"key": c.key, "first": c.before, "second": c.after, "counts": False} for c in others]
        print(json.dumps({"differences": rows, "evaluations": results}, indent=1, ensure_ascii=False))
        return 0
    if not counts:
        print(f"the same identity: {first.stage}-{first.fingerprint}")
    for change in counts:
        print(f"{change}")
    for change in others:
        print(f"does not count: {change}")
    for row in results:
        print(f"{row['suite']} {row['env']}: reward {_mean(row['first'])} → {_mean(row['second'])}")
    return 0


def _named(registry: Registry, name: str) -> Work:
    run = name.removeprefix(f"{names.OUTPUTS}/").rstrip("/")
    if run in registry.grids:
        cell = next(one for one in registry.runs if one.startswith(f"{run}/"))
        raise UserError(f"{name}: is a grid; name one of its cells, as {cell}")
    if run not in registry.runs:
        raise UserError(f"{name}: no run{nearest(run, [*registry.runs, *registry.grids])}")
    return registry.work(run)


def _others(first: Work, second: Work, shown: set[str]) -> list[explain.Change]:
    """Runtime settings that differ; places of parents and what is counted already are left out, also a shared setting
    that has filled others."""
    old, new = dict(leaves(first.config)), dict(leaves(second.config))
    keys = [key for key in dict.fromkeys([*old, *new]) if key not in shown and not key.endswith("max_steps")]
    counted = {key for key, _ in (*leaves(first.semantic), *leaves(second.semantic))}
    found = [key for key in keys if key not in counted and canonical(old.get(key)) != canonical(new.get(key))]
    filled = {_leaf(key, old.get(key), new.get(key)) for key in shown}
    found = [key for key in found if _leaf(key, old.get(key), new.get(key)) not in filled]
    return [explain.Change(key, old.get(key), new.get(key)) for key in found if not names.is_output(new.get(key))]


def _leaf(key: str, *values: Any) -> tuple[str, bytes]:
    return key.rpartition(".")[2], canonical(values)


def _results(registry: Registry, first: Work, second: Work) -> list[dict[str, Any]]:
    """Evaluations that both have, by suite and environment."""
    found = []
    sides = [work.facts["runs"][0] for work in (first, second)]
    for suite in registry.suites:
        if first.stage == "data":
            continue
        paths = [registry.evaluation(suite, run).artefact() for run in sides]
        if all(store.finished(one) for one in paths):
            reports = [read_json(one.path / "report.json")["envs"] for one in paths]
            for env in reports[0].keys() & reports[1].keys():
                rewards = [report[env]["reward"] for report in reports]
                found.append({"suite": suite, "env": env, "first": rewards[0], "second": rewards[1]})
    return found


def _mean(reward: dict[str, Any]) -> str:
    span = reward.get("ci95")
    return (
        "–"
        if reward["mean"] is None
        else f"{reward['mean']:.3f}" + (f" ({span[0]:.3f} to {span[1]:.3f})" if span else "")
    )
