"""Links from `outputs/<run>/…` into the store. Only leaves are links, links are relative, only links are replaced."""

import os
import uuid
from pathlib import Path

from rlmake.build.names import OUTPUTS
from rlmake.core.errors import UserError

DIRECT = "run.json"  # marks a run that was started directly


def destination(link: Path | str, to: Path) -> str:
    """The text of a link at `link` that points to `to`."""
    return os.path.relpath(to, os.path.dirname(link))


def points(link: Path | str, to: Path) -> bool:
    """Whether `link` is a link that says exactly this."""
    return os.path.islink(link) and os.readlink(link) == destination(link, to)


def obstacle(link: Path | str, clear: set[str] | None = None) -> str | None:
    """Why nothing can be published at `link`, in one line; None when it can. `clear` remembers folders that may be
    published into, where many links are asked about."""
    if os.path.lexists(link) and not os.path.islink(link):
        what = "directory" if os.path.isdir(link) else "file"
        return (
            f"{link} is a real {what}, not a link of the build: move it away, or take it in with `rlmake adopt {link}`"
        )
    clear = set() if clear is None else clear
    folder = os.path.dirname(link)
    while folder not in (OUTPUTS, os.path.dirname(folder)) and folder not in clear:
        if os.path.isfile(f"{folder}/{DIRECT}"):
            return (
                f"{folder} is a run that was started directly ({DIRECT}): "
                f"rename it, or take it in with `rlmake adopt {folder}`"
            )
        if os.path.islink(folder) or (os.path.exists(folder) and not os.path.isdir(folder)):
            return f"{folder} is not a directory of its own; nothing is published through links"
        clear.add(folder)
        folder = os.path.dirname(folder)
    return None


def publish(link: Path, to: Path) -> bool:
    """Make `link` point to `to`, atomically; False when it did already. Raises `UserError` for an `obstacle`."""
    if points(link, to):
        return False
    if why := obstacle(link):
        raise UserError(why)
    link.parent.mkdir(parents=True, exist_ok=True)
    temporary = link.with_name(f".{link.name}.{uuid.uuid4().hex[:8]}")
    os.symlink(destination(link, to), temporary)
    os.replace(temporary, link)
    return True


def encode(path: str) -> str:
    """A path as hex digits: no user's name stands in a shell line."""
    return path.encode().hex()


def decode(text: str) -> str:
    return bytes.fromhex(text).decode()
