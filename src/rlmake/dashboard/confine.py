"""No path leaves its folder: neither by `..` nor by a link."""

from pathlib import Path


class NotThere(LookupError):
    """What is asked for does not exist, or lies outside of what may be shown: the same answer to both."""


def inside(folder: Path, relative: str) -> Path:
    """`folder/relative`, resolved. Raises `NotThere` when it does not exist or leaves `folder` (after links)."""
    if not relative or "\0" in relative or len(relative) > 4096:
        raise NotThere(relative)
    try:
        root = folder.resolve(strict=True)
        path = (root / relative).resolve(strict=True)
    except (OSError, RuntimeError, ValueError):
        raise NotThere(relative) from None
    if path != root and not path.is_relative_to(root):
        raise NotThere(relative)
    return path


def files_in(folder: Path, suffixes: tuple[str, ...] = (), limit: int = 5000) -> list[Path]:
    """Regular files below `folder`, sorted, at most `limit`. Links that leave it are left out."""
    try:
        root = folder.resolve(strict=True)
    except OSError:
        return []
    found: list[Path] = []
    for path in sorted(root.rglob("*")):
        if len(found) >= limit:
            break
        if suffixes and path.suffix not in suffixes:
            continue
        try:
            if path.is_file() and path.resolve().is_relative_to(root):
                found.append(path)
        except (OSError, RuntimeError):
            continue
    return found
