"""A half of a checkpoint: written under a temporary name, renamed when whole, then sealed with sizes and hashes."""

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlmake.core.errors import RunFailed
from rlmake.core.jsonio import fsync_dir, list_files, write_json

SCHEMA = 1
COMPLETE = "COMPLETE"
NO_ROOM = 2**18  # bytes left on a disk that a write has just filled


def begin(step_dir: Path, half: str) -> Path:
    """Create and return the temporary folder `<half>.tmp-<uuid>`. In a world of ranks the master calls it."""
    temporary = step_dir / f"{half}.tmp-{uuid.uuid4().hex}"
    temporary.mkdir(parents=True)
    return temporary


def commit(temporary: Path, step_dir: Path, half: str) -> None:
    """Make `temporary` the half: sync its files, replace an older half of that name, rename, seal.

    Replacing a half takes back COMPLETE first, so that no mixture of old and new ever looks finished.
    """
    _sync(temporary)
    (step_dir / COMPLETE).unlink(missing_ok=True)
    (step_dir / f"{half}.json").unlink(missing_ok=True)
    if (step_dir / half).exists():
        shutil.rmtree(step_dir / half)
    os.rename(temporary, step_dir / half)
    fsync_dir(step_dir)
    seal(step_dir, half)


def abort(temporary: Path) -> int:
    """Remove a half that cannot be finished; returns the bytes given back."""
    size = sum(path.stat().st_size for path in temporary.rglob("*") if path.is_file())
    shutil.rmtree(temporary, ignore_errors=True)
    return size


@contextmanager
def writing(step_dir: Path, half: str) -> Iterator[Path]:
    """Write a half in one process: yields the folder to fill, then commits it.

    On any error the folder is removed. A full disk becomes a `RunFailed` that says what was freed.
    """
    temporary = begin(step_dir, half)
    try:
        yield temporary
        commit(temporary, step_dir, half)
    except BaseException as error:
        full = disk_full(error, temporary)
        freed = abort(temporary)
        if full:
            raise RunFailed(disk_full_line(step_dir, half, freed)) from error
        raise


def disk_full_line(step_dir: Path, half: str, freed: int) -> str:
    return (
        f"{step_dir}: no space left on the disk while the {half} half was written; "
        f"the unfinished half is removed ({freed / 2**20:.1f} MiB freed), earlier checkpoints are untouched; "
        "free some space and start again, it goes on from them"
    )


def disk_full(error: BaseException | None, folder: Path | None = None) -> bool:
    """Whether an error, a cause of it, or one that a DCP rank reported says that the disk or quota is full.

    torch's own writer says nothing of the kind when it runs out of space ("unexpected pos 704 vs 598"): so an error of
    any sort counts as well while the disk of `folder` has no room. Ask before anything is removed.
    """
    if folder is not None and folder.exists() and shutil.disk_usage(folder).free < NO_ROOM:
        return True
    seen: set[int] = set()
    queue = [error]
    while queue:
        error = queue.pop()
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        # DCP: CheckpointException.failures = {rank: (exception, traceback)}; torch's C++ writer reports text only.
        failures = getattr(error, "failures", None)
        if isinstance(failures, dict):
            queue += [failure[0] if isinstance(failure, tuple) else failure for failure in failures.values()]
        if "No space left on device" in str(error):
            return True
        queue += [error.__cause__, error.__context__]
    return False


def seal(step_dir: Path, half: str) -> dict[str, Any]:
    """Write and return `<half>.json`: `{schema, half, files: [{path, size, blake3}]}`, paths relative to the record."""
    files = [{**entry, "path": f"{half}/{entry['path']}"} for entry in list_files(step_dir / half)]
    if not files:
        raise ValueError(f"{step_dir / half}: nothing to seal")
    record = {"schema": SCHEMA, "half": half, "files": files}
    write_json(step_dir / f"{half}.json", record)
    return record


def _sync(folder: Path) -> None:
    """Flush every file and folder below `folder` to the disk, so that a rename never outlives its content."""
    for path in [*folder.rglob("*"), folder]:
        if path.is_dir():
            fsync_dir(path)
        else:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
