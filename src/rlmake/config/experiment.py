"""The `[experiment]` table of an experiment file: what only the build reads."""

import math
from collections.abc import Iterator
from dataclasses import replace
from datetime import date, time
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError, model_validator

from rlmake.config.faults import of_validation, placed
from rlmake.config.fields import Config, runtime
from rlmake.config.layers import Composed, load_layer
from rlmake.config.names import fault_of_path
from rlmake.config.refused import Refused
from rlmake.core.errors import ConfigError, Fault, nearest

Kind = Literal["data", "init", "import", "sft", "rl"]
GRID_WORDS = ("zip", "include", "exclude", "baseline")


class GridTable(Config):
    """A grid of runs: axes (dotted keys of the configuration with their values) and how they are combined."""

    axes: dict[str, list[Any]] = runtime(dict, "Values by dotted key.")
    zip: list[list[str]] = runtime(list, "Groups of axes that advance together.")
    include: list[dict[str, Any]] = runtime(list, "Cells to add.")
    exclude: list[dict[str, Any]] = runtime(list, "Cells to leave out: all that agree with one of these.")
    baseline: dict[str, Any] | None = runtime(None, "The cell that others are compared with.")

    @model_validator(mode="before")
    @classmethod
    def _axes_beside_words(cls, data: Any) -> Any:
        """Axes stand directly in the table; nested keys of TOML (`trainer.optim.lr`) are joined to dotted ones."""
        if not isinstance(data, dict) or "axes" in data:
            return data
        axes: dict[str, Any] = {}
        for key, value in data.items():
            if key not in GRID_WORDS:
                for name, values in _flattened(key, value):
                    if not isinstance(values, list):
                        hint = nearest(key, GRID_WORDS)
                        raise Refused([(name, f"an axis is a list of values, not {values!r}{hint}")])
                    if name in axes:
                        raise Refused([(name, "stands twice, spelled in two ways")])
                    axes[name] = values
        words = {key: data[key] for key in GRID_WORDS if key in data}
        if isinstance(words.get("zip"), list) and all(isinstance(item, str) for item in words["zip"]):
            words["zip"] = [words["zip"]]
        return {"axes": axes, **words}

    @model_validator(mode="after")
    def _known_axes(self):
        faults = []
        for key, values in self.axes.items():
            if not values:
                faults.append((key, "an axis needs at least one value"))
            if key.startswith("experiment."):
                faults.append((key, "an axis is a key of the run's configuration; [experiment] is one for all cells"))
        cells = [(f"include.{index}.", cell) for index, cell in enumerate(self.include)]
        cells += [(f"exclude.{index}.", cell) for index, cell in enumerate(self.exclude)]
        for prefix, table in [("", self.axes), *cells, ("baseline.", self.baseline or {})]:
            faults += [(f"{prefix}{key}", fault) for key, value in table.items() for fault in _unusable(value)]
        for index, names in enumerate(self.zip):
            lengths = {len(self.axes[name]) for name in names if name in self.axes}
            if len(lengths) > 1:
                faults.append((f"zip.{index}", f"axes of one zip need equally many values, not {sorted(lengths)}"))
        if faults:
            raise Refused(faults)
        return self

    def strangers(self) -> list[tuple[str, str]]:
        """`(key, fault)` of names that are no axis. One of them may be right, and the axis misspelt."""
        used = [(f"zip.{index}", name) for index, names in enumerate(self.zip) for name in names]
        used += [(f"exclude.{index}", name) for index, cell in enumerate(self.exclude) for name in cell]
        used += [("baseline", name) for name in self.baseline or ()]
        return [(key, f"'{name}' is no axis{nearest(name, self.axes)}") for key, name in used if name not in self.axes]


def _unusable(value: Any) -> list[str]:
    """What no cell can be told from another by: numbers that are not finite, TOML's dates and times."""
    if isinstance(value, float):
        return [] if math.isfinite(value) else [f"must be finite, not {value}"]
    if isinstance(value, date | time):
        return [f"no key takes a date or time; as text it is written '{value.isoformat()}'"]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [fault for item in items for fault in _unusable(item)]


