"""Results that were not built here enter the store: a model directory, a checkpoint, a run that was started directly.

What is adopted takes the place of what a declared experiment would have made, under its fingerprint, with origin
`adopted` and all that is known of it. A run that was started directly brings its resolved configuration: where that
says another thing than the experiment, nothing is adopted.
"""

import os
import shutil
import time
import uuid
from pathlib import Path
from typing import Any

from rlmake.build import card, lease, provenance, publish, store
from rlmake.build.experiments import CLASSES
from rlmake.build.explain import changes
from rlmake.build.fingerprint import leaves
from rlmake.build.names import OUTPUTS, Target
from rlmake.build.registry import Registry
from rlmake.build.store import Artefact
from rlmake.build.work import Work
from rlmake.config import load_resolved
from rlmake.core.errors import ConfigError, UserError
from rlmake.core.jsonio import canonical, list_files, read_json
from rlmake.core.rundir import numbered

Record = dict[str, Any]
OF_RECORD = ("policy_version", "world_size", "ledger", "attempt")  # what the card of a checkpoint repeats of COMPLETE


def adopt(registry: Registry, folder: Path, path: str | None, moment: Record) -> list[str]:
    """Take `folder` in as the target `path` (default: the place where it lies). Returns lines about what was done.

    A folder outside `outputs/` is copied and stays; one that lies in the target's place is moved, and the link takes
    its place. Raises `UserError` for a folder that is not what the target wants, and where the two are known to differ.
    """
    if not folder.is_dir() or folder.is_symlink():
        raise UserError(f"{folder}: {'a link; give what it points to' if folder.is_symlink() else 'no such directory'}")
    if (folder / publish.DIRECT).is_file() or numbered(folder / "checkpoints"):
        return _run(registry, folder, path, moment)
    if path is None and not folder.absolute().is_relative_to(Path(OUTPUTS).absolute()):
        kind = "a model of your own is the weights of a run of kind 'import'"
        raise UserError(f"{folder}: lies outside {OUTPUTS}/: say with --as which declared target it is; {kind}")
    target = registry.target(path or folder.as_posix())
    artefact, work = registry.artefact(target), registry.work(target.run)
    if target.kind not in ("weights", "checkpoint", "data") or target.inside:
        raise UserError(f"{target.path}: only weights, checkpoints and data can be adopted")
    if store.finished(artefact):
        raise UserError(f"{target.path}: is built already ({artefact.folder})")
    _check(folder, target.kind)
    facts = _known(folder, work, artefact)
    with _held(artefact.path.parent if target.kind == "weights" else artefact.folder, target.path):
        if store.finished(artefact):
            raise UserError(f"{target.path}: was built meanwhile ({artefact.folder})")
        store.write_spec(work.spec([artefact.step] if artefact.step else [], moment))
        _place(folder, artefact.path, Path(target.path))
        _finish(artefact, moment, facts)
    publish.publish(Path(target.path), artefact.path)
    card.publish(artefact)
    lines = [f"adopted {target.path}: {artefact.path}"]
    known = "specification" in facts or facts.get("fingerprint")
    return lines + ([] if known else ["what it was made with is not known; the card says so"])


def _held(folder: Path, name: str) -> lease.Lease:
    """The lease under which a job would make it. Raises `LeaseHeld` where one does just now."""
    try:
        held = lease.acquire(folder, wait=False)
    except lease.LeaseHeld as error:
        raise lease.LeaseHeld(f"{name}: {error}") from None
    assert held is not None
    return held


def _check(folder: Path, kind: str) -> None:
    if kind == "weights" and not ((folder / "config.json").is_file() and any(folder.glob("*.safetensors"))):
        raise UserError(f"{folder}: no model directory: expected config.json and *.safetensors")
    if kind == "checkpoint":
        if not (folder / store.COMPLETE).is_file():
            raise UserError(f"{folder}: no complete checkpoint: it has no COMPLETE record")
        _record(folder)
    if kind == "data" and not any(folder.iterdir()):
        raise UserError(f"{folder}: is empty")


