"""What a start needs on this machine, looked at before anything heavy is imported: models, data, tasks."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlmake.build import names
from rlmake.config import dump
from rlmake.config.fields import Config
from rlmake.core.errors import ConfigError, Fault

POINTS_AT = re.compile(r"(^|\.)((?P<model>model\.name|vllm\.model)|data\.name|env\..*\.path)$")
LOCAL = re.compile(r"^[./~]|/.*/|\.(jsonl|json|parquet|arrow|csv|txt)$")  # no hub id looks like this


def check_inputs(cfg: Config, files: Sequence[Path], built: bool = True) -> None:
    """What a configuration names on this machine must be there and readable. Raises `ConfigError`.

    `built`: also what is a target of the build, which a direct start doesn't make.
    """
    where = str(files[0]) if len(files) == 1 else None
    missing: dict[str, str] = {}  # value -> its shortest key: the one given at the root rather than where it went
    for key, value in _strings(dump(cfg)) if built else ():
        if names.is_output(value) and not key.startswith(("run.", "output_dir")) and not Path(value).exists():
            missing[value] = min(missing.get(value, key), key, key=lambda k: k.count("."))
    text = "{} is not built yet; build it with: snakemake -c all {}"
    faults = [Fault(text.format(value, _target_of(value)), key, where) for value, key in missing.items()]
    faults += [Fault(fault, key, where) for fault, key in _local_faults(cfg).items()]
    if faults:
        raise ConfigError(faults)


def _local_faults(cfg: Config) -> dict[str, str]:
    """`{fault: its shortest key}` of local files and model directories that a start would only trip over."""
    found: dict[str, str] = {}
    for key, value in _strings(dump(cfg)):
        if names.is_output(value) or not (match := POINTS_AT.search(key)):
            continue
        path, fault = Path(value).expanduser(), None
        if LOCAL.search(value) and not path.exists():
            fault = f"{value}: no such file or directory"
        elif match["model"] and path.is_dir() and not (path / "config.json").is_file():
            fault = f"{value}: not a model directory, it has no config.json"
        elif path.exists() and not os.access(path, os.R_OK):
            fault = f"{value}: may not be read"
        if fault:
            found[fault] = min(found.get(fault, key), key, key=lambda k: k.count("."))
    return found


def _target_of(value: str) -> str:
    """The target in a path below it: `outputs/x/data/train.jsonl` is a file of `outputs/x/data`."""
    parts = value.split("/")
    stop = next((i for i, part in enumerate(parts[1:], 1) if part in names.RESERVED), len(parts) - 1)
    return "/".join(parts[: stop + 1]) if parts[stop] in ("data", "weights") else value


def _strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict | list):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _strings(item, f"{key}.{name}" if key else str(name))
