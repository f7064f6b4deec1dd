"""Local files that a configuration points at: one rule for what the build plans and for what is started directly."""

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rlmake.build import names
from rlmake.core.errors import shown

POINTS_AT = re.compile(r"(^|\.)((?P<model>model\.name|vllm\.model)|(?P<data>data\.name)|env\..*\.path)$")
LOCAL = re.compile(r"^[./~]|/.*/|\.(jsonl|json|parquet|arrow|csv|txt)$")  # no hub id looks like this


def fault(key: str, value: str) -> str | None:
    """Why the local file or model directory that `value` names cannot be used; None where it can, or is none."""
    if names.is_output(value) or not (match := POINTS_AT.search(key)):
        return None
    if not value and (match["model"] or match["data"]):
        return f"is empty; expected a {'model directory' if match['model'] else 'file or a folder of data'} or a hub id"
    try:
        path = Path(value).expanduser()
        if path.is_symlink() and not path.exists():
            return f"{value}: a link that leads nowhere"
        if LOCAL.search(value) and not path.exists():
            return f"{value}: no such file or directory"
        if match["model"] and path.is_dir() and not (path / "config.json").is_file():
            return f"{value}: not a model directory, it has no config.json"
        if match["model"] and path.is_file():
            return f"{value}: a file; expected a model directory"
        if match["data"] and path.is_dir() and next(path.iterdir(), None) is None:
            return f"{value}: an empty folder"
        if path.exists() and not os.access(path, os.R_OK):
            return f"{value}: may not be read"
    except (OSError, ValueError, RuntimeError) as error:  # a name too long, a null byte, an unknown user's home
        return f"{shown(value)}: {getattr(error, 'strerror', None) or error}"
    return None


def shortest(faults: Iterable[tuple[str, str]]) -> dict[str, str]:
    """`{what: its shortest key}` of `(key, what)`: the key given at the root rather than those it has filled."""
    found: dict[str, str] = {}
    for key, what in faults:
        found[what] = min(found.get(what, key), key, key=lambda k: k.count("."))
    return found


def strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """`(dotted key, text)` of every text in a configuration."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict | list):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from strings(item, f"{key}.{name}" if key else str(name))
