"""Configuration files: reading, `extends`, layering, and the memory of which file said what.

Layers are merged from left to right: tables key by key, everything else (lists too) replaced. `"None"` is the null of
TOML. `[experiment]` belongs to the build; its `extends` names files to compose below the file, relative to it.
"""

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tomli

from rlmake.core.errors import ConfigError, Fault, nearest
from rlmake.core.jsonio import plain_copy

COMMAND_LINE = "command line"
SUFFIXES = (".toml", ".yaml", ".yml", ".json")
Origins = dict[tuple[str, ...], str]


class Composed(dict):
    """A composed raw configuration that remembers for each value (by its path of keys) the file that gave it.

    `left`: the paths of keys that were set beside another `type` of their table than a later layer has chosen. Those
    that the new type lacks count no more.
    """

    def __init__(
        self,
        data: dict[str, Any] | None = None,
        origins: Origins | None = None,
        left: Iterable[tuple[str, ...]] = (),
    ):
        super().__init__(data or {})
        self.origins: Origins = dict(origins or {})
        self.left = set(left)

    def origin(self, path: Iterable[str]) -> str | None:
        """The file that gave the value at `path`, or else that of the nearest table above or below it."""
        parts = tuple(str(part) for part in path)
        for length in range(len(parts), 0, -1):
            if found := self.origins.get(parts[:length]):
                return found
        below = {file for key, file in self.origins.items() if key[: len(parts)] == parts}
        return below.pop() if len(below) == 1 else None

    def copy(self) -> "Composed":
        return Composed(plain_copy(dict(self)), self.origins, self.left)

    def without(self, paths: Iterable[tuple[str, ...]]) -> "Composed":
        """A copy without the values at these paths."""
        found = self.copy()
        for path in paths:
            node: Any = found
            for part in path[:-1]:
                node = node[int(part)] if isinstance(node, list) else node[part]
            del node[path[-1]]
            found.left.discard(path)
        return found


