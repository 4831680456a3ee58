"""Student's t against tables (Abramowitz and Stegun, table 26.10) and against what it is of other functions."""

from __future__ import annotations

from math import atan, pi, sqrt

import pytest

from profiler.student import beta_part, quantile, tail

close = pytest.approx
TABLE = [(1, 0.975, 12.706), (2, 0.975, 4.303), (3, 0.95, 2.353), (5, 0.995, 4.032), (10, 0.9995, 4.587),
         (30, 0.9, 1.310), (120, 0.975, 1.980)]  # fmt: skip


@pytest.mark.parametrize(("freedom", "p", "value"), TABLE)
def test_quantiles_are_those_of_the_table(freedom: int, p: float, value: float) -> None:
    assert quantile(p, freedom) == close(value, abs=6e-4)
    assert quantile(1 - p, freedom) == close(-value, abs=6e-4)


@pytest.mark.parametrize("t", [-3.0, -0.4, 0.0, 0.7, 2.0, 40.0])
def test_tails_of_one_and_two_degrees_are_closed_forms(t: float) -> None:
    assert tail(t, 1) == close(0.5 - atan(t) / pi, rel=1e-9)
    assert tail(t, 2) == close(0.5 - t / (2 * sqrt(2 + t * t)), rel=1e-9)


@pytest.mark.parametrize("freedom", [1, 2.5, 7, 400])
def test_a_quantile_leaves_its_part(freedom: float) -> None:
    for p in (0.5, 0.6, 0.99, 0.99999):
        assert tail(quantile(p, freedom), freedom) == close(1 - p, rel=1e-6)


def test_the_incomplete_beta_is_a_distribution() -> None:
    assert (beta_part(0, 2, 3), beta_part(1, 2, 3)) == (0, 1)
    assert beta_part(0.3, 2, 3) == close(1 - beta_part(0.7, 3, 2))
    assert beta_part(0.3, 1, 1) == close(0.3)
    assert beta_part(0.3, 2, 1) == close(0.09)
