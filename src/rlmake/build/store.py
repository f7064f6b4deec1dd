"""The store: one directory per fingerprint, the records in it, and how work becomes finished.

    outputs/.store/<stage>-<fingerprint>/spec.json           what is to be done; jobs read nothing else
                                         manifest.json       declared to Snakemake, which deletes it when it likes
                                         done.json           the same inode, undeclared: the truth
                                         data/ | weights/ | the run directory | report.html …

Of a training each step is an artefact (`manifests/step_<n>.json`, `manifests/done_<n>.json`), and each export of one
(`exports/step_<n>/<kind>.json`, `exports/step_<n>/<kind>.done.json`, kind weights, weights-FP8 or adapter).
"""

import functools
import os
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rlmake.core.errors import UserError
from rlmake.core.jsonio import content_hash, hash_file, read_json, read_record, write_json
from rlmake.core.rundir import numbered

STORE = Path("outputs/.store")
SPEC_SCHEMA = MANIFEST_SCHEMA = 1
COMPLETE = "COMPLETE"  # a checkpoint's own record, see rlmake.checkpoint
_KEYS = ("stage", "fingerprint", "kind", "step")
KIND_OF_STAGE = {  # of every stage but a training's, which has several
    "data": "data", "model": "weights", "eval": "eval", "parity": "parity", "best": "weights", "report": "report",
    "grid": "grid",
}  # fmt: skip
LEAF = {  # where an artefact lies in its directory
    "data": "data", "weights": "weights", "eval": "", "parity": "report.json", "report": "report.html", "grid": "",
}  # fmt: skip
BRIEF = ("files", "parents", "origin", "seconds", "gpu_hours", "ended")
_briefs: dict[tuple[int, int, int, int], dict[str, Any]] = {}  # by what a manifest's file is: device, inode, time, size
STAGES = ("data", "model", "train", "eval", "parity", "best", "report", "grid")


class _File(msgspec.Struct):
    path: str
    size: int
    blake3: str


class _Parent(msgspec.Struct):
    stage: str
    kind: str
    fingerprint: str
    step: int | None


class _Manifest(msgspec.Struct):
    """What of a manifest the commands rest on; of an evaluation's, say, `facts` hold more."""

    stage: str
    kind: str
    artefact: str
    fingerprint: str
    step: int | None
    semantic: dict[str, Any]
    revisions: dict[str, Any]
    defaults: dict[str, Any]
    parents: list[_Parent]
    files: list[_File]
    content: str
    origin: str
    code: dict[str, Any] | None = None
    facts: dict[str, Any] = {}
    versions: dict[str, Any] = {}
    hardware: dict[str, Any] = {}
    seconds: float | None = None
    gpu_hours: float | None = None
    ended: str | None = None


class _Spec(msgspec.Struct):
    stage: str
    kind: str
    fingerprint: str
    config: dict[str, Any]
    semantic: dict[str, Any]
    revisions: dict[str, Any]
    defaults: dict[str, Any]
    parents: list[_Parent]
    resources: dict[str, Any]
    planned_at: str
    runs: list[str] = []
    steps: list[int] = []


class _Damage(msgspec.Struct):
    faults: list[str]