def read_file(path: Path | str) -> dict[str, Any]:
    """The raw content of one file. Raises `ConfigError` that names the file."""
    name = str(path)
    suffix = os.path.splitext(name)[1]
    if suffix not in SUFFIXES:
        raise ConfigError(Fault(f"expected a file ending in {', '.join(SUFFIXES)}", file=name))
    if not os.path.isfile(name):
        there = "leads nowhere, or in a circle" if os.path.islink(name) else "no such file"
        raise ConfigError(Fault("is not a file" if os.path.exists(name) else there, file=name))
    try:
        with open(name, "rb") as file:
            text = file.read()
        if suffix == ".toml":
            data = tomli.loads(text.decode("utf-8-sig"))
        elif suffix == ".json":
            data = json.loads(text, object_pairs_hook=_once)
        else:
            data = _read_yaml(text)
    except tomli.TOMLDecodeError as error:
        raise ConfigError(Fault(f"not readable as TOML: {error}", file=name)) from None
    except OSError as error:
        raise ConfigError(Fault(f"cannot be read: {error.strerror}", file=name)) from None
    except ModuleNotFoundError:
        raise ConfigError(Fault("YAML needs the package pyyaml", file=name)) from None
    except Exception as error:
        message = " ".join(str(error).split())
        raise ConfigError(Fault(f"not readable as {suffix[1:].upper()}: {message}", file=name)) from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(Fault(f"expected a table at the top, not {type(data).__name__}", file=name))
    return data


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A table of JSON; a key that stands twice in it is refused, as TOML does."""
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key '{next(name for name in names if names.count(name) > 1)}' stands twice in one table")
    return table


def _read_yaml(text: bytes) -> Any:
    """One document of YAML; a key that stands twice in a table is refused. What `<<` merges in may be overridden."""
    import yaml

    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        nodes, seen = [root], set()
        while nodes:
            node = nodes.pop()
            if id(node) in seen or not isinstance(node, yaml.CollectionNode):
                continue
            seen.add(id(node))
            if isinstance(node, yaml.SequenceNode):
                nodes += node.value
                continue
            names: set[tuple[str, Any]] = set()
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in names:
                    line = key.start_mark.line + 1
                    raise ValueError(f"key '{key.value}' stands twice in one table (line {line})")
                names.add((key.tag, key.value if isinstance(key, yaml.ScalarNode) else id(key)))
                nodes.append(value)
        return loader.construct_document(root)
    finally:
        loader.dispose()


def _is_null(value: Any) -> bool:
    return value is None or value == "None"


def _indices(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(isinstance(key, str) and key.isdigit() for key in value)


def overlay(base: Composed, layer: dict[str, Any], file: str, path: tuple[str, ...] = ()) -> None:
    """Merge `layer`, which `file` gave, over `base` in place.

    Raises `ConfigError` where one of them has a table and the other has not: an override would be dropped unseen.
    """
    origins = layer.origins if isinstance(layer, Composed) else None
    faults: list[Fault] = []
    _merge(base, base, layer, file, path, origins, faults)
    if isinstance(layer, Composed):
        base.left |= {(*path, *key) for key in layer.left}
    if faults:
        raise ConfigError(faults)


def _merge(base, node, layer, file, path, origins, faults) -> None:
    for key, value in layer.items():
        here = (*path, str(key))
        source = (origins or {}).get(here, file)
        old = node.get(key)
        if isinstance(value, dict):
            if isinstance(old, list) and _indices(value):
                _merge_items(base, old, value, file, here, origins, faults)
                continue
            if key in node and not isinstance(old, dict) and not _is_null(old):
                kind = "a list" if isinstance(old, list) else repr(old)
                other = base.origin(here) or file
                faults.append(Fault(f"expected a table, not {kind}: {file} sets keys below it", ".".join(here), other))
                continue
            if not isinstance(old, dict):
                node[key] = {}
            elif isinstance(value.get("type"), str) and value["type"] != old.get("type"):
                base.left |= {(*here, str(name)) for name in old if name != "type"}
            base.origins[here] = source
            base.left.discard(here)
            _merge(base, node[key], value, file, here, origins, faults)
            continue
        if isinstance(old, dict) and old and not _is_null(value):
            faults.append(Fault(f"expected a table, not {value!r}", ".".join(here), source))
            continue
        if isinstance(old, dict | list):
            for known in [known for known in base.origins if known[: len(here)] == here]:
                del base.origins[known]
        node[key] = plain_copy(value)
        base.origins[here] = source
        base.left.discard(here)


def _merge_items(base, items, value, file, path, origins, faults) -> None:
    """`source.0.env.id = x` on a command line changes one element of a list."""
    for index, item in value.items():
        number, here = int(index), (*path, index)
        if number > len(items):
            faults.append(Fault(f"there is no element {number}: the list has {len(items)}", ".".join(here), file))
            continue
        if number == len(items):
            items.append({} if isinstance(item, dict) else item)
        if isinstance(item, dict) and isinstance(items[number], dict):
            _merge(base, items[number], item, file, here, origins, faults)
        else:
            items[number] = item
            base.origins[here] = file


def nest(dotted: str, value: Any) -> dict[str, Any]:
    """`{"a": {"b": value}}` of `a.b`; dashes of the command line become underscores."""
    for part in reversed(dotted.replace("-", "_").split(".")):
        value = {part: value}
    return value


def set_key(raw: Composed, dotted: str, value: Any, file: str) -> None:
    """Set one dotted key, as a grid's cell does; `file` is named in faults about it."""
    overlay(raw, nest(dotted, value), file)


