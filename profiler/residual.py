"""What predictions miss, learnt from measured runs: few parameters, shrunk to none, with intervals.

The logarithm of measured over predicted is a line in a few shares of the predicted step: that of a rank's own work and
of waiting for it (by which compute is slower), and those of exposed communication, of bubble, and of collectives
inside chunks. Communication has factors of its own, because what slows compute need not slow it. Bayesian linear
regression with a conjugate prior (Murphy 2012, section 7.6.3): weights are normal around 0, so that without runs a
prediction stays what it is, and the noise is inverse gamma, so that predictions are Student's t. A strategy whose
chunks exchange is off in a way of its own (kind, size and place of each collective), so its noise is larger: it says
less of the others, and they of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from profiler.record import Run
from profiler.student import quantile

Floats: TypeAlias = NDArray[np.float64]
FEATURES = ("exposed", "bubble", "inner")
WORK_SD, FEATURE_SD = 0.3, {0.15: 1.0, 2.0: 0.05}
"""Standard deviations that weights are expected to have before any run. Of those for FEATURES, with how likely they are
before, the one counts that is likelier after (MacKay 1992, "Bayesian interpolation"): few runs hardly tell one feature
from another, many do."""
INNER_NOISE = 0.4
"""What a strategy of nothing but inner collectives is off by in its own way. With this and FEATURE_SD, of a few tried,
five runs of tiny-llama on a CPU made the others better, and none much worse."""
NOISE, NOISE_RUNS = 0.05, 2.0
"""Relative noise expected before any run, and how many runs that counts for."""


@dataclass(frozen=True)
class Residual:
    """A fitted residual model."""

    mean: Floats
    precision: Floats
    shape: float
    scale: float
    runs: int

    @staticmethod
    def of(runs: Iterable[Run]) -> Residual:
        """Fit to measured runs."""
        given = list(runs)
        own = np.asarray([_own(run.features) for run in given])
        x = np.asarray([_row(run.features) for run in given]).reshape(len(given), 1 + len(FEATURES)) / own[:, None]
        y = np.asarray([log(run.step.median_s / run.predicted_s) for run in given]) / own
        found = [(log(likely), _fitted(x, y, sd)) for sd, likely in FEATURE_SD.items()]
        return max(found, key=lambda each: each[0] + each[1][0])[1][1]

    def apply(
        self, predicted_s: float, features: Mapping[str, float], level: float = 0.9
    ) -> tuple[float, float, float]:
        """Return (seconds, low, high) of a predicted step: the middle, and the ends of an interval of ``level``."""
        row = np.asarray(_row(features))
        middle = float(row @ self.mean)
        spread = self.scale / self.shape * (_own(features) ** 2 + float(row @ np.linalg.solve(self.precision, row)))
        half = quantile((1 + level) / 2, 2 * self.shape) * sqrt(spread)
        return predicted_s * exp(middle), predicted_s * exp(middle - half), predicted_s * exp(middle + half)

    def to_data(self) -> dict[str, float]:
        """Return the weights by name."""
        names = ("work", *FEATURES)
        return {name: float(weight) for name, weight in zip(names, self.mean, strict=True)}


def _row(features: Mapping[str, float]) -> Sequence[float]:
    work = 1.0 - features.get("exposed", 0.0) - features.get("inner", 0.0)
    return [work, *(features.get(name, 0.0) for name in FEATURES)]


def _fitted(x: Floats, y: Floats, sd: float) -> tuple[float, Residual]:
    """Return the logarithm of how likely the runs are, a constant left out, and the weights they give."""
    prior = np.diag([(NOISE / each) ** 2 for each in (WORK_SD, *[sd] * len(FEATURES))])  # in units of the noise
    precision: Floats = np.asarray(prior + x.T @ x, np.float64)
    mean = np.asarray(np.linalg.solve(precision, x.T @ y), np.float64)
    shape = (NOISE_RUNS + len(y)) / 2
    rest = float(y @ y - mean @ precision @ mean)
    scale = (NOISE_RUNS * NOISE**2 + max(0.0, rest)) / 2
    ratio = float(np.linalg.slogdet(prior)[1] - np.linalg.slogdet(precision)[1])
    return ratio / 2 - shape * log(scale), Residual(mean, precision, shape, scale, len(y))


def _own(features: Mapping[str, float]) -> float:
    """Return a strategy's noise over that of one without inner collectives."""
    return sqrt(1 + (INNER_NOISE / NOISE * features.get("inner", 0.0)) ** 2)
