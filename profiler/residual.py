"""What predictions miss, learnt from measured runs: few parameters, shrunk to none, with intervals.

The logarithm of measured over predicted is a line in a few shares of the predicted step: a constant (everything is
slower by some factor), the share of exposed communication and the share of bubble (they may be off by more).
Bayesian linear regression with a conjugate prior (Murphy 2012, section 7.6.3): weights are normal around 0, so that
without runs a prediction stays what it is, and the noise is inverse gamma, so that predictions are Student's t.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

import numpy as np
from numpy.typing import NDArray

from profiler.record import Run
from profiler.student import quantile

FEATURES = ("exposed", "bubble")
PRIOR_SD = (0.3, 0.5, 0.5)
"""Standard deviations that weights are expected to have before any run: constant, then FEATURES."""
NOISE, NOISE_RUNS = 0.05, 2.0
"""Relative noise expected before any run, and how many runs that counts for."""


@dataclass(frozen=True)
class Residual:
    """A fitted residual model."""

    mean: NDArray[np.float64]
    precision: NDArray[np.float64]
    shape: float
    scale: float
    runs: int

    @staticmethod
    def of(runs: Iterable[Run]) -> Residual:
        """Fit to measured runs."""
        given = list(runs)
        x = np.asarray([_row(run.features) for run in given]).reshape(len(given), len(PRIOR_SD))
        y = np.asarray([log(run.step.median_s / run.predicted_s) for run in given])
        prior = np.diag([(NOISE / sd) ** 2 for sd in PRIOR_SD])  # in units of the noise
        precision = prior + x.T @ x
        mean = np.linalg.solve(precision, x.T @ y)
        shape = (NOISE_RUNS + len(given)) / 2
        rest = float(y @ y - mean @ precision @ mean)
        scale = (NOISE_RUNS * NOISE**2 + max(0.0, rest)) / 2
        return Residual(mean, precision, shape, scale, len(given))

    def apply(
        self, predicted_s: float, features: Mapping[str, float], level: float = 0.9
    ) -> tuple[float, float, float]:
        """Return (seconds, low, high) of a predicted step: the middle, and the ends of an interval of ``level``."""
        row = np.asarray(_row(features))
        middle = float(row @ self.mean)
        spread = self.scale / self.shape * (1 + float(row @ np.linalg.solve(self.precision, row)))
        half = quantile((1 + level) / 2, 2 * self.shape) * sqrt(spread)
        return predicted_s * exp(middle), predicted_s * exp(middle - half), predicted_s * exp(middle + half)

    def to_data(self) -> dict[str, float]:
        """Return the weights by name."""
        names = ("constant", *FEATURES)
        return {name: float(weight) for name, weight in zip(names, self.mean, strict=True)}


def _row(features: Mapping[str, float]) -> Sequence[float]:
    return [1.0, *(features.get(name, 0.0) for name in FEATURES)]