def _known(folder: Path, work: Work, artefact: Artefact) -> Record:
    """What is known of a folder: its card, what the store has built of the same files, or its COMPLETE record. Raises
    `UserError` where it is something else."""
    facts: Record = {"source": folder.as_posix()}
    carded = (folder / card.NAME).is_file()
    if about := card.find(folder) if carded else _built(folder, artefact):
        says = "its card says that it is" if carded else f"it is what was built as {', '.join(about['runs'])},"
        if (about["stage"], about["fingerprint"]) != (work.stage, work.fingerprint):
            differ = [] if about["stage"] != work.stage else _from_card(about, work)
            hint = f" ({'; '.join(differ[:3])})" if differ else ""
            raise UserError(f"{folder}: {says} {about['stage']}-{about['fingerprint']}, not "
                            f"{work.stage}-{work.fingerprint}{hint}")  # fmt: skip
        for key in ("step", "kind"):
            if about[key] != getattr(artefact, key):
                raise UserError(f"{folder}: {says} {key} {about[key]}, not {getattr(artefact, key)}")
        facts |= {key: about[key] for key in ("specification", "code", "seconds", "gpu_hours", "ended")}
    if artefact.kind == "checkpoint":
        record = read_json(folder / store.COMPLETE)
        if record["step"] != artefact.step:
            raise UserError(f"{folder}: its COMPLETE record says step {record['step']}, not {artefact.step}")
        if record.get("fingerprint") not in (None, work.fingerprint):
            raise UserError(f"{folder}: belongs to train-{record['fingerprint']}, not to {work.fingerprint}")
        facts |= {key: record[key] for key in ("fingerprint", *OF_RECORD) if key in record}
    return facts


def _built(folder: Path, artefact: Artefact) -> Record | None:
    """The card of what was built of the same files; of several the one that is wanted. None where nothing was."""
    same = (one for one in card.alike(folder) if one.stage != "best")  # which are files of a training's export
    found = [one for one in same if store.read_manifest(one.done_path).get("origin") == "built"]
    wanted = next((one for one in found if one == artefact), found[0] if found else None)
    return card.of(wanted) if wanted else None


def _record(folder: Path) -> Record:
    """A checkpoint's own record, whose files agree with it by their hashes; `UserError` naming what does not."""
    if found := store.faults_of_checkpoint(folder, hashes=True):
        raise UserError(f"{found[0]}; a damaged checkpoint is not adopted")
    record = read_json(folder / store.COMPLETE)
    if missing := [key for key in ("step", *OF_RECORD) if key not in record]:
        raise UserError(f"{folder / store.COMPLETE}: not a checkpoint record, it has no {missing[0]}")
    return record


def _from_card(about: Record, work: Work) -> list[str]:
    """Settings of a card that differ from a work's, those that count first."""
    there, here = dict(leaves(about["specification"])), dict(leaves(work.config))
    keys = sorted(dict.fromkeys([*here, *there]), key=set(dict(leaves(work.semantic))).__contains__, reverse=True)
    return [f"{key}: {there.get(key)!r} there, {here.get(key)!r} here"
            for key in keys if canonical(there.get(key)) != canonical(here.get(key))]  # fmt: skip