@dataclass(frozen=True, order=True)
class Artefact:
    """One thing in the store: `kind` is data, weights, weights-FP8, adapter, checkpoint, eval, parity, report or grid;
    `step` only of a training's.

    It says where things lie. Whether they do is for `finished` and `faults` to say.
    """

    stage: str
    fingerprint: str
    kind: str
    step: int | None = None

    @functools.cached_property
    def folder(self) -> Path:
        """Its directory in the store, relative to the project's root."""
        return Path(f"{STORE}/{self.stage}-{self.fingerprint}")

    @functools.cached_property
    def output(self) -> str:
        """The path of its manifest, the output that a rule declares."""
        leaf = "manifest.json"
        if self.stage == "train":
            step = f"step_{self.step}"
            leaf = f"manifests/{step}.json" if self.kind == "checkpoint" else f"exports/{step}/{self.kind}.json"
        return f"{STORE}/{self.stage}-{self.fingerprint}/{leaf}"

    @property
    def manifest_path(self) -> Path:
        return Path(self.output)

    @functools.cached_property
    def done_path(self) -> Path:
        if self.stage != "train":
            return self.folder / "done.json"
        if self.kind == "checkpoint":
            return self.folder / f"manifests/done_{self.step}.json"
        return self.folder / f"exports/step_{self.step}/{self.kind}.done.json"

    @property
    def damage_path(self) -> Path:
        """Where `rlmake verify` notes what it found damaged; a checkpoint's note goes where the checkpoint goes."""
        if self.kind == "checkpoint":
            return self.path / "damaged.json"
        return self.done_path.with_name(self.done_path.name.replace("done.json", "damaged.json"))

    @functools.cached_property
    def path(self) -> Path:
        """What a link points to and a child reads."""
        if self.stage != "train":
            return self.folder / LEAF[self.kind]
        step = f"step_{self.step}"
        return self.folder / ("checkpoints/" + step if self.kind == "checkpoint" else f"exports/{step}/{self.kind}")

    @property
    def root(self) -> Path:
        """Folder that the manifest's file paths are relative to: the artefact, or its folder where it is one file."""
        return self.folder if self.kind in ("eval", "parity", "report", "grid") else self.path

    def record(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in _KEYS}


def spec_path(stage: str, fingerprint: str) -> Path:
    return STORE / f"{stage}-{fingerprint}" / "spec.json"


def read_spec(stage: str, fingerprint: str) -> dict[str, Any]:
    """The specification of a job; raises `UserError` when it is missing or of an unknown schema."""
    path = spec_path(stage, fingerprint)
    if not path.is_file():
        raise UserError(f"{path}: no such file; a job's specification is written when a build starts, not by hand")
    return spec_at(path)


def spec_at(path: Path) -> dict[str, Any]:
    """Raises `UserError` for a file that is no specification."""
    return read_record(path, _Spec, SPEC_SCHEMA)


def write_spec(spec: dict[str, Any]) -> bool:
    """Write a specification unless the one that is there says the same; the newest plan's runtime settings win.

    Steps asked for by earlier plans stay in `steps`: their checkpoints are kept.
    """
    path = spec_path(spec["stage"], spec["fingerprint"])
    if path.is_file():
        try:
            before = spec_at(path)
        except UserError:  # damaged: what it said is what this one says, but for steps that others asked for
            before = {"steps": []}
        spec = {**spec, "steps": sorted({*spec["steps"], *before.get("steps", [])})}
        moment = ("planned_at", "code")
        if {k: v for k, v in before.items() if k not in moment} == {k: v for k, v in spec.items() if k not in moment}:
            return False
    write_json(path, spec)
    return True


def read_manifest(path: Path) -> dict[str, Any]:
    return read_record(path, _Manifest, MANIFEST_SCHEMA)


def read_brief(path: Path | str) -> dict[str, Any]:
    """What a plan asks of a manifest (`BRIEF`), read once while the file is the same, by whichever of its two names.

    Raises `UserError`.
    """
    try:
        stat = os.stat(path)
    except OSError:
        return read_manifest(Path(path))  # says what is wrong
    key = (stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size)
    if key not in _briefs:
        manifest = read_manifest(Path(path))
        _briefs[key] = {name: manifest.get(name) for name in BRIEF}
    return _briefs[key]


def same_file(artefact: Artefact) -> bool:
    """Whether manifest and done file are one, as they were written."""
    try:
        return os.path.samefile(artefact.output, artefact.done_path)
    except OSError:
        return False


def faults(artefact: Artefact, manifest: dict[str, Any], hashes: bool = False) -> list[str]:
    """What is wrong with the files that a manifest names, one line each; empty when all is well."""
    return _faults(str(artefact.root), manifest, hashes)


