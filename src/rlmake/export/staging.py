"""A directory that appears whole or not at all: filled under a temporary name, synced, then renamed."""

import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlmake.checkpoint import abort, disk_full
from rlmake.core.errors import RunFailed
from rlmake.core.jsonio import fsync_dir

LOCK = ".lock"


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """Yield `<out>.tmp-<uuid>` to fill; it becomes `out` when the block ends without an error, else it is removed.

    What a killed export left beside `out` is removed at the start: its writer's lock is gone with it.
    An `out` that is there already is replaced.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    restore(out)
    _sweep(out)
    temporary = out.with_name(f"{out.name}.tmp-{uuid.uuid4().hex}")
    temporary.mkdir()
    with open(temporary / LOCK, "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield temporary
            (temporary / LOCK).unlink()
            fsync_dir(temporary)
            _replace(temporary, out)
        except BaseException as error:
            full = disk_full(error, temporary)
            freed = abort(temporary)
            if full:
                raise RunFailed(f"{out}: no space left on the disk; {freed / 2**20:.1f} MiB freed again") from error
            raise


def _replace(temporary: Path, out: Path) -> None:
    if out.exists():
        os.rename(out, out.with_name(f"{out.name}.old-{uuid.uuid4().hex}"))
    os.rename(temporary, out)
    fsync_dir(out.parent)
    restore(out)


def restore(out: Path) -> None:
    """What was being replaced: it comes back where a kill came before its successor took its place, else it goes."""
    for old in out.parent.glob(f"{out.name}.old-*"):
        if out.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.rename(old, out)


def _sweep(out: Path) -> None:
    for left in out.parent.glob(f"{out.name}.tmp-*"):
        try:
            with open(left / LOCK, "rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            pass
        except BlockingIOError:
            continue
        shutil.rmtree(left, ignore_errors=True)
