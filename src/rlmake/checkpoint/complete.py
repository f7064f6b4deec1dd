"""The COMPLETE record: a checkpoint exists from the moment it is there, and only while the files agree with it."""

import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from loguru import logger

from rlmake.checkpoint.halves import COMPLETE, SCHEMA
from rlmake.core.errors import RunFailed, UserError
from rlmake.core.jsonio import canonical, hash_bytes, hash_file, read_json, write_json
from rlmake.core.rundir import RunContext, numbered, step_dir

FIELDS = {
    "schema", "run_id", "fingerprint", "step", "policy_version", "attempt", "world_size", "files", "ledger",
    "checksum",
}  # fmt: skip


def publish(
    run_dir: Path,
    step: int,
    halves: Iterable[str] = ("trainer", "orchestrator"),
    *,
    policy_version: int,
    world_size: int,
    ledger: str | None,
    ctx: RunContext,
    timeout: float = 600.0,
    poll: float = 0.05,
) -> dict[str, Any]:
    """Wait until every half is sealed, then write COMPLETE, last and atomically. Returns the record.

    `ledger` is the running hash over the samples trained up to `step`. Raises `RunFailed` naming the halves that
    are missing after `timeout` seconds.
    """
    folder, halves = step_dir(run_dir, step), tuple(halves)
    deadline = time.monotonic() + timeout
    while missing := [half for half in halves if not (folder / f"{half}.json").is_file()]:
        if time.monotonic() > deadline:
            names = ", ".join(f"{half} half ({half}.json)" for half in missing)
            raise RunFailed(f"{folder}: not complete, still waiting after {timeout:g} s for its {names}")
        time.sleep(poll)
    sealed = {half: read_json(folder / f"{half}.json") for half in halves}
    record = {
        "schema": SCHEMA,
        "run_id": ctx.run_id,
        "fingerprint": ctx.fingerprint,
        "step": step,
        "policy_version": policy_version,
        "attempt": ctx.attempt,
        "world_size": world_size,
        "files": [{"half": half, **entry} for half in halves for entry in sealed[half]["files"]],
        "ledger": ledger,
    }
    record["checksum"] = _checksum(record)
    if faults := _file_faults(folder, record, hashes=False):
        raise RunFailed(f"{folder}: {faults[0]}")
    write_json(folder / COMPLETE, record)
    return record


def read(folder: Path) -> dict[str, Any]:
    """The COMPLETE record of a step's folder; a missing, broken or unknown one is a `UserError`."""
    path = folder / COMPLETE
    if not folder.is_dir():
        raise UserError(f"{folder}: no such checkpoint")
    if not path.is_file():
        if path.with_name(f"{COMPLETE}.damaged").is_file():
            raise UserError(f"{folder}: found damaged by `rlmake verify`")
        raise UserError(f"{path}: no such file, the checkpoint was never finished")
    record = read_json(path)
    if not isinstance(record, dict) or not record.keys() >= FIELDS:
        raise UserError(f"{path}: not a checkpoint record")
    if record["schema"] != SCHEMA:
        raise UserError(f"{path}: schema {record['schema']} is unknown, expected {SCHEMA}")
    if record["checksum"] != _checksum(record):
        raise UserError(f"{path}: its content does not match its own checksum")
    return record


def verify(folder: Path, hashes: bool | Callable[[str], bool] = True, mapped: bool = False) -> list[str]:
    """What is wrong with a step's folder, one line per fault naming the file; empty when it is whole.

    `hashes=False` compares names and sizes only (milliseconds instead of a read of every byte); a function of a file's
    path says whether its bytes are read. `mapped` as in `hash_file`.
    """
    try:
        record = read(folder)
    except UserError as error:
        return [str(error)]
    match = re.fullmatch(r"(?:abandoned-\d+-)?step_(\d+)", folder.name)
    if match and int(match[1]) != record["step"]:
        return [f"{folder / COMPLETE}: written for step {record['step']}"]
    return _file_faults(folder, record, hashes, mapped)


def steps(run_dir: Path) -> list[int]:
    """Steps that have a COMPLETE record, ascending by number. Whether the files agree is `verify`'s to say."""
    return [step for step, folder in numbered(run_dir / "checkpoints").items() if (folder / COMPLETE).is_file()]


def newest(run_dir: Path, upto: int | None = None, hashes: bool = True) -> int | None:
    """The newest step (at most `upto`) that is complete and whole, or None.

    A damaged or unfinished one is skipped with one warning that names the file and what is wrong with it. Without
    `hashes` nothing is said where one is found: who loads it looks again, and says the same.
    """
    skipped, found = [], None
    for step, folder in reversed(numbered(run_dir / "checkpoints").items()):
        if upto is not None and step > upto:
            continue
        if not (faults := verify(folder, hashes)):
            found = step
            break
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        skipped.append(f"checkpoint step_{step} skipped: {faults[0]}{more}")
    for line in skipped if hashes or found is None else []:
        logger.warning(line)
    return found


def resume_point(run_dir: Path, step: int | None = None, fork: Path | str | None = None, hashes: bool = True) -> Path:
    """The folder that a resume loads: the newest whole step, the `step` asked for, or the step of another run (`fork`).

    Raises `UserError` when there is none, naming what is wrong with what was asked for and what there is instead.
    """
    if fork is not None:
        folder = Path(fork)
        if not re.fullmatch(r"step_\d+", folder.name):
            raise UserError(f"resume.dir = {str(fork)!r}: expected a path that ends in step_<n>")
    elif step is not None:
        folder = step_dir(run_dir, step)
    else:
        found = newest(run_dir, hashes=hashes)
        if found is None:
            raise UserError(f"{run_dir / 'checkpoints'}: no complete checkpoint to resume from")
        return step_dir(run_dir, found)
    if faults := verify(folder, hashes=hashes):
        there = ", ".join(map(str, steps(folder.parent.parent))) or "none"
        raise UserError(f"cannot resume from {folder}: {faults[0]}; complete steps there: {there}")
    return folder


def _checksum(record: dict[str, Any]) -> str:
    """Hash over the record's other fields: a flipped bit in `ledger` or `policy_version` is damage like any other."""
    return hash_bytes(canonical({key: value for key, value in record.items() if key != "checksum"}))


def _file_faults(
    folder: Path, record: dict[str, Any], hashes: bool | Callable[[str], bool], mapped: bool = False
) -> list[str]:
    faults = []
    asked = hashes if callable(hashes) else lambda path: hashes
    for entry in record["files"]:
        relative = PurePosixPath(entry["path"])
        path = folder / relative
        if relative.is_absolute() or ".." in relative.parts:
            faults.append(f"{folder / COMPLETE}: names a file outside the checkpoint: {relative}")
        elif not path.is_file():
            faults.append(f"{path}: missing")
        elif (size := path.stat().st_size) != entry["size"]:
            faults.append(f"{path}: {size} bytes, expected {entry['size']}")
        elif asked(entry["path"]) and hash_file(path, mapped) != entry["blake3"]:
            faults.append(f"{path}: content differs from its hash")
    return faults
