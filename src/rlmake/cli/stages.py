"""The stages of a build, each as one job.

A job reads `spec.json` in the store and nothing of the project's experiment files, holds the lease of what it writes,
replaces the names of parents by their places in the store, calls the worker, and writes the manifest last. Work that
is done already (Snakemake deletes declared outputs whenever it likes) is only declared again.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlmake.build import card, store
from rlmake.build.lease import Lease
from rlmake.build.store import Artefact
from rlmake.cli.making import command, held, manifest, name_of, now, once, placed, replaced, spent
from rlmake.core.errors import UserError, nearest
from rlmake.core.jsonio import read_json


def make_data(fingerprint: str) -> None:
    spec = store.read_spec("data", fingerprint)
    artefact = Artefact("data", fingerprint, "data")

    def work(lease: Lease) -> dict[str, Any]:
        from rlmake.config import DataConfig, parse
        from rlmake.envs import data

        with replaced(artefact.path, lease) as out:
            return data.make(parse(DataConfig, placed(spec)), out)

    once(artefact, spec, work)


def make_model(fingerprint: str) -> None:
    spec = store.read_spec("model", fingerprint)
    artefact = Artefact("model", fingerprint, "weights")

    def work(lease: Lease) -> dict[str, Any]:
        from rlmake.config import ImportConfig, InitConfig, parse
        from rlmake.export import bring
        from rlmake.models import init

        with replaced(artefact.path, lease) as out:
            if spec["kind"] == "import":
                return bring.make(parse(ImportConfig, placed(spec)), out)
            return init.make(parse(InitConfig, placed(spec)), out)

    once(artefact, spec, work)


def train(fingerprint: str, step: str) -> None:
    """Train to `step`, and make the earlier steps that were asked for on the way: one that is a checkpoint of the
    training's own is taken as it passes, for another one it stops and is continued."""
    from rlmake.cli import training

    spec = store.read_spec("train", fingerprint)
    last = int(step)
    steps = sorted({s for s in spec["steps"] if store.begins(spec["config"]) < s <= last} | {last})
    wanted = [Artefact("train", fingerprint, "checkpoint", s) for s in steps]
    folder = wanted[0].folder
    training.refuse_failed(folder, name_of(spec))
    with held(folder, lambda: all(store.finished(one) for one in wanted)) as lease:
        if lease is not None:
            training.refuse_failed(folder, name_of(spec))  # one that was waited for may have diverged meanwhile
            spent(folder, lease.inherited)
        for artefact in wanted:
            if lease is None or store.finished(artefact):
                store.declare(artefact)
                continue
            started, clock = now(), time.monotonic()
            end = next(s for s in steps if s >= artefact.step and (s == last or training.stops_at(spec, s)))
            try:
                facts = training.to_step(spec, placed(spec), artefact, end, name_of(spec), command())
            finally:
                seconds = spent(folder, time.monotonic() - clock)
            files = training.checkpoint_files(artefact.path)
            lease.check()
            store.finish(artefact, manifest(artefact, spec, files, started, seconds, facts))


def export(fingerprint: str, step: str, kind: str) -> None:
    """The checkpoint of `step` as bf16 weights (of a LoRA run: merged), blockwise FP8, or the adapter of a LoRA run."""
    spec = store.read_spec("train", fingerprint)
    artefact = Artefact("train", fingerprint, kind, int(step))
    lora = store.has_lora(spec["config"])
    source = store.exported_from(artefact, lora)

    def work(lease: Lease) -> dict[str, Any]:
        facts = exporter(kind, lora)(source.path, artefact.path)
        return {key: value for key, value in facts.items() if key != "files"}

    once(artefact, spec, work, lease_in=artefact.path.parent)


def exporter(kind: str, lora: bool) -> Callable[[Path, Path], dict[str, Any]]:
    """The worker `(source, out) → facts` that makes an export of this kind."""
    if kind == "adapter":
        from rlmake.export import adapter

        return adapter.export
    if kind == "weights-FP8":
        from rlmake.export import fp8

        return fp8.quantize if lora else fp8.export
    if lora:
        from rlmake.export import merge

        return merge.export
    from rlmake.export import bf16

    return bf16.export


def evaluate(fingerprint: str) -> None:
    """An evaluation of a model in the store by a suite."""
    spec = store.read_spec("eval", fingerprint)
    artefact = Artefact("eval", fingerprint, "eval")
    model = model_of(spec)

    def work(lease: Lease) -> dict[str, Any]:
        from rlmake.config import EvalConfig, parse
        from rlmake.launch import evaluate

        for name in ("report.json", "report.html"):
            (artefact.folder / name).unlink(missing_ok=True)
        identity = {"suite": spec["suite"], "suite_fingerprint": spec["suite_fingerprint"], **about_model(spec, model)}
        evaluate.run(
            parse(EvalConfig, placed(spec)),
            model.path.resolve(),
            artefact.folder,
            identity=identity,
            argv=command(),
            files=[store.spec_path("eval", fingerprint)],
            again=True,
        )
        return {"suite": spec["suite"]}

    once(artefact, spec, work, only=("report.json", "report.html", "episodes.jsonl"))


