"""`rlmake accept`, `adopt`, `gc`, `pin`, `unpin`, `report`: what changes the store without building anything."""

import subprocess
import sys
import time
from pathlib import Path

from rlmake.build import accepted, card, explain, garbage, plan, store
from rlmake.build import adopt as adoption
from rlmake.build.names import OUTPUTS, Target
from rlmake.build.registry import Registry
from rlmake.build.work import Work
from rlmake.build.workflow import code_state
from rlmake.core.arguments import ArgumentParser
from rlmake.core.errors import UserError, nearest


def accept(argv: list[str]) -> int:
    """Declare that what is there is as good as what the configuration asks for now; recorded, with your reason."""
    parser = ArgumentParser(prog="rlmake accept", description=accept.__doc__)
    parser.add_argument("target", help="a target, outputs/<run>/<artefact>")
    parser.add_argument("--reason", help="why the two are equivalent; it is shown in plans and cards")
    parser.add_argument("--revoke", action="store_true", help="take an earlier acceptance back")
    args = parser.parse_args(argv)
    registry = Registry.load()
    work = _work(registry, args.target)
    if args.revoke:
        found = [
            r for r in registry.accepted.values() if (r["stage"], r["stands_for"]) == (work.stage, work.fingerprint)
        ]
        for record in found:
            accepted.path(record["stage"], record["fingerprint"]).unlink()
        if not found:
            raise UserError(f"{args.target}: nothing was accepted for it")
        _cards(work.stage, work.fingerprint)
        print(f"revoked: {args.target} is what its configuration says again")
        return 0
    if not args.reason or not args.reason.strip():
        raise UserError("--reason is needed: say why the two are equivalent")
    run = work.facts["runs"][0]
    before = explain.last_build(registry, run, work)
    if before is None:
        raise UserError(f"{args.target}: there is no earlier build to accept")
    if not any(store.stored(f"{work.stage}-{before['fingerprint']}")):
        raise UserError(f"{args.target}: was never built to its end, there is nothing to accept")
    if before["fingerprint"] == work.fingerprint:
        raise UserError(f"{args.target}: is what its configuration asks for; there is nothing to accept")
    differ = [str(change) for change in explain.changes(before, work)]
    accepted.write(work.stage, work.fingerprint, before["fingerprint"], run, differ, args.reason.strip())
    _cards(work.stage, before["fingerprint"])
    print(f"accepted: {work.stage}-{before['fingerprint']} stands for {args.target}, although {'; '.join(differ)}")
    return 0


def _cards(stage: str, fingerprint: str) -> None:
    """Write the cards that are published with a unit's artefacts anew."""
    for artefact in store.stored(f"{stage}-{fingerprint}"):
        if (artefact.path / card.NAME).is_file():
            card.publish(artefact)


def _work(registry: Registry, path: str) -> Work:
    target = registry.target(path)
    if target.kind == "eval":
        assert target.suite is not None
        return registry.evaluation(target.suite, target.run, target.step)
    if target.kind in ("parity", "report", "grid", "best"):
        raise UserError(f"{path}: is made from other results in no time; accept those")
    return registry.work(target.run)


