"""Terminal failures: a run that diverged stays so until its configuration changes or a retry is asked for.

outputs/.store/train-<fingerprint>/failure.json    {schema, reason, step, message, at}
"""

import os
import time
from pathlib import Path
from typing import Any

import msgspec

from rlmake.core.errors import UserError
from rlmake.core.jsonio import read_record, write_json

SCHEMA = 1
NAME = "failure.json"


class _Failure(msgspec.Struct):
    reason: str
    message: str
    step: int | None = None


def record(folder: Path, reason: str, message: str, step: int | None = None) -> None:
    """Note that the work in `folder` is not to be tried again."""
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    write_json(folder / NAME, {"schema": SCHEMA, "reason": reason, "step": step, "message": message, "at": at})


def read(folder: Path) -> dict[str, Any] | None:
    """The failure noted in `folder`, None when there is none."""
    path = f"{folder}/{NAME}"
    if not os.path.isfile(path):
        return None
    try:
        return read_record(path, _Failure, SCHEMA)
    except UserError as error:  # that it failed is certain
        return {"schema": SCHEMA, "reason": "failed", "step": None, "message": str(error)}


def describe(failure: dict[str, Any]) -> str:
    """In words, e.g. `diverged at step 12: loss is nan`."""
    step = f" at step {failure['step']}" if failure.get("step") is not None else ""
    return f"{failure['reason']}{step}: {failure['message']}"


def forgive(folder: Path) -> None:
    """Put the record aside, so that the work is tried again; it stays as `failure-<time>.json`."""
    path = folder / NAME
    if path.is_file():
        os.replace(path, folder / f"failure-{time.time_ns()}.json")
