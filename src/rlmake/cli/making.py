"""How a job makes an artefact: under the lease of its directory, once, and with the manifest last."""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlmake.build import local, provenance, store
from rlmake.build.fingerprint import replace_texts
from rlmake.build.lease import Lease, acquire, noted_seconds
from rlmake.build.store import Artefact
from rlmake.core.errors import ConfigError, Fault, UserError
from rlmake.core.jsonio import list_files, write_json


def once(
    artefact: Artefact,
    spec: dict[str, Any],
    work: Callable[[Lease], dict[str, Any]],
    *,
    lease_in: Path | None = None,
    only: tuple[str, ...] = (),
) -> None:
    """Do `work` under a lease unless it is done, then write the manifest of what it left (of the files `only`)."""
    if store.finished(artefact):
        store.declare(artefact)
        return
    folder = lease_in or artefact.folder
    with held(folder, lambda: store.finished(artefact)) as lease:
        if lease is None or store.finished(artefact):
            store.declare(artefact)
            return
        store.withdraw(artefact)
        started, clock = now(), time.monotonic()
        facts = work(lease)
        seconds = time.monotonic() - clock
        files = list_files(artefact.root) if not only else _files(artefact.root, only)
        lease.check()
        store.finish(artefact, manifest(artefact, spec, files, started, seconds, facts))


@contextmanager
def held(folder: Path, done: Callable[[], bool]) -> Iterator[Lease | None]:
    """The lease of a store directory, None when another has finished the work. Losing it ends this process in order."""
    lease = acquire(folder, give_up=done, on_loss=lambda: os.kill(os.getpid(), signal.SIGTERM))
    if lease is None:
        yield None
        return
    with lease:
        yield lease


@contextmanager
def replaced(target: Path, lease: Lease) -> Iterator[Path]:
    """A folder to fill that becomes `target` when all went well; what killed jobs left there is removed."""
    for left in target.parent.glob(f"{target.name}.tmp-*"):
        shutil.rmtree(left)
    temporary = target.with_name(f"{target.name}.tmp-{lease.record['owner']}")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        lease.check()
        if target.exists():
            shutil.rmtree(target)
        os.rename(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def placed(spec: dict[str, Any]) -> dict[str, Any]:
    """The configuration with every name of a parent replaced by its absolute path in the store.

    Raises `ConfigError` for a file that a parent turns out not to have: nothing is started for it.
    """
    missing: list[tuple[str, str]] = []
    places = {p["ref"]: str(store.artefact_of(p).path.resolve()) for p in spec["parents"] if p["ref"]}

    def place(key: str, value: str) -> str:
        for ref, path in places.items():
            if value == ref or value.startswith(ref + "/"):
                there = path + value[len(ref) :]
                if not os.path.exists(there):
                    missing.append((key, f"{value}: no such file in what was built"))
                return there
        return value

    config = replace_texts(spec["config"], place)
    if missing:
        raise ConfigError(Fault(message, key) for message, key in local.shortest(missing).items())
    return config


def manifest(
    artefact: Artefact,
    spec: dict[str, Any],
    files: list[dict[str, Any]],
    started: str,
    seconds: float,
    facts: dict[str, Any],
) -> dict[str, Any]:
    """The record of what a job has made: of what, with what, on what, and how long it took."""
    gpus = spec["resources"]["gpus"] if artefact.kind in ("checkpoint", "eval", "parity") else 0
    return store.manifest_of(
        artefact,
        spec,
        files,
        facts=facts,
        versions=provenance.versions(),
        hardware=provenance.hardware(),
        code=spec["code"],
        started=started,
        ended=now(),
        seconds=round(seconds, 3),
        gpu_hours=round(seconds * gpus / 3600, 6),
    )


def _files(root: Path, names: tuple[str, ...]) -> list[dict[str, Any]]:
    found = [entry for entry in list_files(root) if entry["path"] in names]
    if missing := {names[0]} - {entry["path"] for entry in found}:
        raise UserError(f"{root}: the worker left no {', '.join(missing)}")
    return found


def spent(folder: Path, seconds: float) -> float:
    """Seconds that all attempts of a training took together, this one included."""
    path = folder / "time.json"
    total = (noted_seconds(folder) or 0.0) + seconds
    write_json(path, {"schema": 1, "seconds": total})
    return total


def name_of(spec: dict[str, Any]) -> str:
    """The run that a job's work was first planned for."""
    return spec["runs"][0]


def command() -> list[str]:
    """How this job was called, for records."""
    return [sys.executable, "-m", "rlmake.cli.job", *sys.argv[1:]]


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
