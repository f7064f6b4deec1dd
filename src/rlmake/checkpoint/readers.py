"""Marks that say "this checkpoint is being read", so that retention leaves it alone."""

import errno
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlmake.build.lease import machine
from rlmake.core.errors import UserError
from rlmake.core.jsonio import read_json, write_json
from rlmake.core.procs import Process, process

# A reader on another machine cannot be asked whether it lives; its mark counts for this long.
REMOTE_LIFETIME_S = 2 * 3600.0


@contextmanager
def reading(folder: Path) -> Iterator[Path]:
    """Hold a mark `reading-<uuid>.json` in a step's folder while the block runs.

    A folder that cannot be written to (a read-only store, a full disk) is read without a mark.
    """
    own = process(os.getpid())
    mark = folder / f"reading-{uuid.uuid4().hex}.json"
    if not folder.is_dir():
        raise UserError(f"{folder}: no such checkpoint")
    try:
        write_json(mark, {"schema": 1, "machine": machine(), "pid": own.pid, "started": own.started})
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT):
            raise
    try:
        yield folder
    finally:
        mark.unlink(missing_ok=True)


def is_mark(path: Path) -> bool:
    """Whether a file in a step's folder is a reader's mark, which comes and goes and is no part of the checkpoint."""
    return path.match("reading-*.json")


def is_read(folder: Path) -> bool:
    """Whether a living reader holds a mark; marks of dead ones are removed."""
    held = False
    for mark in folder.glob("reading-*.json"):
        if _alive(mark):
            held = True
        else:
            mark.unlink(missing_ok=True)
    return held


def _alive(mark: Path) -> bool:
    try:
        record = read_json(mark)
        where, reader = record["machine"], Process(int(record["pid"]), int(record["started"]))
    except (UserError, KeyError, TypeError, ValueError):
        return False
    if where == machine():
        return reader.alive()
    try:
        return time.time() - mark.stat().st_mtime < REMOTE_LIFETIME_S
    except FileNotFoundError:
        return False
