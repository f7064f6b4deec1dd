"""What of the store nothing needs any more, and what keeps the rest.

Needed is: what a declared run, suite or grid stands for now, with all that it rests on; what a link below `outputs/`
shows, of an earlier version or of a run that nothing declares any more too (logs alone are no result); what is pinned;
what somebody writes; what was planned and is not finished, with its parents, for a week. A directory goes whole or
stays whole. Deleting never leaves the store: a link in it is removed as a link.
"""

import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rlmake.build import lease, plan, publish, store
from rlmake.build.experiments import FOLDER
from rlmake.build.explain import published_unit
from rlmake.build.names import OUTPUTS, WORKING
from rlmake.build.registry import Registry
from rlmake.build.store import STORE
from rlmake.core.errors import UserError
from rlmake.core.jsonio import read_record, write_json

Unit = tuple[str, str]  # stage and fingerprint
PINS = STORE / "pins.json"
UNFINISHED = 7 * 24 * 3600.0  # seconds for which work that was planned is waited for


@dataclass(frozen=True)
class Entry:
    """A directory of the store: what it takes on the disk, whether it stays, and why."""

    unit: Unit
    name: str
    size: int
    kept: bool
    reason: str

    @property
    def folder(self) -> Path:
        return STORE / f"{self.unit[0]}-{self.unit[1]}"


def survey(registry: Registry) -> list[Entry]:
    """Every directory of the store; the largest that may go first.

    Raises `UserError` where no experiment file is seen at all, which rather means that they are elsewhere.
    """
    reasons = needed(registry)
    seen: set[int] = set()
    entries = []
    for folder in sorted(STORE.iterdir()) if STORE.is_dir() else []:
        stage, _, fingerprint = folder.name.partition("-")
        if stage not in store.STAGES or folder.is_symlink() or not folder.is_dir():
            continue
        unit = (stage, fingerprint)
        runs = _spec(unit).get("runs") or ["?"]
        reason = reasons.get(unit)
        entries.append(
            Entry(unit, runs[0], _size(folder, seen), reason is not None, reason or _why_not(registry, runs))
        )
    if entries and not registry.runs:
        raise UserError(
            f"{FOLDER} declares no run, and {STORE} holds {len(entries)} directories: is it mounted and checked out? "
            f"Nothing was deleted; to let go of everything delete {OUTPUTS}/ by hand"
        )
    return sorted(entries, key=lambda entry: (entry.kept, -entry.size))


def needed(registry: Registry) -> dict[Unit, str]:
    """Unit → why it stays."""
    found: dict[Unit, str] = {}

    def keep(unit: Unit, reason: str) -> None:
        if unit in found:
            return
        found[unit] = reason
        work = registry.works.get(unit)
        parents = work.parents if work else _parents(unit)
        for parent in parents:
            keep((parent["stage"], parent["fingerprint"]), f"{_name(registry, unit)} rests on it")

    for path in plan.targets_of_all(registry, include_manual=True):
        artefact = registry.artefact(registry.target(path))
        keep((artefact.stage, artefact.fingerprint), f"declared: {path}")
    for run in registry.runs.values():
        if run.best:
            best = registry.reports.best(run.name)
            keep((best.stage, best.fingerprint), f"declared: {run.name}")
    for pin in pins():
        keep(
            (pin["stage"], pin["fingerprint"]),
            f"pinned: {pin['target']}" + (f", {pin['reason']}" if pin["reason"] else ""),
        )
    for link, unit in published():
        if os.path.exists(link) and not _working(link, unit):
            keep(unit, f"published: {link}, until that link is deleted")
    now = time.time()
    for folder in STORE.iterdir() if STORE.is_dir() else []:
        unit = (folder.name.partition("-")[0], folder.name.partition("-")[2])
        if unit[0] not in store.STAGES or unit in found or folder.is_symlink():
            continue
        holder = lease.read(folder)
        if holder is not None and not holder.get("released") and not lease.is_gone(holder):
            keep(unit, f"being written by {lease.describe(holder)}")
        spec = folder / "spec.json"
        if spec.is_file() and now - spec.stat().st_mtime < UNFINISHED and not any(store.stored(folder.name)):
            keep(unit, "planned less than a week ago and not finished")
    return found