def load_layer(
    path: Path | str, fragments: dict[str, Composed] | None = None, chain: tuple[str, ...] = ()
) -> tuple[Composed, dict[str, Any]]:
    """`(file composed over what it extends, its own [experiment] table)`; the table is not in the first.

    `fragments` keeps what files extend from by its path, so that a project's files read one after the other compose it
    once.
    """
    path, fragments = str(path), {} if fragments is None else fragments
    if chain:
        reals = list(map(os.path.realpath, (*chain, path)))
        if reals[-1] in reals[:-1]:
            names = " → ".join(map(os.path.basename, reals[reals.index(reals[-1]) :]))
            raise ConfigError(Fault(f"extends itself: {names}", "experiment.extends", chain[-1]))
    data = read_file(path)
    experiment = data.pop("experiment", {})
    if not isinstance(experiment, dict):
        raise ConfigError(Fault(f"expected a table, not {experiment!r}", "experiment", path))
    extends = experiment.get("extends", [])
    extends = [extends] if isinstance(extends, str) else extends
    if not isinstance(extends, list) or not all(isinstance(item, str) for item in extends):
        raise ConfigError(Fault("expected a file or a list of files", "experiment.extends", path))
    composed = Composed()
    for item in extends:
        below = _place(os.path.join(os.path.dirname(path), item))
        if below not in fragments:
            if not os.path.isfile(below):
                near = nearest(Path(below).stem, _siblings(below))
                raise ConfigError(Fault(f"no such file: {item} ({below}){near}", "experiment.extends", path))
            fragments[below], _ = load_layer(below, fragments, (*chain, path))
        overlay(composed, fragments[below], below)
    overlay(composed, data, path)
    return composed, experiment


def _siblings(path: str) -> list[str]:
    """Files of the same kind in the folder of a path, without their suffix."""
    return [file.stem for file in Path(path).parent.glob(f"*{Path(path).suffix}")]


def _place(path: str) -> str:
    """A path without detours (`t/../base`), where that is the same file: a folder in it may be a link."""
    short = os.path.normpath(path)
    try:
        return short if short == path or os.path.samefile(short, path) else path
    except OSError:
        return path if os.path.lexists(path) else short


def compose(files: Iterable[Path | str]) -> Composed:
    """Files composed from left to right, each over what it extends; `[experiment]` tables are left out."""
    composed = Composed()
    for file in files:
        layer, _ = load_layer(file)
        overlay(composed, layer, str(file))
    return composed


def line_of(file: str | None, path: Iterable[str]) -> int | None:
    """The line of a TOML file on which the key at `path` (or the nearest table above it) stands; for messages."""
    if not file or not file.endswith(".toml"):
        return None
    try:
        lines = Path(file).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    wanted = tuple(str(part) for part in path)
    keys = keys_by_line(lines)
    axis = ("experiment", "grid", *wanted)  # its values win over the file's own
    exact = next((number for number, key in keys if key == axis), None)
    exact = exact or next((number for number, key in keys if key == wanted), None)
    for prefix in (axis, wanted):  # a table that stands there by its keys alone: `optim.lr = 1`
        exact = exact or next((number for number, key in keys if key[: len(prefix)] == prefix), None)
    if exact:
        return exact
    lengths = {number: len(key) for number, key in keys if key == wanted[: len(key)]}
    if lengths:
        return max(lengths, key=lambda number: (lengths[number], -number))
    # The file of `--trainer @ t.toml` knows nothing of the key it was put below.
    tails = [wanted[start:] for start in range(1, len(wanted))]
    return next((number for tail in tails for number, key in keys if key == tail), None)


def keys_by_line(lines: list[str]) -> list[tuple[int, tuple[str, ...]]]:
    """`(line number, path of keys)` of every table header and every `key = …` of a TOML file."""
    found, table = [], ()
    counts: dict[tuple[str, ...], int] = {}
    for number, line in enumerate(lines, 1):
        if match := re.match(r"\s*\[\[?([^\[\]]+)\]\]?\s*(#.*)?$", line):
            table = _with_indices(_split(match[1]), counts, is_array=line.lstrip().startswith("[["))
            found.append((number, table))
        elif match := re.match(r"\s*([A-Za-z0-9_\-.\"' ]+?)\s*=", line):
            found.append((number, (*table, *_split(match[1]))))
    return found


def _split(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))


def _with_indices(table: tuple[str, ...], counts: dict[tuple[str, ...], int], *, is_array: bool) -> tuple[str, ...]:
    """A table header's path with the positions in arrays of tables: `a.b` → `a.0.b`."""
    out: tuple[str, ...] = ()
    for position, part in enumerate(table):
        out = (*out, part)
        if is_array and position == len(table) - 1:
            counts[out] = counts.get(out, -1) + 1
        if out in counts:
            out = (*out, str(counts[out]))
    return out