def _flattened(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _flattened(f"{key}.{name}", item)
    else:
        yield key.replace("-", "_"), value


class BestTable(Config):
    """Which checkpoint `exports/best/weights` stands for."""

    suite: str = runtime(..., "Suite (file under experiments/evals/) by which every checkpoint is evaluated.")
    metric: str = runtime("reward", "Number of the evaluation: reward (its mean), or avg@k, pass@k, pass^k, truncated.")
    env: str | None = runtime(None, "Environment of the suite; absent: the mean over all of them.")
    goal: Literal["max", "min"] = runtime("max", "Whether more is better. Of equal checkpoints the earliest is taken.")


class ExperimentTable(Config):
    """What the build reads of an experiment file; never inherited, never seen by the entry point."""

    kind: Kind | None = runtime(None, "Kind of work; a file without one is a fragment to extend from.")
    extends: list[str] = runtime(list, "Files composed below this one, relative to it.")
    evals: list[str] = runtime(list, "Suites (files under experiments/evals/) to build for this run.")
    manual: bool = runtime(False, "Validated and planned, but not part of `all`.")
    best: BestTable | None = runtime(None, "What makes a checkpoint the best.")
    seconds_per_step: float | None = runtime(
        None, "Stated speed of a training, for the plan's estimate while nothing like it has been measured.", gt=0
    )
    grid: GridTable | None = runtime(None, "One run per cell.")

    @model_validator(mode="before")
    @classmethod
    def _one_file(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("extends"), str):
            return {**data, "extends": [data["extends"]]}
        return data

    @model_validator(mode="after")
    def _consistent(self):
        faults = [(f"evals.{index}", fault) for index, name in enumerate(self.evals) if (fault := fault_of_path(name))]
        if len(set(self.evals)) != len(self.evals):
            faults.append(("evals", "names a suite twice"))
        if self.evals and self.kind in ("data", None):
            faults.append(("evals", f"a file of kind {self.kind or '(none)'} has no model to evaluate"))
        if self.grid is not None and self.kind is None:
            faults.append(("grid", "needs a kind"))
        for key in ("best", "seconds_per_step"):
            if getattr(self, key) is not None and self.kind not in ("sft", "rl"):
                faults.append((key, f"a file of kind {self.kind or '(none)'} trains nothing"))
        if faults:
            raise Refused(faults)
        return self


def experiment_table(raw: dict[str, Any], file: Path | str) -> ExperimentTable:
    """The validated table. Raises `ConfigError`."""
    try:
        return ExperimentTable.model_validate(raw)
    except ValidationError as error:
        # TOML's own trap: `max_steps = 9` below `[experiment]` is a key of that table.
        unknown = {one["loc"] for one in error.errors() if one["type"] == "extra_forbidden" and len(one["loc"]) == 1}
        strays = {key for (key,) in unknown if not nearest(key, ExperimentTable.model_fields)}
        named = []
        for fault in of_validation(error, ExperimentTable, raw):
            more = "; the run's own keys stand above the first [table]" if fault.key in strays else ""
            key = f"experiment.{fault.key}" if fault.key else "experiment"
            named.append(replace(fault, message=fault.message + more, key=key))
        raise ConfigError(placed(named, raw, str(file))) from None


def load_experiment(file: Path | str, fragments: dict[str, Composed] | None = None) -> tuple[ExperimentTable, Composed]:
    """`(its [experiment] table, the configuration composed over what it extends)` of an experiment file; `fragments`
    as in `load_layer`."""
    composed, table = load_layer(file, fragments)
    return experiment_table(table, file), composed


def check_direct(table: dict[str, Any], entry: str | None, file: Path | str) -> GridTable | None:
    """Refuse to start a file with the entry point of another kind. Returns its grid: a cell of it is to be chosen."""
    experiment = experiment_table(table, file)
    if experiment.kind is not None and entry in ("rl", "sft", "data", "init", "import") and experiment.kind != entry:
        fault = Fault(f"this file is of kind '{experiment.kind}', not '{entry}'", "experiment.kind")
        raise ConfigError(placed([fault], {}, str(file)))
    return experiment.grid