def parity(fingerprint: str) -> None:
    """The comparison of trainer and engine on a run's weights."""
    spec = store.read_spec("parity", fingerprint)
    artefact = Artefact("parity", fingerprint, "parity")
    model = model_of(spec)

    def work(lease: Lease) -> dict[str, Any]:
        from rlmake.config import RLConfig, SFTConfig, parse
        from rlmake.launch import parity

        artefact.path.unlink(missing_ok=True)
        parity.run(
            parse(RLConfig if spec["trains"] == "rl" else SFTConfig, placed(spec)),
            model.path.resolve(),
            artefact.folder,
            identity=about_model(spec, model),
            argv=command(),
            files=[store.spec_path("parity", fingerprint)],
            fingerprint=fingerprint,
        )
        return {}

    once(artefact, spec, work, only=("report.json",))


def model_of(spec: dict[str, Any]) -> Artefact:
    """The weights that a job is about."""
    return store.artefact_of(next(parent for parent in spec["parents"] if parent["role"] == "model"))


def about_model(spec: dict[str, Any], model: Artefact) -> dict[str, Any]:
    """What a report says of the weights that it is about."""
    return {
        "run": name_of(spec),
        "model_fingerprint": model.fingerprint,
        "model_step": model.step,
        "model_content": store.read_manifest(model.done_path)["content"],
    }


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
            name=name_of(spec),
            run_dir=run.folder.resolve(),
            step=spec["step"],
            spec=store.read_spec("train", run.fingerprint),
            lineage=lineage,
            evals=evals,
        )
        found = make(artefact.folder, facts)
        return {key: value for key, value in found.items() if key != "files"}

    once(artefact, spec, work, only=("report.html",))


def grid(fingerprint: str) -> None:
    """The page of a grid, and its numbers as CSV and JSON."""
    spec = store.read_spec("grid", fingerprint)
    artefact = Artefact("grid", fingerprint, "grid")

    def work(lease: Lease) -> dict[str, Any]:
        from rlmake.report import grid_page
        from rlmake.report.grid import CellFacts, GridFacts

        cells = []
        for cell in spec["cells"]:
            last = Artefact("train", cell["train"], "checkpoint", cell["step"])
            evals = [
                {"suite": e["suite"], "report": Artefact("eval", e["fingerprint"], "eval").path / "report.json"}
                for e in cell["evals"]
            ]
            cells.append(
                CellFacts(
                    name=cell["name"],
                    run=cell["run"],
                    values=cell["values"],
                    texts=cell["texts"],
                    baseline=cell["baseline"],
                    fingerprint=cell["train"],
                    step=cell["step"],
                    run_dir=last.folder,
                    manifest=last.done_path,
                    evals=evals,
                    lost=spec["lost"].get(cell["name"]),
                    missing=spec.get("missing", {}).get(cell["name"]),
                )
            )
        return grid_page.make(artefact.folder, GridFacts(spec["grid"], spec["trains"], cells, spec["axes"]))

    once(artefact, spec, work, only=("report.html", "results.csv", "results.json"))


def best(fingerprint: str) -> None:
    """The weights of the checkpoint that its evaluation says is the best: links to the same files, and the choice."""
    spec = store.read_spec("best", fingerprint)
    artefact = Artefact("best", fingerprint, "weights")

    def work(lease: Lease) -> dict[str, Any]:
        values = {}
        for entry in spec["evals"]:
            report = read_json(Artefact("eval", entry["fingerprint"], "eval").path / "report.json")
            values[entry["step"]] = metric_of(report, spec["semantic"])
        sign = 1 if spec["semantic"]["goal"] == "max" else -1
        step = max(values, key=lambda step: (sign * values[step], -step))
        source = Artefact("train", spec["train"], "weights", step)
        with replaced(artefact.path, lease) as out:
            for path in sorted(source.path.rglob("*")):
                if path.is_file() and path.name not in card.NAMES:
                    (out / path.relative_to(source.path)).parent.mkdir(parents=True, exist_ok=True)
                    os.link(path, out / path.relative_to(source.path))
        return {"step": step, "values": values, **spec["semantic"]}

    once(artefact, spec, work)


def metric_of(report: dict[str, Any], wanted: dict[str, Any]) -> float:
    """The number of an evaluation by which checkpoints are compared."""
    envs = report["envs"]
    if wanted["env"] is not None and wanted["env"] not in envs:
        hint = nearest(wanted["env"], envs)
        raise UserError(f"experiment.best.env: suite {wanted['suite']} has no environment '{wanted['env']}'{hint}")
    found = []
    for name, env in envs.items():
        if wanted["env"] in (None, name):
            value = env["reward"]["mean"] if wanted["metric"] == "reward" else env.get(wanted["metric"])
            value = value.get("mean") if isinstance(value, dict) else value
            if not isinstance(value, int | float):
                numbers = ["reward", *(key for key in env if key.startswith(("avg@", "pass@", "pass^", "truncated")))]
                hint = f"{nearest(wanted['metric'], numbers)}; there are {', '.join(numbers)}"
                raise UserError(f"experiment.best.metric: {name} has no number '{wanted['metric']}'{hint}")
            found.append(float(value))
    return sum(found) / len(found)


STAGES: dict[str, Callable[..., None]] = {
    "data": make_data,
    "model": make_model,
    "train": train,
    "export": export,
    "eval": evaluate,
    "parity": parity,
    "report": report,
    "grid": grid,
    "best": best,
}