def published() -> Iterator[tuple[str, Unit]]:
    """`(link, unit)` of every link below `outputs/` into the store, the build's and a user's. No linked folder is
    entered. Raises `UserError` for a folder that can't be read: links that are not seen would keep nothing."""

    def unreadable(error: OSError) -> None:
        if os.path.isdir(OUTPUTS):
            raise UserError(f"{error.filename}: cannot be read: {error.strerror}")

    for folder, folders, files in os.walk(OUTPUTS, onerror=unreadable, followlinks=False):
        if folder == OUTPUTS:
            folders[:] = [name for name in folders if name != STORE.name]
        for name in (*folders, *files):
            path = Path(folder, name)
            if unit := published_unit(path):
                yield path.as_posix(), unit


def _working(link: str, unit: Unit) -> bool:
    """Whether a link only lets a run be followed (`logs`, `configs`, `monitors`), and shows no result."""
    return Path(link).name in WORKING and os.readlink(link) == publish.destination(
        link, STORE / f"{unit[0]}-{unit[1]}" / Path(link).name
    )


def collect(entries: list[Entry]) -> list[str]:
    """Delete what may go, and links that then lead nowhere. Returns what was removed."""
    gone = {entry.unit for entry in entries if not entry.kept}
    removed = []
    for link, unit in list(published()):
        if unit in gone:
            os.unlink(link)
            removed.append(link)
            _prune(Path(link).parent)
    for entry in entries:
        if not entry.kept:
            grave = STORE / f".deleting-{entry.folder.name}"
            os.rename(entry.folder, grave)
            shutil.rmtree(grave)
            removed.append(entry.folder.as_posix())
    for left in STORE.glob(".deleting-*"):
        shutil.rmtree(left, ignore_errors=True)
    return removed


def _prune(folder: Path) -> None:
    """Remove folders of `outputs` that have become empty."""
    while folder != Path(OUTPUTS) and not folder.is_symlink():
        try:
            folder.rmdir()
        except OSError:
            return
        folder = folder.parent


class _Pin(msgspec.Struct):
    stage: str
    fingerprint: str
    target: str
    reason: str
    at: str


class _Pins(msgspec.Struct):
    pins: list[_Pin]


def pins() -> list[dict[str, Any]]:
    """What is pinned: records {stage, fingerprint, target, reason, at}."""
    if not PINS.is_file():
        return []
    try:
        return read_record(PINS, _Pins)["pins"]
    except UserError as error:
        raise UserError(f"{error}; nothing is removed while it is so: mend it, or remove it and pin anew") from None


def pin(unit: Unit, target: str, reason: str) -> None:
    """Keep a unit whatever becomes of the experiment files."""
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    row = {"stage": unit[0], "fingerprint": unit[1], "target": target, "reason": reason, "at": at}
    others = [one for one in pins() if (one["stage"], one["fingerprint"], one["target"]) != (*unit, target)]
    write_json(PINS, {"schema": 1, "pins": [*others, row]})


def unpin(target: str, unit: Unit | None) -> list[dict[str, Any]]:
    """Let go of what was pinned as `target`, else of a unit under all its names; gives the pins that are gone."""
    before = pins()
    gone = [one for one in before if one["target"] == target]
    gone = gone or [one for one in before if (one["stage"], one["fingerprint"]) == unit]
    if gone:
        write_json(PINS, {"schema": 1, "pins": [one for one in before if one not in gone]})
    return gone


def _size(folder: Path, seen: set[int]) -> int:
    """Bytes on the disk below a folder; links count as links, a file with several names once."""
    total = 0
    for root, _, files in os.walk(folder, followlinks=False):
        for name in files:
            stat = os.lstat(os.path.join(root, name))
            if stat.st_ino not in seen:
                seen.add(stat.st_ino)
                total += stat.st_blocks * 512
    return total


def _spec(unit: Unit) -> dict[str, Any]:
    try:
        return store.read_spec(*unit)
    except UserError:
        return {}


def _parents(unit: Unit) -> list[dict[str, Any]]:
    """Raises `UserError` where it is not known what a kept unit rests on."""
    if not store.spec_path(*unit).exists():
        return []
    try:
        return store.read_spec(*unit)["parents"]
    except UserError as error:
        raise UserError(f"{error}; what it rests on is not known then, and nothing is removed") from None


def _name(registry: Registry, unit: Unit) -> str:
    work = registry.works.get(unit)
    return (work.facts["runs"] if work else _spec(unit).get("runs") or [f"{unit[0]}-{unit[1][:8]}"])[0]


def _why_not(registry: Registry, runs: list[str]) -> str:
    known = [run for run in runs if run in registry.runs or run in registry.grids]
    return f"an earlier version of {known[0]}" if known else "no experiment declares it any more"
