"""Which names may become parts of paths, shell words and URLs."""

import math
import re

SEGMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=,@-]{0,199}")


def fault_of_segment(name: str) -> str | None:
    """Why `name` is no safe path segment, None when it is."""
    if SEGMENT.fullmatch(name):
        return None
    if not name:
        return "must not be empty"
    if len(name) > 200:
        return "must have at most 200 characters"
    return f"{name!r} is no safe name: letters, digits and . _ + = , @ - are, not starting with . or -"


def fault_of_path(path: str | None) -> str | None:
    """Why `path` (segments joined by `/`) is no safe relative path, None when it is or is absent."""
    if path is None:
        return None
    for segment in path.split("/"):
        if fault := fault_of_segment(segment):
            return fault
    return None


def number_of(value: object) -> object:
    """A text that spells a (finite) number is that number: the schema would read it as one."""
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return value
        return number if math.isfinite(number) else value
    return value


def alike(one: str, other: str) -> bool:
    """Whether two names of a grid's cells spell the same values (`lr=1e-5` and `lr=0.00001`)."""
    pairs = [[part.partition("=") for part in name.split(",")] for name in (one, other)]
    rows = [[(label, number_of(text)) for label, _, text in parts] for parts in pairs]
    return sorted(rows[0], key=str) == sorted(rows[1], key=str)


def auto_name(first: list[str], model: str | None, short_id: str) -> str:
    """A readable run name: environments (or the data set), the model's own name, and a short id."""
    parts = [part for part in (model or "model").split("/") if part]
    leaf = parts[-2] if len(parts) > 1 and parts[-1].startswith(("weights", "adapter", "step_")) else parts[-1]
    name = "--".join(("+".join(first) or "no-env", leaf, short_id)).lower()
    return re.sub(r"[^a-z0-9._+=,@-]", "-", name)
