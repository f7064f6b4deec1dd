"""Bins of rounded width."""

import math
from collections.abc import Iterable
from typing import Any


def histogram(values: Iterable[float], bars: int) -> dict[str, Any]:
    values = sorted(values)
    if not values:
        return {"bins": [], "bin": 0, "start": None, "end": None, "total": 0}
    low, high = values[0], values[-1]
    width = nice((high - low) / bars) if high > low else 1.0
    start = math.floor(low / width) * width
    counts: dict[int, int] = {}
    for value in values:
        place = int((value - start) / width + 1e-9)
        counts[place] = counts.get(place, 0) + 1
    bins = [[round(start + n * width, 9), counts.get(n, 0)] for n in range(max(counts) + 1)]
    return {"bins": bins, "bin": width, "start": low, "end": high, "total": len(values)}


def nice(width: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(width)) if width > 0 else 1.0
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= width * (1 - 1e-9))