def _faults(root: str, manifest: dict[str, Any], hashes: bool) -> list[str]:
    found = []
    for entry in manifest["files"]:
        path = f"{root}/{entry['path']}"
        try:
            size = os.stat(path).st_size
        except OSError:
            found.append(f"{path}: missing")
            continue
        if size != entry["size"]:
            found.append(f"{path}: {size} bytes, expected {entry['size']}")
        elif hashes and hash_file(path) != entry["blake3"]:
            found.append(f"{path}: content differs from its hash")
    return found


def finished(artefact: Artefact) -> bool:
    """Whether an artefact is done, by its undeclared truth, and its files have their sizes."""
    if not os.path.isfile(artefact.done_path):  # most of a plan: not worth an error's message
        return False
    try:
        return not faults(artefact, read_brief(artefact.done_path))
    except UserError:
        return False


def faults_of_checkpoint(folder: Path, hashes: bool = False) -> list[str]:
    """What is wrong with a checkpoint by its own COMPLETE record, which those have too that no manifest names."""
    try:
        return _faults(str(folder), read_json(folder / COMPLETE), hashes)
    except (UserError, KeyError, TypeError) as error:
        return [str(error) if isinstance(error, UserError) else f"{folder / COMPLETE}: not a checkpoint record"]


def progress(folder: Path, upto: int | None = None) -> int:
    """The last step of a training (at most `upto`) that is there complete, 0 when none."""
    if not os.path.isdir(folder):
        return 0
    fingerprint = folder.name.removeprefix("train-")
    steps = (step for step in reversed(numbered(folder / "checkpoints")) if upto is None or step <= upto)
    return next((step for step in steps if is_kept(artefact("train", fingerprint, "checkpoint", step))), 0)


def has_record(artefact: Artefact) -> bool:
    """Whether a checkpoint says of itself that it is complete."""
    return artefact.kind == "checkpoint" and os.path.isfile(artefact.path / COMPLETE)


def is_kept(artefact: Artefact) -> bool:
    """Whether a checkpoint lies there complete, though no manifest says so: one that a training left on its way."""
    return has_record(artefact) and not faults_of_checkpoint(artefact.path)


def kept() -> Iterator[Artefact]:
    """Every complete checkpoint that no manifest names: a training has left it on its way."""
    for mark in sorted(STORE.glob(f"train-*/checkpoints/step_*/{COMPLETE}")):
        step = mark.parent.name.removeprefix("step_")
        if step.isdecimal():
            artefact = Artefact("train", mark.parents[2].name.removeprefix("train-"), "checkpoint", int(step))
            if not artefact.done_path.is_file():
                yield artefact


def declare(artefact: Artefact) -> None:
    """Make the declared manifest a hard link of the done file. Snakemake's deletions then cost nothing."""
    path = artefact.manifest_path
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    os.link(artefact.done_path, temporary)
    os.replace(temporary, path)


def finish(artefact: Artefact, manifest: dict[str, Any]) -> None:
    """Write the done file, last and atomically, then declare it."""
    write_json(artefact.done_path, manifest)
    artefact.damage_path.unlink(missing_ok=True)
    declare(artefact)


def withdraw(artefact: Artefact, found: list[str] | None = None) -> None:
    """Take back manifest and done file: the artefact is to be made again. `found` is noted: plans name it.

    A damaged checkpoint is not complete any more: nothing is continued from it, and it does not count as kept.
    """
    if found and artefact.damage_path.parent.is_dir():
        write_json(artefact.damage_path, {"schema": 1, "faults": found})
        if artefact.kind == "checkpoint" and (mark := artefact.path / COMPLETE).is_file():
            os.replace(mark, mark.with_name(f"{COMPLETE}.damaged"))
    artefact.manifest_path.unlink(missing_ok=True)
    artefact.done_path.unlink(missing_ok=True)


def damage(artefact: Artefact) -> str | None:
    """The first fault that `rlmake verify` found in an artefact that was not made again since."""
    return _noted(artefact.damage_path)[0] if artefact.damage_path.is_file() else None


