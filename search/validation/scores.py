"""How near predictions come: errors of step times, ranks inside sweeps, verdicts on memory."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import fmean, median, pstdev
from typing import TypeAlias

Labels: TypeAlias = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Pair:
    """A measured step time and its prediction, seconds; ``layout`` is what stays where only kernels differ."""

    source: str
    measured_s: float
    predicted_s: float
    layout: Hashable = None

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors of some predictions, as fractions; ``spread`` is what is left after the best single rescale."""

    count: int
    mean: float
    median: float
    bias: float
    worst: float
    spread: float


def errors(pairs: Sequence[Pair]) -> Errors:
    """Return the errors of at least one pair."""
    off = [abs(pair.error) for pair in pairs]
    logs = [log(pair.predicted_s / pair.measured_s) for pair in pairs]
    return Errors(
        len(pairs), fmean(off), median(off), fmean(pair.error for pair in pairs), max(off), exp(pstdev(logs)) - 1
    )


def kendall(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Kendall's tau-b: 1 where both rank alike, 0 for chance; ties count for neither."""
    agree = one_apart = other_apart = 0
    for i in range(len(one)):
        for j in range(i):
            a = _sign(one[i], one[j])
            b = _sign(other[i], other[j])
            agree += a * b
            one_apart += a != 0
            other_apart += b != 0
    return agree / sqrt(one_apart * other_apart) if one_apart and other_apart else 0.0


def _sign(a: float, b: float) -> int:
    return 0 if abs(a - b) <= 1e-9 * max(abs(a), abs(b)) else 1 if a > b else -1


def by_layout(pairs: Sequence[Pair]) -> list[Pair]:
    """Return one pair for each layout: its quickest measured and its quickest predicted run, whatever the kernels."""
    groups: dict[Hashable, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(pair.layout, []).append(pair)
    return [
        Pair(group[0].source, min(p.measured_s for p in group), min(p.predicted_s for p in group), layout)
        for layout, group in groups.items()
    ]


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of a sweep: what it measured (None: out of memory; MFU as a fraction), and what was predicted."""

    measured_mfu: float | None
    predicted_s: float
    fits: str


def regret(trials: Sequence[Trial]) -> tuple[float, bool]:
    """Return what the run ranked first among those said to fit, or close to it, loses against the best measured MFU,
    and whether it ran out of memory."""
    best = max(trial.measured_mfu or 0.0 for trial in trials)
    pick = min((trial for trial in trials if trial.fits != "no"), key=lambda trial: trial.predicted_s)
    return best - (pick.measured_mfu or 0.0), pick.measured_mfu is None


@dataclass(frozen=True, slots=True)
class Confusion:
    """Verdicts on runs of which it is known whether they fitted."""

    ran: Mapping[str, int]
    out_of_memory: Mapping[str, int]

    @property
    def false_fit(self) -> float:
        """Part of the runs out of memory that were said to fit."""
        return self.out_of_memory.get("yes", 0) / max(1, sum(self.out_of_memory.values()))

    @property
    def false_out_of_memory(self) -> float:
        """Part of those that ran that were said not to fit."""
        return self.ran.get("no", 0) / max(1, sum(self.ran.values()))

    @property
    def close(self) -> float:
        """Part of all that was too close to call."""
        both = sum(self.ran.values()) + sum(self.out_of_memory.values())
        return (self.ran.get("close", 0) + self.out_of_memory.get("close", 0)) / max(1, both)
