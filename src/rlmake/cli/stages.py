"""The stages of a build, each as one job.

A job reads `spec.json` in the store and nothing of the project's experiment files, holds the lease of what it writes,
replaces the names of parents by their places in the store, calls the worker, and writes the manifest last. Work that
is done already (Snakemake deletes declared outputs whenever it likes) is only declared again.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlmake.build import failure, store
from rlmake.build.lease import Lease, acquire
from rlmake.build.store import Artefact
from rlmake.core.errors import RunFailed, UserError
from rlmake.core.jsonio import list_files


def make_data(fingerprint: str) -> None:
    spec = store.read_spec("data", fingerprint)
    artefact = Artefact("data", fingerprint, "data")

    def work(lease: Lease) -> dict[str, Any]:
        from rlmake.config import DataConfig, parse
        from rlmake.envs import data

        with _replaced(artefact.path, lease) as out:
            return data.make(parse(DataConfig, _placed(spec)), out)

    _once(artefact, spec, work)


def make_model(fingerprint: str) -> None:
    spec = store.read_spec("model", fingerprint)
    artefact = Artefact("model", fingerprint, "weights")

    def work(lease: Lease) -> dict[str, Any]:
        from rlmake.config import ImportConfig, InitConfig, parse
        from rlmake.export import bring
        from rlmake.models import init

        with _replaced(artefact.path, lease) as out:
            if spec["kind"] == "import":
                return bring.make(parse(ImportConfig, _placed(spec)), out)
            return init.make(parse(InitConfig, _placed(spec)), out)

    _once(artefact, spec, work)


def train(fingerprint: str, step: str) -> None:
    """Train to `step`, and make the earlier steps that were asked for on the way."""
    from rlmake.cli import training

    spec = store.read_spec("train", fingerprint)
    last = int(step)
    steps = sorted({s for s in spec["steps"] if s <= last} | {last})
    wanted = [Artefact("train", fingerprint, "checkpoint", s) for s in steps]
    folder = wanted[0].folder
    if noted := failure.read(folder):
        raise RunFailed(f"{_name(spec)} {failure.describe(noted)}; it is not tried again until it is changed")
    with _held(folder, lambda: all(store.finished(one) for one in wanted)) as lease:
        for artefact in wanted:
            if lease is None or store.finished(artefact):
                store.declare(artefact)
                continue
            started, clock = _now(), time.monotonic()
            try:
                facts = training.to_step(spec, _placed(spec), artefact, _name(spec), _command())
            finally:
                seconds = _spent(folder, time.monotonic() - clock)
            files = training.checkpoint_files(artefact.path)
            lease.check()
            store.finish(artefact, _manifest(artefact, spec, files, started, seconds, facts))


def export(fingerprint: str, step: str) -> None:
    """The checkpoint of `step` as bf16 weights."""
    spec = store.read_spec("train", fingerprint)
    artefact = Artefact("train", fingerprint, "weights", int(step))
    checkpoint = Artefact("train", fingerprint, "checkpoint", int(step))

    def work(lease: Lease) -> dict[str, Any]:
        from rlmake.export import bf16

        facts = bf16.export(checkpoint.path, artefact.path)
        return {key: value for key, value in facts.items() if key != "files"}

    _once(artefact, spec, work, lease_in=artefact.path.parent)


def evaluate(fingerprint: str) -> None:
    """An evaluation of a model in the store by a suite."""
    spec = store.read_spec("eval", fingerprint)
    artefact = Artefact("eval", fingerprint, "eval")
    record = next(parent for parent in spec["parents"] if parent["role"] == "model")
    model = store.artefact_of(record)

    def work(lease: Lease) -> dict[str, Any]:
        from rlmake.config import EvalConfig, parse
        from rlmake.launch import evaluate

        for name in ("report.json", "report.html"):
            (artefact.folder / name).unlink(missing_ok=True)
        identity = {
            "suite": spec["suite"],
            "suite_fingerprint": spec["suite_fingerprint"],
            "run": _name(spec),
            "model_fingerprint": model.fingerprint,
            "model_step": model.step,
            "model_content": store.read_manifest(model.done_path)["content"],
        }
        evaluate.run(
            parse(EvalConfig, _placed(spec)),
            model.path.resolve(),
            artefact.folder,
            identity=identity,
            argv=_command(),
            files=[store.spec_path("eval", fingerprint)],
            again=True,
        )
        return {"suite": spec["suite"]}

    _once(artefact, spec, work, only=("report.json", "report.html", "episodes.jsonl"))


def report(fingerprint: str) -> None:
    """The page of a run."""
    spec = store.read_spec("report", fingerprint)
    artefact = Artefact("report", fingerprint, "report")
    run = store.artefact_of(spec["parents"][0])

    def work(lease: Lease) -> dict[str, Any]:
        from rlmake.report.facts import ReportFacts
        from rlmake.report.run import make

        evals = [
            {**row, "report": (Artefact("eval", row["fingerprint"], "eval").folder / "report.json").resolve()}
            for row in spec["evals"]
        ]
        lineage = [{**row, "manifest": Path(row["manifest"]).resolve()} for row in spec["lineage"]]
        facts = ReportFacts(
            name=_name(spec),
            run_dir=run.folder.resolve(),
            step=spec["step"],
            spec=store.read_spec("train", run.fingerprint),
            lineage=lineage,
            evals=evals,
        )
        found = make(artefact.folder, facts)
        return {key: value for key, value in found.items() if key != "files"}

    _once(artefact, spec, work, only=("report.html",))


STAGES: dict[str, Callable[..., None]] = {
    "data": make_data,
    "model": make_model,
    "train": train,
    "export": export,
    "eval": evaluate,
    "report": report,
}


def _once(
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
    with _held(folder, lambda: store.finished(artefact) is not None) as lease:
        if lease is None or store.finished(artefact):
            store.declare(artefact)
            return
        store.withdraw(artefact)
        started, clock = _now(), time.monotonic()
        facts = work(lease)
        seconds = time.monotonic() - clock
        files = list_files(artefact.root) if not only else _files(artefact.root, only)
        lease.check()
        store.finish(artefact, _manifest(artefact, spec, files, started, seconds, facts))


@contextmanager
def _held(folder: Path, done: Callable[[], bool]) -> Iterator[Lease | None]:
    """The lease of a store directory, None when another has finished the work. Losing it ends this process in order."""
    lease = acquire(folder, give_up=done, on_loss=lambda: os.kill(os.getpid(), signal.SIGTERM))
    if lease is None:
        yield None
        return
    with lease:
        yield lease


@contextmanager
def _replaced(target: Path, lease: Lease) -> Iterator[Path]:
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


def _placed(spec: dict[str, Any]) -> dict[str, Any]:
    """The configuration with every name of a parent replaced by its absolute path in the store."""
    places = {p["ref"]: str(store.artefact_of(p).path.resolve()) for p in spec["parents"] if p["ref"]}

    def place(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: place(item) for key, item in value.items()}
        if isinstance(value, list):
            return [place(item) for item in value]
        if isinstance(value, str):
            for ref, path in places.items():
                if value == ref or value.startswith(ref + "/"):
                    return path + value[len(ref) :]
        return value

    return place(spec["config"])


def _manifest(
    artefact: Artefact,
    spec: dict[str, Any],
    files: list[dict[str, Any]],
    started: str,
    seconds: float,
    facts: dict[str, Any],
) -> dict[str, Any]:
    from rlmake.build import provenance

    gpus = spec["resources"]["gpus"] if artefact.kind in ("checkpoint", "eval") else 0
    return store.manifest_of(
        artefact,
        spec,
        files,
        facts=facts,
        versions=provenance.versions(),
        hardware=provenance.hardware(),
        code=spec["code"],
        started=started,
        ended=_now(),
        seconds=round(seconds, 3),
        gpu_hours=round(seconds * gpus / 3600, 6),
    )


def _files(root: Path, names: tuple[str, ...]) -> list[dict[str, Any]]:
    found = [entry for entry in list_files(root) if entry["path"] in names]
    if missing := {names[0]} - {entry["path"] for entry in found}:
        raise UserError(f"{root}: the worker left no {', '.join(missing)}")
    return found


def _spent(folder: Path, seconds: float) -> float:
    """Seconds that all attempts of a training took together, this one included."""
    from rlmake.core.jsonio import read_json, write_json

    path = folder / "time.json"
    total = (read_json(path)["seconds"] if path.is_file() else 0.0) + seconds
    write_json(path, {"schema": 1, "seconds": total})
    return total


def _name(spec: dict[str, Any]) -> str:
    return spec["runs"][0]


def _command() -> list[str]:
    return [sys.executable, "-m", "rlmake.cli.job", *sys.argv[1:]]


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
