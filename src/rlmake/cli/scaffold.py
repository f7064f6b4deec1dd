"""`rlmake new`: an experiment file to begin with, from a template or another experiment, comments kept."""

import json
import os
import re
import tomllib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

from rlmake.build import names
from rlmake.build.experiments import FOLDER, SUITES
from rlmake.build.registry import Registry
from rlmake.config.layers import keys_by_line
from rlmake.core.arguments import ArgumentParser
from rlmake.core.errors import ConfigError, Fault, UserError, nearest

TEMPLATES = ("rl", "sft", "data", "init", "import", "suite")


def new(argv: list[str]) -> int:
    """Write an experiment file to begin with: from a template, or from another experiment with its comments."""
    parser = ArgumentParser(prog="rlmake new", description=new.__doc__)
    parser.add_argument("name", help="the run's name: experiments/<name>.toml; a suite's: evals/<name>")
    parser.add_argument("--template", help=f"{', '.join(TEMPLATES)} (default: rl; suite below evals/)")
    parser.add_argument("--from", dest="source", metavar="RUN", help="an experiment to copy instead")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change a key; VALUE as in TOML"
    )
    args = parser.parse_args(argv)
    name = args.name.removesuffix(".toml").removeprefix(f"{FOLDER}/")
    file = FOLDER / f"{name}.toml"
    _check_place(args.name, name, file)
    if args.template not in (None, *TEMPLATES):
        hint = f"{nearest(args.template, TEMPLATES)}; there are {', '.join(TEMPLATES)}"
        raise UserError(f"--template {args.template}: no such template{hint}")
    if args.source and args.template:
        raise UserError("give either --from or --template")
    suite = file.is_relative_to(SUITES)
    template = args.template or ("suite" if suite else "rl")
    if not args.source and suite != (template == "suite"):
        where = f"a suite lies below {SUITES}/: rlmake new evals/{name} --template suite"
        raise UserError(f"{args.name}: {f'below {SUITES}/ lie suites only' if suite else where}")
    text = _copied(args.source, file) if args.source else _template(template, file)
    for setting in args.set:
        text = edited(text, setting)
    registry = _write(file, text)
    print(f"{file}: written; look at it" + ("" if suite else f", then: rlmake plan {_target(registry, name)}"))
    return 0


def _check_place(given: str, name: str, file: Path) -> None:
    suite = file.is_relative_to(SUITES)
    if fault := names.fault_of_run(name.removeprefix("evals/") if suite else name):
        raise UserError(f"{given}: {fault}")
    if file.exists():
        raise UserError(f"{file}: there already")
    for parent in list(file.relative_to(FOLDER).parents)[:-1]:
        if (outer := FOLDER / parent.with_name(f"{parent.name}.toml")).is_file():
            raise UserError(f"{given}: would lie inside {outer}, which is an experiment itself")


def _write(file: Path, text: str) -> Registry | None:
    """Write the file and read it as a plan will; one that would stop every plan of the project is taken back.

    Returns what the project declares now, None where other files are at fault.
    """
    made = [folder for folder in file.parents if not folder.exists()]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
    try:
        return Registry.load()
    except ConfigError as error:
        mine = file.as_posix().removesuffix(".toml")
        faults = [
            fault
            for fault in error.faults
            if mine in ((fault.file or "").partition(".toml")[0], (fault.via or "").partition(".toml")[0])
        ]
        if not faults:
            return None
        file.unlink()
        for folder in made:
            folder.rmdir()
        key = next((fault.key for fault in faults if fault.key and not fault.message.startswith("unknown key")), None)
        hint = f"; give --set {key}=VALUE" if key else ""
        refused = Fault(f"was not written: no plan would work with it{hint}", file=str(file))
        raise ConfigError([*faults, refused]) from None


def _target(registry: Registry | None, name: str) -> str:
    """What a plan can be asked for of the run or grid that a file declares."""
    if registry and name in registry.runs:
        return f"{names.OUTPUTS}/{name}/{'data' if registry.runs[name].stage == 'data' else 'weights'}"
    return f"{names.OUTPUTS}/{name}/" + ("report.html" if registry and name in registry.grids else "…")


def _template(template: str, file: Path) -> str:
    text = resources.files("rlmake.cli").joinpath("templates", f"{template}.toml").read_text(encoding="utf-8")
    return text.replace("{base}", f"{os.path.relpath(FOLDER / 'base', file.parent)}/")