def adopt(argv: list[str]) -> int:
    """Take a model directory, a checkpoint or a run that was started directly into the store, as a declared target."""
    parser = ArgumentParser(prog="rlmake adopt", description=adopt.__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--as", dest="target", help="the target that it is (default: where it lies), or a run's name")
    args = parser.parse_args(argv)
    registry = Registry.load()
    moment = {"planned_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "code": code_state()[0]}
    for line in adoption.adopt(registry, args.directory, args.target, moment):
        print(line)
    return 0


def gc(argv: list[str]) -> int:
    """Delete what no declared experiment, fork or pin needs; with --dry-run say what, how large, and why."""
    parser = ArgumentParser(prog="rlmake gc", description=gc.__doc__)
    parser.add_argument("--dry-run", action="store_true", help="only say what would be deleted, and what is kept why")
    args = parser.parse_args(argv)
    entries = garbage.survey(Registry.load())
    for entry in entries:
        if args.dry_run or not entry.kept:
            word = "keep  " if entry.kept else "delete"
            print(f"{word} {_bytes(entry.size):>9}  {entry.folder.name}  {entry.name}: {entry.reason}")
    free = sum(entry.size for entry in entries if not entry.kept)
    count = sum(not entry.kept for entry in entries)
    if args.dry_run:
        print(f"{count} of {len(entries)} directories, {_bytes(free)}, would be deleted; nothing was")
    else:
        removed = garbage.collect(entries)
        links = len(removed) - count
        more = f", and {links} link{'s' * (links > 1)}" if links else ""
        print(f"{count} of {len(entries)} directories deleted, {_bytes(free)}{more}")
    return 0


def _bytes(size: int) -> str:
    value, unit = float(size), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def pin(argv: list[str]) -> int:
    """Keep what a target stands for now, whatever becomes of its experiment file; without a target list the pins."""
    parser = ArgumentParser(prog="rlmake pin", description=pin.__doc__)
    parser.add_argument("target", nargs="?", help="a target, or a place in outputs/.store")
    parser.add_argument("--reason", default="", help="why, shown by gc")
    args = parser.parse_args(argv)
    if args.target is None:
        for one in (pinned := garbage.pins()):
            print(f"{one['stage']}-{one['fingerprint']}  {one['target']}  {one['at']}  {one['reason']}")
        if not pinned:
            print("nothing is pinned")
        return 0
    unit = _unit(args.target)
    garbage.pin(unit, args.target, args.reason)
    print(f"pinned {unit[0]}-{unit[1]} ({args.target})")
    return 0


def unpin(argv: list[str]) -> int:
    """Let go of a pin."""
    parser = ArgumentParser(prog="rlmake unpin", description=unpin.__doc__)
    parser.add_argument("target", help="a target, or a place in outputs/.store, as it was pinned")
    args = parser.parse_args(argv)
    known = [one["target"] for one in garbage.pins()]
    in_store = Path(args.target).parts[: len(store.STORE.parts)] == store.STORE.parts
    gone = garbage.unpin(args.target, _unit(args.target) if in_store and args.target not in known else None)
    if not gone:
        raise UserError(f"{args.target}: is not pinned{nearest(args.target, known)}")
    for one in gone:
        print(f"unpinned {one['stage']}-{one['fingerprint']} ({one['target']})")
    return 0


def _unit(path: str) -> tuple[str, str]:
    """The unit of the store that a target's link, a target or a place in the store is."""
    if found := explain.published_unit(Path(path)):
        return found
    parts = Path(path).parts
    if parts[: len(store.STORE.parts)] == store.STORE.parts and len(parts) > len(store.STORE.parts):
        stage, _, fingerprint = parts[len(store.STORE.parts)].partition("-")
        if stage in store.STAGES and store.spec_path(stage, fingerprint).is_file():
            return stage, fingerprint
        raise UserError(f"{path}: no such work in the store")
    registry = Registry.load()
    artefact = registry.artefact(registry.target(path))
    if not store.finished(artefact):
        raise UserError(f"{path}: not built, there is nothing to pin")
    return artefact.stage, artefact.fingerprint


def report(argv: list[str]) -> int:
    """Make the report of a grid (or a run) that is built; with --allow-missing of a grid that is half done."""
    parser = ArgumentParser(prog="rlmake report", description=report.__doc__)
    parser.add_argument("name", help="a grid's or a run's name, or outputs/<name>/report.html")
    parser.add_argument("--allow-missing", action="store_true", help="cells that are not there are shown as missing")
    args = parser.parse_args(argv)
    registry = Registry.load(allow_missing=args.allow_missing)
    name = args.name.removeprefix(f"{OUTPUTS}/").removesuffix("/report.html")
    if name not in registry.grids and name not in registry.runs:
        raise UserError(f"{args.name}: no grid or run{nearest(name, [*registry.grids, *registry.runs])}")
    grid = name in registry.grids
    kinds = [Target(name, "grid", rest=leaf) for leaf in ("report.html", "results.csv", "results.json")]
    targets = [target.path for target in (kinds if grid else [Target(name, "report")])]
    rules = [job.rule for job in plan.jobs(registry, plan.needs(registry, targets))]
    if work := [rule for rule in rules if rule not in ("grid", "report") and not rule.startswith("publish")]:
        hint = ", or give --allow-missing" if grid else ""
        jobs = f"{len(work)} job{'s are' if len(work) > 1 else ' is'}"
        raise UserError(f"{name}: {jobs} to be done first; build it: snakemake -c all {targets[0]}{hint}")
    options = ["--config", "allow_missing=1"] if args.allow_missing else []
    command = [sys.executable, "-m", "snakemake", "-c", "1", *targets, "--quiet", "all", *options]
    done = subprocess.run(command, check=False)
    if done.returncode == 0:
        print(f"{targets[0]}")
    return done.returncode
