"""Ablation grids: one file that declares one run per cell.

    [experiment.grid]
    "trainer.optim.lr" = [1e-5, 3e-5]                       # an axis; axes make a product, in the order of the file
    seed = [0, 1, 2]
    zip = ["a.b", "a.c"]                                    # axes that advance together: one axis of the product
    exclude = [{"trainer.optim.lr" = 3e-5, seed = 2}]       # cells of the product that have all of these values
    include = [{"trainer.optim.lr" = 1e-4, seed = 0}]       # cells beside the product
    baseline = {"trainer.optim.lr" = 1e-5}                  # cells that have all of these: others are compared to them

A cell is named `key=text` per axis, joined by commas: the key's last segment where no axis before it has the same, and
the value as the user wrote it. A new axis at the end therefore only appends to names.
"""

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmake.config.experiment import GridTable
from rlmake.config.faults import placed
from rlmake.config.names import alike, number_of
from rlmake.core.errors import ConfigError, Fault, nearest
from rlmake.core.jsonio import canonical

MAX_NAME = 200
Texts = dict[str, str]


@dataclass(frozen=True)
class Cell:
    """One run of a grid. `values`: dotted key → value; `texts`: the same as the user wrote them."""

    name: str
    values: dict[str, Any]
    texts: Texts
    baseline: bool


def expand(table: GridTable, file: Path, faults: list[Fault]) -> list[Cell]:
    """The cells of the grid that `file` declares; what is wrong with it is appended to `faults`."""
    before = len(faults)

    def fault(key: str, message: str) -> None:
        faults.extend(placed([Fault(message, "experiment.grid" + (f".{key}" if key else ""))], {}, str(file)))

    for key, message in table.strangers():
        fault(key, message)
    if len(faults) > before:
        return []
    spelled = _spelling(file)
    texts = {key: spelled.get(key) or [_plain(value) for value in values] for key, values in table.axes.items()}
    if not table.axes and not table.include:
        fault("", "has no axis: expected at least one dotted key with a list of values")
    groups = _groups(table, fault)
    for group in groups:
        _distinct(group, table.axes, texts, fault)
    if len(faults) > before:
        return []

    cells: list[tuple[dict[str, Any], Texts]] = []
    for picks in itertools.product(*(range(len(table.axes[group[0]])) for group in groups)) if groups else []:
        chosen = {key: index for group, index in zip(groups, picks, strict=True) for key in group}
        cells.append(
            ({key: table.axes[key][i] for key, i in chosen.items()}, {key: texts[key][i] for key, i in chosen.items()})
        )
    for index, one in enumerate(table.exclude):
        kept = [cell for cell in cells if not _agrees(cell[0], one)]
        if len(kept) == len(cells):
            fault(f"exclude.{index}", f"no cell has {_say(one)}")
        cells = kept
    for index, one in enumerate(table.include):
        own = spelled.get(f"include.{index}", {})
        cells.append((one, {key: own.get(key) or _plain(value) for key, value in one.items()}))

    found = []
    for values, own in cells:
        name = _name(own, list(table.axes))
        if len(name) > MAX_NAME:
            fault("", f"the name of a cell has {len(name)} characters, at most {MAX_NAME} are possible: {name}")
        found.append(Cell(name, values, own, table.baseline is not None and _agrees(values, table.baseline)))
    if table.baseline is not None and not any(cell.baseline for cell in found):
        fault("baseline", f"no cell has {_say(table.baseline)}")
    if not cells and len(faults) == before:
        fault("exclude", "leaves no cell")
    _unique(found, fault)
    return found if len(faults) == before else []


def pick(cells: list[Cell], name: str, file: Path) -> Cell:
    """The cell of that name, or one that spells the same values otherwise. Raises `ConfigError`."""
    names = [cell.name for cell in cells]
    for cell in cells:
        if cell.name == name or alike(cell.name, name):
            return cell
    hint = nearest(name, names) or f"; there are {' '.join(names)}"
    raise ConfigError(Fault(f"there is no cell '{name}'{hint}", "--cell", str(file)))


def _groups(table: GridTable, fault: Callable[[str, str], None]) -> list[list[str]]:
    """The axes of the product in the order of the file; zipped ones stand together where the first of them stands."""
    group_of: dict[str, list[str]] = {}
    for index, names in enumerate(table.zip):
        for name in names:
            if name in group_of:
                fault(f"zip.{index}", f"'{name}' is in two groups")
            group_of[name] = names
    found: list[list[str]] = []
    for key in table.axes:
        group = group_of.get(key, [key])
        if group not in found:
            found.append(group)
    return found


def _distinct(group: list[str], axes: dict[str, list[Any]], texts: dict[str, list[str]], fault) -> None:
    seen: dict[bytes, int] = {}
    for index in range(len(axes[group[0]])):
        same = canonical([number_of(axes[key][index]) for key in group])
        if same in seen:
            both = [" with ".join(texts[key][i] for key in group) for i in (seen[same], index)]
            fault(", ".join(group), f"two values are equal: {both[0]} and {both[1]}")
        seen.setdefault(same, index)


def _agrees(values: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return all(k in values and canonical(number_of(values[k])) == canonical(number_of(v)) for k, v in wanted.items())


def _say(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in values.items())


def _name(texts: Texts, axes: list[str]) -> str:
    """Labels depend on the grid's axes alone, so that a cell that lacks one is named like its neighbours."""
    taken: set[str] = set()
    parts = []
    for key in [*axes, *(key for key in texts if key not in axes)]:
        leaf = key.rpartition(".")[2]
        label = key if leaf in taken else leaf
        taken.add(leaf)
        if key in texts:
            parts.append(f"{_safe(label)}={_safe(texts[key])}")
    return ",".join(parts)


def _safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+]", "-", text)


def _unique(cells: list[Cell], fault) -> None:
    names: dict[str, Cell] = {}
    values: dict[bytes, Cell] = {}
    for cell in cells:
        same = canonical({key: number_of(value) for key, value in cell.values.items()})
        if other := names.get(cell.name):
            fault("", f"two cells have one name '{cell.name}': {_say(other.texts)} and {_say(cell.texts)}")
        elif other := values.get(same):
            fault("", f"two cells are equal: {_say(other.texts)} and {_say(cell.texts)}")
        names.setdefault(cell.name, cell)
        values.setdefault(same, cell)


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _spelling(file: Path) -> dict[str, Any]:
    """How the file spells each axis' values, and under `include.<i>` those of each cell (`1e-5`, not `1e-05`)."""
    import tomlkit

    if file.suffix != ".toml":
        return {}
    table = tomlkit.parse(file.read_text(encoding="utf-8-sig"))["experiment"]["grid"]
    found: dict[str, Any] = {}

    def walk(key: str, item: Any) -> None:
        if isinstance(item, dict):
            for name, inner in item.items():
                walk(f"{key}.{name}", inner)
        elif isinstance(item, list):
            found[key.replace("-", "_")] = [_leaf(value) for value in item]

    for key, item in table.items():
        if key == "include" and isinstance(item, list):
            found |= {f"include.{i}": {name: _leaf(v) for name, v in row.items()} for i, row in enumerate(item)}
        else:
            walk(str(key), item)
    return found


def _leaf(item: Any) -> str:
    if isinstance(item, str) or not hasattr(item, "as_string"):
        return _plain(item)
    return item.as_string().strip()
