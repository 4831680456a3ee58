"""Race strategies by running them: successive halving with paired tests, until more runs would not change the winner.

In every round each strategy that is still in is run once, so that drift meets all alike and differences are paired.
After a round, who is slower than the leader beyond doubt is out; after every ``halve`` rounds so is the slower half of
those that are left, at most. The race ends with one left, when all that are left are as good as the leader (within
``same``, beyond doubt), or when the rounds are over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log, sqrt
from statistics import fmean, median, stdev
from typing import Literal, TypeAlias

from profiler.residual import student_quantile

Ended: TypeAlias = Literal["one left", "all left are as good", "rounds over"]
Measure: TypeAlias = Callable[[Sequence[str]], Mapping[str, float]]
"""Runs each of the strategies named once; seconds by name."""


@dataclass(frozen=True, slots=True)
class Rules:
    """``sure`` is the confidence with which one is called slower, in all tests together (Bonferroni); ``same`` the
    relative difference that does not matter."""

    rounds: int = 20
    least: int = 3
    halve: int = 4
    sure: float = 0.95
    same: float = 0.01


@dataclass(frozen=True)
class Race:
    """How it went: all times by strategy, when each was out (round, why), and the winner."""

    winner: str
    ended: Ended
    times_s: dict[str, list[float]]
    out: dict[str, tuple[int, str]]

    @property
    def runs(self) -> int:
        return sum(map(len, self.times_s.values()))


def race(names: Sequence[str], measure: Measure, rules: Rules = Rules()) -> Race:
    """Race strategies, best guess first; ties are broken by that order."""
    alive = list(names)
    times: dict[str, list[float]] = {name: [] for name in names}
    out: dict[str, tuple[int, str]] = {}
    ended: Ended = "one left" if len(alive) == 1 else "rounds over"
    for number in range(1, rules.rounds + 1):
        if len(alive) == 1:
            ended = "one left"
            break
        for name, seconds in measure(alive).items():
            times[name].append(seconds)
        if number < rules.least:
            continue
        leader = min(alive, key=lambda name: (median(times[name]), names.index(name)))
        tests = max(1, len(names) - 1) * rules.rounds
        gaps = {name: gap(times[name], times[leader], 1 - (1 - rules.sure) / tests) for name in alive if name != leader}
        for name, (low, _) in gaps.items():
            if low > 0:
                out[name] = (number, f"slower than {leader}")
        if number % rules.halve == 0:
            ranked = sorted(gaps, key=lambda name: (median(times[name]), names.index(name)))
            for name in ranked[max(1, (len(alive) + 1) // 2 - 1) :]:
                out.setdefault(name, (number, "in the slower half"))
        alive = [name for name in alive if name not in out]
        if len(alive) > 1 and all(high < log(1 + rules.same) for name, (_, high) in gaps.items() if name in alive):
            ended = "all left are as good"
            break
    if len(alive) == 1:
        ended = "one left"
    winner = min(alive, key=lambda name: (median(times[name]) if times[name] else 0.0, names.index(name)))
    return Race(winner, ended, times, out)


def gap(times: Sequence[float], leader: Sequence[float], sure: float) -> tuple[float, float]:
    """Return the ends of the interval of the mean of log(time / leader's time), paired by round, each end one-sided."""
    pairs = [log(t / best) for t, best in zip(times, leader, strict=False)]
    if len(pairs) < 2:
        return float("-inf"), float("inf")
    half = student_quantile(sure, len(pairs) - 1) * stdev(pairs) / sqrt(len(pairs))
    return fmean(pairs) - half, fmean(pairs) + half
