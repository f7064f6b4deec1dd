"""Bins of rounded width."""

import math
from typing import Any

import numpy as np


def histogram(values: np.ndarray, bars: int) -> dict[str, Any]:
    """How many of the (finite) values are in each of about `bars` bins."""
    if not len(values):
        return {"bins": [], "bin": 0, "start": None, "end": None, "total": 0}
    values = np.clip(values, -1e300, 1e300)
    low, high = float(values.min()), float(values.max())
    width = nice((high - low) / bars) if high > low else 1.0
    start = math.floor(low / width) * width
    counts = np.bincount(((values - start) / width + 1e-9).astype(int))
    bins = [[round(start + n * width, 9), count] for n, count in enumerate(counts.tolist())]
    return {"bins": bins, "bin": width, "start": low, "end": high, "total": len(values)}


def nice(width: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(width)) if width > 0 else 1.0
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= width * (1 - 1e-9))
