"""No path leaves its run: neither by `..` nor by a link. Every reader of a run opens its files here.

`roots` are the resolved folders that a path may end in after links: those of `Run.roots`.
"""

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO


class NotThere(LookupError):
    """What is asked for does not exist, or lies outside of what may be shown: the same answer to both."""


class Unreadable(OSError):
    """A file that is there and is not read: a link that leads out, or no regular file."""


def target(path: Path, roots: Sequence[Path]) -> Path:
    """`path` after links. Raises `OSError`, of which `Unreadable` when it ends outside of `roots`."""
    try:
        found = path.resolve(strict=True)
    except (RuntimeError, ValueError):
        raise Unreadable(errno.ELOOP, "a link that leads nowhere") from None
    if not any(found == root or found.is_relative_to(root) for root in roots):
        raise Unreadable(errno.EXDEV, "a link that leads out of the run")
    return found


def regular(path: Path, roots: Sequence[Path]) -> tuple[Path, os.stat_result]:
    """`(path after links, its stat)` of a regular file. Raises `OSError`."""
    found = target(path, roots)
    state = found.stat()
    if not stat.S_ISREG(state.st_mode):
        raise Unreadable(errno.EINVAL, "not a regular file")
    return found, state


def opened(path: Path, roots: Sequence[Path]) -> BinaryIO:
    """A regular file, open for reading; a pipe in its place does not block. Raises `OSError`."""
    found, _ = regular(path, roots)
    descriptor = os.open(found, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # exchanged meanwhile
        os.close(descriptor)
        raise Unreadable(errno.EINVAL, "not a regular file")
    return os.fdopen(descriptor, "rb")


def size(path: Path, roots: Sequence[Path]) -> int:
    """Bytes of a regular file; 0 for what can't be read."""
    try:
        return regular(path, roots)[1].st_size
    except OSError:
        return 0


def fault(path: Path, roots: Sequence[Path]) -> str | None:
    """Why a file that is there can't be read, in one line; None when it can, and when it is not there."""
    try:
        opened(path, roots).close()
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{path.name}: {error.strerror}"
    return None


def inside(folder: Path, relative: str, roots: Sequence[Path]) -> Path:
    """`folder/relative` after links. Raises `NotThere` when it does not exist, leaves `folder` by `..`, or leads out of
    `roots`."""
    parts = Path(relative).parts
    if not parts or "\0" in relative or len(relative) > 4096 or ".." in parts or parts[0] == "/":
        raise NotThere(relative)
    try:
        return target(folder / relative, roots)
    except OSError:
        raise NotThere(relative) from None


def files_in(
    folder: Path, roots: Sequence[Path], suffixes: tuple[str, ...] = (), limit: int = 5000
) -> list[tuple[Path, os.stat_result]]:
    """Regular files below `folder` with their stat, sorted, at most `limit`. Links that lead out are left out."""
    found: list[tuple[Path, os.stat_result]] = []
    try:
        target(folder, roots)
        paths = sorted(folder.rglob("*"))
    except OSError:
        return []
    for path in paths:
        if len(found) >= limit:
            break
        if suffixes and path.suffix not in suffixes:
            continue
        try:
            found.append((path, regular(path, roots)[1]))
        except OSError:
            continue
    return found
