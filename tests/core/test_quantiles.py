"""Student's t against published quantiles, and against numerical integration of its density."""

import math

import numpy as np
import pytest

from rlmake.core.stats import t975

KNOWN = {
    1: 12.706204736432095, 2: 4.302652729911275, 3: 3.182446305284263, 7: 2.3646242515927844, 30: 2.0422724563012373,
    39: 2.0226909200367604, 200: 1.9718962236316088, 1000: 1.9623390808264078,
}  # fmt: skip


@pytest.mark.parametrize("df", KNOWN)
def test_known_quantiles(df):
    assert t975(df) == pytest.approx(KNOWN[df], rel=1e-9)


@pytest.mark.parametrize("df", [2, 5, 38, 111, 200, 201, 256, 5000])
def test_half_of_the_rest_lies_beyond_it(df):
    x = np.linspace(0, t975(df), 200_001)
    log = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(df * math.pi)
    density = np.exp(log - (df + 1) / 2 * np.log1p(x**2 / df))
    assert np.trapezoid(density, x) == pytest.approx(0.475, abs=1e-9)
