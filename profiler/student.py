"""Student's t distribution: its tail, and its quantiles."""

from __future__ import annotations

from functools import lru_cache
from math import exp, lgamma, log, log1p

_STEPS, _SMALL = 300, 1e-300


def tail(t: float, freedom: float) -> float:
    """Return the probability of more than ``t``, with ``freedom`` degrees of freedom."""
    half = beta_part(freedom / (freedom + t * t), freedom / 2, 0.5) / 2
    return half if t >= 0 else 1 - half


@lru_cache(maxsize=4096)
def quantile(p: float, freedom: float) -> float:
    """Return what lies above a part ``p`` of the distribution, 0 < p < 1."""
    if p < 0.5:
        return -quantile(1 - p, freedom)
    low, high = 0.0, 1.0
    while tail(high, freedom) > 1 - p:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle, freedom) > 1 - p else (low, middle)
    return (low + high) / 2


def beta_part(x: float, a: float, b: float) -> float:
    """Return the regularized incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22, evaluated
    with Lentz's method)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # where it converges quickly
        return 1 - beta_part(1 - x, b, a)
    front = exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log1p(-x)) / a
    value, c, d = 1.0, 1.0, 0.0
    for step in range(_STEPS):
        m = step // 2
        if step == 0:
            part = 1.0
        elif step % 2 == 0:
            part = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            part = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1 / ((1 + part * d) or _SMALL)
        c = 1 + part / c or _SMALL
        value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front * (value - 1)
