"""From raw dictionaries and command lines to validated configurations; all faults at once, one line each."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_config import ConfigFileError, cli

from rlmake.config import unbuilt
from rlmake.config.describe import help_text
from rlmake.config.experiment import GridTable, check_direct
from rlmake.config.faults import of_validation, of_values, placed, surplus
from rlmake.config.fields import Config, element_tables, tables
from rlmake.config.grid import expand, pick
from rlmake.config.layers import COMMAND_LINE, Composed, load_layer, nest, overlay, set_key
from rlmake.config.spread import SPREAD, SharingConfig
from rlmake.core.errors import ConfigError, Fault
from rlmake.core.jsonio import plain_copy, read_json

C = TypeVar("C", bound=Config)


def parse(cls: type[C], raw: dict[str, Any], file: Path | str | None = None) -> C:
    """Validate a raw configuration. Raises `ConfigError` with every fault; `file` is named where the raw
    configuration does not remember a file itself."""
    data = plain_copy(dict(raw))
    faults = unbuilt.faults(cls.entry, data)
    filled: dict[str, str] = {}
    context = None
    if issubclass(cls, SharingConfig):
        spreader = cls.spread(data)
        faults, filled, context = faults + spreader.faults, spreader.filled, SPREAD
    config = None
    try:
        config = cls.model_validate(plain_copy(data), context=context)
    except ValidationError as error:
        unknown = {tuple(filled.get(key, key).split(".")) for key in surplus(error, cls, data)}
        if isinstance(raw, Composed) and (gone := unknown & raw.left):
            return parse(cls, raw.without(gone), file)
        refused = tuple(fault.key for fault in faults)
        for fault in of_validation(error, cls, data):
            key = filled.get(fault.key or "", fault.key or "")
            if not any(key == one or key.startswith(f"{one}.") for one in refused):
                faults.append(replace(fault, key=key))
    if config is not None and not faults:
        faults += [*unbuilt.faults_of(config), *of_values(data)]
    if faults or config is None:
        raise ConfigError(placed(faults, raw, str(file) if file else None))
    return config


def load_resolved(cls: type[C], path: Path | str) -> C:
    """A configuration that was dumped as JSON."""
    data = read_json(path)
    if not isinstance(data, dict):
        raise ConfigError(Fault("expected a table at the top", file=str(path)))
    return parse(cls, data, path)


def parse_argv(cls: type[C], argv: list[str], prog: str | None = None) -> tuple[C, list[Path]]:
    """`@ a.toml @ b.toml --trainer @ t.toml --a.b v --no-x`: the configuration and the files it was read from.

    `--help` prints the options and leaves with `SystemExit(0)`. Raises `ConfigError`.
    """
    flags, layers = _split_files(argv)
    flags, cell = _split_cell(flags)
    if "-h" in flags or "--help" in flags:
        sys.stdout.write(help_text(cls, prog or cls.entry or "rlmake"))
        sys.exit(0)
    raw, files = Composed(), []
    for prefix, file in layers:
        layer, experiment = load_layer(file)
        grid = check_direct(experiment, cls.entry, file)
        if grid is not None:
            _choose(layer, grid, cell, file)
            cell = None
        overlay(raw, _prefixed(layer, prefix), str(file))
        files.append(Path(file))
    if cell is not None:
        raise ConfigError(Fault("no file given declares a grid", "--cell", COMMAND_LINE))
    overlay(raw, _flags(cls, flags), COMMAND_LINE)
    return parse(cls, raw, files[0] if len(files) == 1 else COMMAND_LINE), files


def _prefixed(layer: Composed, prefix: str | None) -> Composed:
    if prefix is None:
        return layer
    parts = tuple(prefix.replace("-", "_").split("."))
    origins = {(*parts, *key): file for key, file in layer.origins.items()}
    return Composed(nest(prefix, dict(layer)), origins, {(*parts, *key) for key in layer.left})


def _split_files(argv: list[str]) -> tuple[list[str], list[tuple[str | None, str]]]:
    """`(flags, [(key or None, file)])`: takes `@ file` and `--key @ file` out of a command line."""
    flags: list[str] = []
    layers: list[tuple[str | None, str]] = []
    tokens = iter(argv)
    for token in tokens:
        if token != "@":
            if token.startswith("@") and (not flags or not flags[-1].startswith("--")):
                raise ConfigError(Fault(f"'{token}': write '@ {token[1:]}', with a space", file=COMMAND_LINE))
            flags.append(token)
            continue
        file = next(tokens, None)
        if file is None or file.startswith("--"):
            raise ConfigError(Fault("'@' needs a file after it", file=COMMAND_LINE))
        prefix = flags.pop()[2:] if flags and flags[-1].startswith("--") and "=" not in flags[-1] else None
        layers.append((prefix, file))
    return flags, layers


def _split_cell(flags: list[str]) -> tuple[list[str], str | None]:
    """`(other flags, cell)`: takes `--cell NAME` out of a command line."""
    rest: list[str] = []
    cell: str | None = None
    tokens = iter(flags)
    for token in tokens:
        if token == "--cell" or token.startswith("--cell="):
            cell = token.partition("=")[2] if "=" in token else next(tokens, None)
            if not cell:
                raise ConfigError(Fault("needs the name of a cell, such as lr=1e-5,seed=0", "--cell", COMMAND_LINE))
        else:
            rest.append(token)
    return rest, cell


def _choose(layer: Composed, table: GridTable, cell: str | None, file: str) -> None:
    """Set a cell's values in the configuration of a grid's file."""
    faults: list[Fault] = []
    cells = expand(table, Path(file), faults)
    if faults:
        raise ConfigError(faults)
    if cell is None:
        names = " ".join(one.name for one in cells)
        fault = Fault(f"declares a grid, choose a run of it by --cell: {names}", "experiment.grid")
        raise ConfigError(placed([fault], {}, file))
    for key, value in pick(cells, cell, Path(file)).values.items():
        set_key(layer, key, value, file)


class _Captured(Exception):
    def __init__(self, data: dict[str, Any]):
        self.data = data


def _flags(cls: type[Config], flags: list[str]) -> dict[str, Any]:
    """The overrides that the flags spell, by the rules of prime-pydantic-config."""

    class Schema:
        """The fields of the configuration; validating them hands over what the flags said."""

        model_fields = cls.model_fields

        @classmethod
        def model_validate(cls, data: dict[str, Any]) -> None:
            raise _Captured(data)

    if not flags:
        return {}
    try:
        cli(Schema, args=list(flags))
    except _Captured as captured:
        return _typed(cls, captured.data)
    except ConfigFileError as error:
        if stray := _stray(cls, error.message):
            raise ConfigError(Fault(stray, file=COMMAND_LINE)) from None
        raise ConfigError(Fault(" ".join(error.message.split()), file=COMMAND_LINE)) from None
    except json.JSONDecodeError as error:
        raise ConfigError(Fault(f"not readable as JSON: {error.doc!r}: {error.msg}", file=COMMAND_LINE)) from None
    raise AssertionError("cli() validates the schema that it is given")


def _stray(cls: type[Config], message: str) -> str | None:
    """What is wrong about a word that is no option and no option's value; None where the fault is another."""
    head, _, words = message.partition(": ")
    if head != "Unrecognized arguments" or not words:
        return None
    if not words.startswith("-"):
        return f"'{words}' belongs to no option; files are given as '@ {words}'"
    option = words.split()[0]
    inner: list[type[BaseModel]] = [cls]
    for part in option[2:].replace("-", "_").split("."):
        infos = [table.model_fields[part] for table in inner if part in table.model_fields]
        inner = [table for info in infos for table in tables(info.annotation)]
    if not inner:
        return None
    key = next(iter(inner[0].model_fields)).replace("_", "-")
    return f"{option} is a table: set its keys ({option}.{key} …) or give a file ({option} @ file.toml)"


def _typed(table: type[BaseModel], data: dict[str, Any]) -> dict[str, Any]:
    """Values below free tables (`kwargs`, `env`, …) have no field to tell their type: they are read as JSON."""
    for key, value in data.items():
        info = table.model_fields.get(key)
        if info is None or not isinstance(value, dict):
            continue
        inner, elements = tables(info.annotation), element_tables(info.annotation)
        if inner:
            for one in inner:
                _typed(one, value)
        elif elements:
            for item in value.values():
                for one in elements:
                    if isinstance(item, dict):
                        _typed(one, item)
        elif "Any" in str(info.annotation):
            data[key] = _literal(value)
    return data


def _literal(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _literal(item) for key, item in value.items()}
    if isinstance(value, str):
        try:
            return json.loads(value.lower() if value in ("True", "False") else value)
        except ValueError:
            return value
    return value
