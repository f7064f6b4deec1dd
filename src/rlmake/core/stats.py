"""Small statistics of evaluations, in float64."""

import math
from collections.abc import Sequence

# Two-sided 97.5 % quantiles of Student's t for 1 … 30 degrees of freedom; beyond, the Cornish-Fisher expansion.
_T975 = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788, 2.1604, 2.1448,
    2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860, 2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484,
    2.0452, 2.0423,
)  # fmt: skip


def t975(df: int) -> float:
    """97.5 % quantile of Student's t with `df` ≥ 1 degrees of freedom (Abramowitz & Stegun 26.7.5 beyond 30)."""
    if df <= len(_T975):
        return _T975[df - 1]
    z = 1.959963984540054
    return z + (z**3 + z) / (4 * df) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)


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