def noted() -> list[str]:
    """Every fault that `rlmake verify` found in what was not made again since."""
    places = ("*/damaged.json", "train-*/checkpoints/step_*/damaged.json", "train-*/exports/step_*/*.damaged.json")
    return [fault for place in places for note in sorted(STORE.glob(place)) for fault in _noted(note)]


def _noted(path: Path) -> list[str]:
    try:
        return read_record(path, _Damage)["faults"] or [f"{path}: says nothing"]
    except UserError as error:  # that there was damage is certain
        return [str(error)]


def manifest_of(made: Artefact, spec: dict[str, Any], files: list[dict[str, Any]], **facts: Any) -> dict[str, Any]:
    """A manifest record (design §10) of `made`; `facts` are versions, hardware, started, ended, gpu_hours, …"""
    return {
        "schema": MANIFEST_SCHEMA,
        "stage": spec["stage"],
        "kind": spec["kind"],
        "artefact": made.kind,
        "fingerprint": spec["fingerprint"],
        "step": made.step,
        "semantic": spec["semantic"],
        "revisions": spec["revisions"],
        "defaults": spec["defaults"],
        "parents": [{**p, "content": _content(artefact_of(p))} for p in spec["parents"]],
        "files": files,
        "content": content_hash(files),
        "origin": "built",
        **facts,
    }


def fork_of(config: dict[str, Any]) -> str | None:
    """The checkpoint that a training is forked from."""
    return (config.get("resume") or (config.get("trainer") or {}).get("resume") or {}).get("dir")


def begins(config: dict[str, Any]) -> int:
    """The step that a training begins behind: a fork counts on from its checkpoint's, `…/step_<n>`; else 0."""
    digits = Path(fork_of(config) or "").name.removeprefix("step_")
    return int(digits) if digits.isdecimal() else 0


def has_lora(config: dict[str, Any]) -> bool:
    """Whether a training (by its resolved configuration) trains adapters only."""
    table = config["trainer"] if isinstance(config.get("trainer"), dict) else config
    return bool((table.get("model") or {}).get("lora"))


def exported_from(made: Artefact, lora: bool) -> Artefact:
    """What an export is made from: the checkpoint; FP8 of a run that trains adapters: its merged weights."""
    merged = made.kind == "weights-FP8" and lora
    return artefact("train", made.fingerprint, "weights" if merged else "checkpoint", made.step)


def artefact_of(record: dict[str, Any]) -> Artefact:
    """The artefact that a parent's record names."""
    return artefact(record["stage"], record["fingerprint"], record["kind"], record["step"])


@functools.cache
def artefact(stage: str, fingerprint: str, kind: str, step: int | None = None) -> Artefact:
    """An artefact, one object each: a plan names thousands of them many times."""
    return Artefact(stage, fingerprint, kind, step)


def _content(artefact: Artefact) -> str | None:
    try:
        return read_manifest(artefact.done_path)["content"]
    except UserError:
        return None


def stored(prefix: str = "") -> Iterator[Artefact]:
    """Every artefact in the store that has a done file, in a stable order; `prefix`: of these directories only."""
    if not STORE.is_dir():
        return
    for folder in sorted(STORE.iterdir()):
        if not folder.name.startswith(prefix):
            continue
        match = re.fullmatch(rf"({'|'.join(STAGES)})-([0-9a-f]{{16}})", folder.name)
        if not match:
            continue
        stage, fingerprint = match.groups()
        if stage != "train":
            kind = KIND_OF_STAGE[stage]
            found = [Artefact(stage, fingerprint, kind)]
        else:
            steps = [("checkpoint", path) for path in folder.glob("manifests/done_*.json")]
            steps += [
                (path.name.removesuffix(".done.json"), path.parent)
                for path in folder.glob("exports/step_*/*.done.json")
            ]
            found = sorted(
                Artefact(stage, fingerprint, kind, int(re.search(r"_(\d+)(?:\.json)?$", path.name)[1]))
                for kind, path in steps
            )
        yield from (artefact for artefact in found if artefact.done_path.is_file())
