"""Small statistics of evaluations, in float64."""

import functools
import math
from collections.abc import Sequence


@functools.lru_cache
def t975(df: int) -> float:
    """97.5 % quantile of Student's t with `df` ≥ 1 degrees of freedom, to 1e-9.

    The distribution's finite sums (Abramowitz & Stegun 26.7.3, 26.7.4), by bisection; beyond 200 degrees the expansion
    26.7.5.
    """
    if df > 200:
        z = 1.959963984540054
        g = (
            z**3 + z,
            5 * z**5 + 16 * z**3 + 3 * z,
            3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z,
            79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z,
        )
        return z + sum(
            term / (scale * df**power) for power, (term, scale) in enumerate(zip(g, _SCALES, strict=True), 1)
        )
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, df) < 0.95 else (low, middle)
    return math.sqrt(df) * math.tan(low)


_SCALES = (4, 96, 384, 92160)


def _within(angle: float, df: int) -> float:
    """The probability that |t| < √df · tan(angle)."""
    cos, odd = math.cos(angle), df % 2
    term, total = (cos, 0.0) if odd else (1.0, 0.0)
    for j in range(1 + odd, df, 2):
        total += term
        term *= cos * cos * j / (j + 1)
    inner = math.sin(angle) * total
    return 2 / math.pi * (angle + inner) if odd else inner


def mean_ci95(values: Sequence[float]) -> tuple[float, list[float] | None]:
    """Mean and its 95 % t-interval `[lo, hi]`; the interval is None for fewer than two values."""
    n = len(values)
    if n == 0:
        raise ValueError("mean of no values")
    mean = math.fsum(values) / n
    if n == 1:
        return mean, None
    half = t975(n - 1) * math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)
    return mean, [mean - half, mean + half]


def pass_at_k(n: int, c: int, k: int) -> float | None:
    """Unbiased pass@k = 1 − C(n−c, k) / C(n, k) of one task with `c` successes in `n` samples; None when n < k.

    Chen et al. 2021, https://arxiv.org/abs/2107.03374, equation 1.
    """
    if not 0 <= c <= n or k < 1:
        raise ValueError(f"pass@k of n={n}, c={c}, k={k}")
    if n < k:
        return None
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def pass_hat_k(n: int, c: int, k: int) -> float | None:
    """Unbiased pass^k = C(c, k) / C(n, k), the chance that all of k samples succeed; None when n < k.

    Yao et al. 2024 (τ-bench), https://arxiv.org/abs/2406.12045, section 2.
    """
    if not 0 <= c <= n or k < 1:
        raise ValueError(f"pass^k of n={n}, c={c}, k={k}")
    return None if n < k else math.comb(c, k) / math.comb(n, k)