def _copied(source: str, file: Path) -> str:
    """Another experiment's text; what it extends is named from the new place."""
    import tomlkit

    origin = FOLDER / f"{source.removesuffix('.toml').removeprefix(f'{FOLDER}/')}.toml"
    if not origin.is_file():
        known = [path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.toml")]
        raise UserError(f"{origin}: no such file{nearest(source, known)}")
    if origin.is_relative_to(SUITES) != file.is_relative_to(SUITES):
        raise UserError(
            f"{file}: {origin} is {'a' if origin.is_relative_to(SUITES) else 'no'} suite; suites lie below {SUITES}/"
        )
    document = tomlkit.parse(origin.read_text(encoding="utf-8-sig"))
    table = document.get("experiment", {})
    extends = table.get("extends")
    if isinstance(extends, str):
        table["extends"] = os.path.relpath(origin.parent / extends, file.parent)
    elif extends is not None:
        for index, one in enumerate(extends):
            extends[index] = os.path.relpath(origin.parent / one, file.parent)
    return tomlkit.dumps(document).lstrip("\n")


def edited(text: str, setting: str) -> str:
    """A TOML text with one key set (`KEY=VALUE`), comments and all else as they were.

    `source.0.env.id` is a key of the first of `[[source]]`. Raises `UserError`.
    """
    key, equals, value = setting.partition("=")
    parts = tuple(key.strip().replace("-", "_").split("."))
    if not equals or not all(parts):
        raise UserError(f"--set {setting}: expected KEY=VALUE")
    try:
        item = tomllib.loads(f"x = {value}")["x"]
    except tomllib.TOMLDecodeError:  # a text without its quotes
        value = json.dumps(value, ensure_ascii=False)
        item = value[1:-1] if "\\" not in value else json.loads(value)
    wanted = tomllib.loads(text)
    there = _put(wanted, parts, item, f"--set {key.strip()}")
    for changed in _replaced(text, there, value) if there else _inserted(text, parts, value):
        try:
            if tomllib.loads(changed) == wanted:
                return changed
        except tomllib.TOMLDecodeError:
            continue
    raise UserError(f"--set {key.strip()}: found no place for it, put it into the file by hand")


def _put(node: Any, parts: tuple[str, ...], item: Any, said: str) -> tuple[Any, ...] | None:
    """Set a key in plain tables. Returns its path where it was there: a quoted key may hold dots."""
    path: list[Any] = []
    while True:
        if isinstance(node, list):
            if not parts[0].isdigit() or int(parts[0]) >= len(node):
                raise UserError(
                    f"{said}: {'.'.join(map(str, path))} is a list of {len(node)}, there is no {parts[0]} in it"
                )
            length, name = 1, int(parts[0])
        elif isinstance(node, dict):
            length = next((n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in node), 0)
            name = ".".join(parts[: length or 1])
        else:
            raise UserError(f"{said}: {'.'.join(map(str, path))} is no table there")
        path.append(name)
        parts = parts[length or 1 :]
        if not length:
            for part in reversed(parts):
                item = {part: item}
            node[name] = item
            return None
        if not parts:
            if isinstance(node[name], dict) != isinstance(item, dict):
                raise UserError(f"{said}: {'is a table' if isinstance(node[name], dict) else 'is no table'} there")
            node[name] = item
            return tuple(path)
        node = node[name]


def _replaced(text: str, path: tuple[Any, ...], value: str) -> Iterator[str]:
    import tomlkit

    document = tomlkit.parse(text)
    node: Any = document
    for part in path[:-1]:
        node = node[part]
    item = tomlkit.parse(f"x = {value}")["x"]
    comment = getattr(node[path[-1]], "trivia", None)
    node[path[-1]] = item
    if comment is not None and comment.comment and not node[path[-1]].trivia.comment:
        node[path[-1]].comment(comment.comment.lstrip("# "))
    yield tomlkit.dumps(document)


def _inserted(text: str, parts: tuple[str, ...], value: str) -> Iterator[str]:
    """The text with a new key below the nearest table that has a header of its own, then below those around it."""
    lines = text.splitlines()
    known = keys_by_line(lines)
    headers = [(number, path) for number, path in known if lines[number - 1].lstrip().startswith("[")]
    starts = [number for number, _ in headers]
    around = [(number, path) for number, path in headers if path == parts[: len(path)] and len(path) < len(parts)]
    for number, path in [*sorted(around, key=lambda one: -len(one[1])), (0, ())]:
        end = next((start - 1 for start in starts if start > number), len(lines))
        while end > number and re.match(r"\s*(#.*)?$", lines[end - 1]):
            end -= 1
        line = f"{'.'.join(parts[len(path) :])} = {value}"
        yield "\n".join([*lines[:end], line, *lines[end:]]) + "\n"
