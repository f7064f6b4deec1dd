"""Experiment files: found, named, read, and taken apart into runs and suites. Every fault of every file is collected.

`experiments/<run>.toml` declares a run, or one per cell of its grid (`<run>/<cell>`); without `experiment.kind` it is a
fragment to extend from. `experiments/evals/<suite>.toml` declares a suite: an evaluation without a model.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlmake import config as schema
from rlmake.build import names
from rlmake.config.experiment import GRID_WORDS
from rlmake.config.faults import placed
from rlmake.config.fields import semantic_part
from rlmake.config.grid import Cell, expand
from rlmake.config.layers import Composed
from rlmake.core.errors import ConfigError, Fault, nearest

FOLDER = Path("experiments")
SUITES = FOLDER / "evals"
CLASSES = {
    "data": schema.DataConfig,
    "init": schema.InitConfig,
    "import": schema.ImportConfig,
    "sft": schema.SFTConfig,
    "rl": schema.RLConfig,
}
EVERY = "in every cell"
STAGE_OF_KIND = {"data": "data", "init": "model", "import": "model", "sft": "train", "rl": "train"}


@dataclass(frozen=True)
class Run:
    """One run: an experiment file, or one cell of its grid. `raw`: the composed file with the cell's values."""

    name: str
    file: str
    kind: str
    evals: tuple[str, ...]
    manual: bool
    raw: dict[str, Any]
    best: schema.BestTable | None = None
    seconds_per_step: float | None = None
    grid: str | None = None
    cell: Cell | None = None

    @property
    def stage(self) -> str:
        return STAGE_OF_KIND[self.kind]


@dataclass(frozen=True)
class Suite:
    """An evaluation suite."""

    name: str
    file: str
    raw: dict[str, Any]
    config: Any

    def semantic(self) -> dict[str, Any]:
        """The semantic part without the places that the model will fill."""
        part = semantic_part(self.config)
        part.pop("model", None)
        part.get("tokenizer", {}).pop("name", None)
        if part.get("inference"):
            part["inference"]["vllm"].pop("model", None)
        return part


@dataclass
class Experiments:
    """All that the project declares. `faults` is empty when every file can be used.

    `configs`: the validated configuration of each run. They are large: who works out a run's identity takes its away.
    """

    runs: dict[str, Run] = field(default_factory=dict)
    configs: dict[str, Any] = field(default_factory=dict)
    suites: dict[str, Suite] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)  # runs, grids and suites (`evals/<suite>`) whose file has a fault

    def is_broken(self, name: str) -> bool:
        """Whether `name`, or what it lies in, is declared by a file that has a fault of its own: of what else refers to
        it nothing is to be said."""
        parts = name.split("/")
        return any("/".join(parts[:length]) in self.broken for length in range(1, len(parts) + 1))


def load() -> Experiments:
    """Read every file below `experiments/` of the working directory."""
    found = Experiments()
    if not FOLDER.is_dir():
        what = "is no folder" if os.path.lexists(FOLDER) else "no such folder; run this in the project's root"
        found.faults.append(Fault(what, file=str(FOLDER)))
        return found
    files = list(_files(found.faults))
    if found.faults:  # what is said of the rest would follow from what is not seen
        return found
    fragments: dict[str, Composed] = {}
    for file in files:
        try:
            if file.is_relative_to(SUITES):
                _load_suite(file, found, fragments)
            else:
                _load_runs(file, found, fragments)
        except ConfigError as error:
            found.faults += error.faults
            found.broken.add(file.relative_to(FOLDER).with_suffix("").as_posix())
    for outer, inner in names.nested(found.runs):
        found.faults.append(
            Fault(
                f"run '{inner}' would lie inside run '{outer}' ({found.runs[outer].file})", file=found.runs[inner].file
            )
        )
    for outer, inner in names.nested(found.suites):
        found.faults.append(Fault(f"suite '{inner}' would lie inside suite '{outer}'", file=found.suites[inner].file))
    for run in found.runs.values():
        named = [("experiment.evals", suite) for suite in run.evals]
        for key, suite in [*named, *([("experiment.best.suite", run.best.suite)] if run.best else [])]:
            if suite not in found.suites and not found.is_broken(f"evals/{suite}"):
                hint = nearest(suite, found.suites)
                fault = Fault(f"there is no suite {SUITES}/{suite}.toml{hint}", key=key)
                found.faults += placed([fault], {}, run.file)
    found.faults = list(dict.fromkeys(found.faults))
    return found


