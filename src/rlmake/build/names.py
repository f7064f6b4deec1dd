"""Names of runs, suites and targets: what may stand in a path, and what a target's path means."""

import functools
import os
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from rlmake.config.names import alike, fault_of_segment
from rlmake.core.errors import nearest, shown

OUTPUTS = "outputs"
# Segments of a run's own folder; no run or suite may bear one, so that a target's path reads in one way only.
# (`data` may be a run's name: only data runs have that leaf, and no run lies inside another.)
RESERVED = frozenset(
    {"weights", "weights-FP8", "adapter", "checkpoints", "exports", "evals", "parity", "logs", "configs", "report.html"}
    | {"results.csv", "results.json", "monitors", "batches", "broadcasts", "ledger", "run.json", "manifests"}
)
WORKING = ("logs", "configs", "monitors")  # of a run directory, linked from the start of the work
EXPORTS = ("weights", "weights-FP8", "adapter")  # what a checkpoint is exported as
GRID_FILES = ("report.html", "results.csv", "results.json")
ARTEFACTS = {
    "data": ("data",),
    "model": ("weights", "evals/<suite>"),
    "train": (
        *EXPORTS, "checkpoints/step_<n>", *(f"exports/step_<n>/{kind}" for kind in EXPORTS), "exports/best/weights",
        "evals/<suite>", "evals/<suite>@step_<n>", "parity/report.json", "report.html",
    ),
}  # fmt: skip


Stages = Callable[[str], str] | None


def fault_of_run(name: str) -> str | None:
    """Why `name` (segments joined by `/`) cannot be a run's or a suite's, None when it can."""
    for segment in name.split("/"):
        if segment in RESERVED:
            return f"'{segment}' is reserved for what a run yields, choose another name"
        if "@" in segment:
            return f"{segment!r} is no safe name: @ stands between a suite and a step"
        if fault := fault_of_segment(segment):
            return fault
    return None


def nested(names: Iterable[str]) -> list[tuple[str, str]]:
    """`(outer, inner)` for every name that lies inside another's folder."""
    known = set(names)
    found = []
    for name in sorted(known):
        parts = name.split("/")
        found += [(outer, name) for i in range(1, len(parts)) if (outer := "/".join(parts[:i])) in known]
    return found


@dataclass(frozen=True)
class Target:
    """`outputs/<run>/<artefact>` taken apart.

    `kind` is data, weights, weights-FP8, adapter, best, checkpoint, eval, parity, report, or grid: then `run` is the
    grid's name and `rest` one of its files. `step` is None where the run's last step is meant. Of other kinds `rest` is
    what follows inside the artefact (`train.jsonl` of `outputs/x/data/train.jsonl`), "" for the whole.
    """

    run: str
    kind: str
    step: int | None = None
    suite: str | None = None
    rest: str = ""

    @functools.cached_property
    def path(self) -> str:
        """The target's path, without what follows inside the artefact."""
        if self.kind in EXPORTS:
            leaf = self.kind if self.step is None else f"exports/step_{self.step}/{self.kind}"
        else:
            leaf = {
                "data": "data",
                "best": "exports/best/weights",
                "checkpoint": f"checkpoints/step_{self.step}",
                "eval": f"evals/{self.suite}" + ("" if self.step is None else f"@step_{self.step}"),
                "parity": "parity/report.json",
                "report": "report.html",
                "grid": self.rest,
            }[self.kind]
        return f"{OUTPUTS}/{self.run}/{leaf}"

    @property
    def inside(self) -> str:
        """What follows inside the artefact; of a grid nothing does."""
        return "" if self.kind == "grid" else self.rest


_STEP = r"step_(?P<step>[1-9]\d*)"
_LEAVES = [
    ("data", re.compile(r"data(?:/(?P<rest>.+))?")),
    *((kind, re.compile(rf"(?:exports/{_STEP}/)?{kind}(?:/(?P<rest>.+))?")) for kind in EXPORTS),
    ("best", re.compile(r"exports/best/weights(?:/(?P<rest>.+))?")),
    ("checkpoint", re.compile(rf"checkpoints/{_STEP}(?:/(?P<rest>.+))?")),
    ("eval", re.compile(rf"evals/(?P<suite>[^@]+?)(?:@{_STEP})?")),
    ("parity", re.compile(r"parity/report\.json")),
    ("report", re.compile(r"report\.html")),
]


def is_output(value: object) -> bool:
    """Whether a configuration's value names something below `outputs/`."""
    return isinstance(value, str) and value.startswith(f"{OUTPUTS}/")