def _run(registry: Registry, folder: Path, path: str | None, moment: Record) -> list[str]:
    """A run that was started directly: its whole directory becomes that of the declared run."""
    name = _run_name(registry, folder, path)
    run, work = registry.runs[name], registry.work(name)
    steps = [step for step, one in numbered(folder / "checkpoints").items() if (one / "COMPLETE").is_file()]
    if run.stage != "train" or not steps:
        raise UserError(f"{folder}: no complete checkpoint to adopt")
    resolved = folder / "configs" / "latest" / "resolved" / f"{run.kind}.json"
    if not resolved.is_file():
        raise UserError(f"{folder}: says nothing about its configuration ({resolved.relative_to(folder)} is missing)")
    there = _resolved(registry, name, resolved)
    if there.fingerprint != work.fingerprint:
        before = {key: getattr(there, key) for key in ("config", "semantic", "parents", "revisions", "fingerprint")}
        before |= {"defaults": {}, "steps": []}
        found = [f"{c.key} is {c.before} there and {c.after} in {run.file}" for c in changes(before, work)]
        raise UserError(f"{folder}: is another run than {name}: {'; '.join(found[:5]) or 'its parents differ'}")
    last = work.artefact("checkpoint", steps[-1])
    if (holder := lease.read(last.folder)) and not lease.is_gone(holder):
        raise lease.LeaseHeld(f"{name}: {last.folder} is being written by {lease.describe(holder)}")
    if last.folder.exists() and numbered(last.folder / "checkpoints"):
        raise UserError(f"{name}: was begun here already ({last.folder})")
    records = {step: _record(folder / "checkpoints" / f"step_{step}") for step in steps}
    if last.folder.exists():  # a plan has written its specification there, and no more
        shutil.rmtree(last.folder)
    _place(folder, last.folder, folder)
    (last.folder / publish.DIRECT).unlink(missing_ok=True)
    store.write_spec(work.spec([], moment))
    for step, record in records.items():
        facts = {key: record[key] for key in OF_RECORD}
        _finish(work.artefact("checkpoint", step), moment, {"source": folder.as_posix(), **facts})
        publish.publish(Path(Target(name, "checkpoint", step).path), work.artefact("checkpoint", step).path)
    for leaf in ("logs", "configs", "monitors"):
        (last.folder / leaf).mkdir(exist_ok=True)
        publish.publish(Path("outputs", name, leaf), last.folder / leaf)
    return [f"adopted {folder} as {name}: steps {', '.join(map(str, steps))} of {work.last_step}, in {last.folder}"]


def _run_name(registry: Registry, folder: Path, path: str | None) -> str:
    name = (path or folder.as_posix()).removeprefix("outputs/").rstrip("/")
    if name not in registry.runs and path is None:
        raise UserError(f"{folder}: no experiment has this name: say with --as which declared run it is")
    if name not in registry.runs:
        target = registry.target(path or folder.as_posix())  # its fault names the nearest run
        name = target.run
    return name


def _resolved(registry: Registry, name: str, resolved: Path) -> Work:
    """The identity that a resolved configuration has. Names of targets in it may be absolute paths of this project."""
    run = registry.runs[name]
    try:
        config = load_resolved(CLASSES[run.kind], resolved)
    except ConfigError as error:
        raise UserError(f"{resolved}: not readable any more: {error}") from None
    return registry.identity(run, config)


def _place(folder: Path, to: Path, link: Path) -> None:
    """Move what lies in a link's place, copy what lies elsewhere; it appears whole or not at all."""
    to.parent.mkdir(parents=True, exist_ok=True)
    if folder.absolute() == link.absolute():
        os.rename(folder, to)
        return
    temporary = to.with_name(f".{to.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        shutil.copytree(folder, temporary)
        if to.exists():
            shutil.rmtree(to)
        os.rename(temporary, to)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _finish(artefact: Artefact, moment: Record, facts: Record) -> None:
    spec = store.read_spec(artefact.stage, artefact.fingerprint)
    files = [entry for entry in list_files(artefact.root) if entry["path"] not in card.NAMES]
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    manifest = store.manifest_of(artefact, spec, files, facts=facts, versions=provenance.versions(), hardware={})
    manifest |= {
        "origin": "adopted",
        "code": facts.get("code") or {},
        "started": None,
        "ended": facts.get("ended") or at,
    }
    manifest |= {"seconds": facts.get("seconds"), "gpu_hours": facts.get("gpu_hours")}
    store.finish(artefact, manifest)