def _files(faults: list[Fault]) -> Iterator[Path]:
    """TOML files in a stable order; hidden files and folders (editors', notebooks') are none of ours.

    Links to folders are followed. What can't be looked into is a fault: runs that are not seen would count as gone.
    """

    def unreadable(error: OSError) -> None:
        faults.append(Fault(f"cannot be read: {error.strerror}", file=str(error.filename)))

    for folder, folders, files in os.walk(FOLDER, onerror=unreadable, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in [name for name in folders if os.path.islink(f"{folder}/{name}")]:
            above = [Path(folder), *Path(folder).parents][:-1]  # as it was come by, through other links too
            if any(one.resolve().is_relative_to(Path(folder, name).resolve()) for one in above):
                faults.append(Fault("a link to a folder that it lies in", file=f"{folder}/{name}"))
                folders.remove(name)
        yield from (Path(folder) / name for name in sorted(files) if name.endswith(".toml") and name[0] != ".")


def _load_suite(file: Path, found: Experiments, fragments: dict[str, Composed]) -> None:
    name = file.relative_to(SUITES).with_suffix("").as_posix()
    table, raw = schema.load_experiment(file, fragments)
    if fault := names.fault_of_run(name):
        found.faults.append(Fault(fault, file=str(file)))
    for key in ("kind", "grid", "evals"):
        if getattr(table, key):
            found.faults.append(Fault("a suite has none", key=f"experiment.{key}", file=str(file)))
    engine = (raw.get("inference") or {}).get("vllm") or {}
    for key, value in (("model", raw.get("model")), ("inference.vllm.model", engine.get("model"))):
        if value is not None:
            message = "a suite names no model: it is the run's, by outputs/<run>/evals/<suite>"
            found.faults.append(Fault(message, key=key, file=str(file)))
    found.suites[name] = Suite(name, str(file), raw, schema.parse(schema.EvalConfig, raw, file=str(file)))


def _load_runs(file: Path, found: Experiments, fragments: dict[str, Composed]) -> None:
    name = file.relative_to(FOLDER).with_suffix("").as_posix()
    table, raw = schema.load_experiment(file, fragments)
    if table.kind is None:
        return
    if fault := names.fault_of_run(name):
        found.faults.append(Fault(fault, file=str(file)))
    evals = tuple(table.evals)

    def add(run_name: str, raw: dict[str, Any], cell: Cell | None = None) -> None:
        found.configs[run_name] = schema.parse(CLASSES[table.kind], raw, file=str(file))
        found.runs[run_name] = Run(
            run_name,
            str(file),
            table.kind,
            evals,
            table.manual,
            raw,
            table.best,
            table.seconds_per_step,
            name if cell else None,
            cell,
        )

    if table.grid is None:
        add(name, raw)
        return
    refused: dict[Fault, list[str]] = {}
    if table.grid.strangers() and (misspelt := _misspelt(table.grid.axes, CLASSES[table.kind], raw, str(file))):
        found.faults += misspelt
        found.broken.add(name)
        return
    cells = expand(table.grid, file, found.faults)
    for cell in cells:
        values = raw.copy()
        try:
            for key, value in cell.values.items():
                schema.set_key(values, key, value, str(file))
            add(f"{name}/{cell.name}", values, cell)
        except ConfigError as error:
            for fault in error.faults:
                refused.setdefault(fault, []).append(cell.name)
    if refused or not cells:
        found.broken.add(name)
    for fault, where in refused.items():
        axis = next((f"axis '{key}'{_word(key)}, " for key in table.grid.axes if _names(fault, key)), "")
        said = _cells(where, len(cells))
        if axis or said != EVERY:  # else it is the file's own, and said once with those that extend it
            fault = replace(fault, message=f"{fault.message} ({axis}{said})")
        found.faults.append(fault)


def _misspelt(axes: dict[str, list[Any]], cls: type[schema.Config], raw: Composed, file: str) -> list[Fault]:
    """Faults of axes that are no keys of the configuration."""
    values = raw.copy()
    try:
        for key, alternatives in axes.items():
            schema.set_key(values, key, alternatives[0], file)
        schema.parse(cls, values, file=file)
    except ConfigError as error:
        named = ((fault, next((key for key in axes if _names(fault, key)), None)) for fault in error.faults)
        return [
            Fault(f"{fault.message} (axis '{key}'{_word(key)})", fault.key, fault.file) for fault, key in named if key
        ]
    return []


def _word(axis: str) -> str:
    """What else a misspelt axis may have been: a word of the grid."""
    return nearest(axis, GRID_WORDS) if "." not in axis else ""


def _names(fault: Fault, axis: str) -> bool:
    """Whether an axis is what an unknown key comes from."""
    return fault.message.startswith("unknown key") and f"{axis}.".startswith(f"{fault.key}.")


def _cells(names: list[str], count: int) -> str:
    """The cells that a fault is about: a misspelt axis is wrong in all of them, and said once."""
    if len(names) == count > 1:
        return EVERY
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"cell {names[0]}{more}"