def fault_of_spelling(value: str) -> str | None:
    """What is wrong with a path below `outputs/` that is written in another way (`./outputs/x`, `outputs//x`, an
    absolute path) or leads into the store: it would be taken for files of nobody's. None for everything else."""
    if OUTPUTS not in value or len(value) > 4096 or "\n" in value:
        return None
    path = os.path.normpath(os.path.expanduser(value))
    if os.path.isabs(path):
        roots = (root for root in (os.getcwd(), os.environ.get("PWD", "")) if path.startswith(f"{root}/{OUTPUTS}/"))
        path = os.path.relpath(path, next(roots, "/"))
    if not is_output(path):
        return None
    if path.startswith(f"{OUTPUTS}/.store/"):
        return f"{value}: a place in the store, no target; name what is published, {OUTPUTS}/<run>/<artefact>"
    return None if path == value else f"{value}: a target of the build is written {path}"


def parse_target(path: str, runs: Collection[str], grids: Collection[str] = (), stages: Stages = None) -> Target | str:
    """Take a path below `outputs/` apart; a text says in one line why it is no target. `runs`: the names there are,
    `stages`: what kind of work each is, to name in that line what it yields."""
    if shown(path) != path:
        return f"{shown(path)}: no target; no run's name holds a line break"
    if fault := fault_of_spelling(path):
        return fault
    parts = path.split("/")
    if parts[0] != OUTPUTS or len(parts) < 3 or parts[1] in RESERVED or any(part in ("", ".", "..") for part in parts):
        if parts[0] != OUTPUTS and isinstance(parse_target(f"{OUTPUTS}/{path}", runs, grids, stages), Target):
            return f"{path}: no target; did you mean '{OUTPUTS}/{path}'?"
        hint = nearest(path.removeprefix(f"{OUTPUTS}/"), [*runs, *grids])
        return f"{path}: no target; targets are written {OUTPUTS}/<run>/<artefact>{hint}"
    split = next((i for i in range(len(parts), 1, -1) if "/".join(parts[1:i]) in runs), None)
    if split is None:
        data = max((i for i, part in enumerate(parts) if i > 1 and part == "data"), default=len(parts) - 1)
        stop = next((i for i, part in enumerate(parts[1:], 1) if part in RESERVED), data)
        run = "/".join(parts[1:stop])
        if run in grids:
            if (rest := "/".join(parts[stop:])) in GRID_FILES:
                return Target(run, "grid", rest=rest)
            if "=" in parts[stop]:
                return _no_cell(path, run, parts[stop], runs)
            hint, there = nearest("/".join(parts[stop:]), GRID_FILES), ", ".join(GRID_FILES)
            return f"{path}: no target{hint}; a grid yields {there}, and each of its cells what a run yields"
        if (grid := run.rpartition("/")[0]) in grids:
            return _no_cell(path, grid, parts[stop - 1], runs)
        if os.path.isfile(f"experiments/{run}.toml"):
            return f"{path}: experiments/{run}.toml declares no run: its [experiment] has no 'kind'"
        return f"{path}: there is no experiments/{run}.toml that declares a run{nearest(run, [*runs, *grids])}"
    leaf = "/".join(parts[split:])
    for kind, pattern in _LEAVES:
        if match := pattern.fullmatch(leaf):
            found = match.groupdict()
            step = int(found["step"]) if found.get("step") else None
            return Target("/".join(parts[1:split]), kind, step, found.get("suite"), found.get("rest") or "")
    run = "/".join(parts[1:split])
    kinds = [stages(run)] if stages else ARTEFACTS
    all_leaves = sorted({leaf for kind in kinds for leaf in ARTEFACTS[kind]})
    number = next(iter(re.findall(r"step_0*([1-9]\d*)", leaf)), "<n>")
    hint = nearest(leaf, [name.replace("<n>", number) for name in all_leaves])
    if all_leaves == ["data"]:
        hint = hint or f"; did you mean '{OUTPUTS}/{run}/data/{leaf}'?"
    return f"{path}: no target{hint}; a run yields {', '.join(all_leaves)}"


def _no_cell(path: str, grid: str, cell: str, runs: Collection[str]) -> str:
    cells = [name.removeprefix(f"{grid}/") for name in runs if name.startswith(f"{grid}/")]
    same = next((one for one in cells if alike(one, cell)), None)
    longer = [f"'{one}'" for one in cells if one.startswith(f"{cell},")]
    if same:
        hint = f"; that is written '{same}' there"
    elif longer:
        more = f" and {len(longer) - 4} more" if len(longer) > 5 else ""
        hint = f"; an axis was added: there are {', '.join(longer[: 4 if more else 5])}{more}"
    else:
        hint = nearest(cell, cells) or f"; one is called '{cells[0]}'"
    return f"{path}: the grid experiments/{grid}.toml has no cell '{cell}'{hint}"
