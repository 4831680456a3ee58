"""Race strategies by running them: successive halving with paired tests, until more runs would not change the winner.

In every round each strategy that is still in is run once, so that drift meets all alike and differences are paired.
After every ``every`` rounds, who is slower than the leader beyond doubt is out, and so is the slower half of those that
are left, but never one of the last two. The race ends with one left, when all that are left are as good as the leader
(within ``same``, beyond doubt), or when the rounds are over.

Beyond doubt is a paired t test on logarithms of times. The chance of calling anybody slower who is not, over the whole
race, is at most ``1 - sure``: looks share it evenly (Bonferroni), and within a look it is Holm's (Scandinavian Journal
of Statistics 6, 1979) over all ordered pairs, since the leader is chosen by the same times that are tested.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log, sqrt
from statistics import fmean, median, stdev
from typing import Literal, TypeAlias

from profiler.student import quantile, tail

Ended: TypeAlias = Literal["one left", "all left are as good", "rounds over"]
Measure: TypeAlias = Callable[[Sequence[str]], Mapping[str, float]]
"""Runs each of the strategies named once; seconds by name. One that is missing from the answer failed."""
SLOWER, HALF, FAILED = "slower", "in the slower half", "failed"


@dataclass(frozen=True, slots=True)
class Rules:
    """``every`` rounds there is a look at the times; ``sure`` is the confidence with which one is called slower, in all
    tests of a race together; ``same`` the relative difference that does not matter."""

    rounds: int = 12
    every: int = 4
    sure: float = 0.95
    same: float = 0.01

    @property
    def looks(self) -> int:
        """How often times are looked at."""
        return self.rounds // self.every


@dataclass(frozen=True)
class Race:
    """How it went: all times by strategy, when each was out (round, why), and the winner: of those that are left the
    best guess."""

    winner: str
    ended: Ended
    times_s: dict[str, list[float]]
    out: dict[str, tuple[int, str]]

    @property
    def runs(self) -> int:
        return sum(map(len, self.times_s.values()))

    @property
    def decided(self) -> bool:
        """Whether the winner is quicker than every other beyond doubt; those that failed aside."""
        beaten = [why for _, why in self.out.values() if why != FAILED]
        return bool(beaten) and self.ended == "one left" and all(why == SLOWER for why in beaten)


def race(names: Sequence[str], measure: Measure, rules: Rules = Rules()) -> Race:
    """Race strategies, best guess first; ties are broken by that order. With none left the first is the winner."""
    alive = list(names)
    times: dict[str, list[float]] = {name: [] for name in names}
    out: dict[str, tuple[int, str]] = {}
    ended: Ended = "rounds over"
    for number in range(1, rules.rounds + 1):
        if len(alive) < 2:
            break
        found = measure(alive)
        for name in alive:
            if name in found:
                times[name].append(found[name])
            else:
                out[name] = number, FAILED
        alive = [name for name in alive if name not in out]
        if number % rules.every or len(alive) < 2:
            continue
        ranked = sorted(alive, key=lambda name: (median(times[name]), names.index(name)))
        leader, level = ranked[0], (1 - rules.sure) / rules.looks
        doubts = {name: doubt(times[name], times[leader]) for name in ranked[1:]}
        out |= dict.fromkeys(holm(doubts, level, len(names) * (len(names) - 1)), (number, SLOWER))
        for name in ranked[max(2, (len(ranked) + 1) // 2) :]:
            out.setdefault(name, (number, HALF))
        alive = [name for name in alive if name not in out]
        tests = max(1, len(alive) - 1)
        most = [gap(times[name], times[leader], 1 - level / tests) for name in alive if name != leader]
        if most and max(most) < log(1 + rules.same):
            ended = "all left are as good"
            break
    return Race((alive or list(names))[0], "one left" if len(alive) < 2 else ended, times, out)


def holm(doubts: Mapping[str, float], level: float, tests: int) -> list[str]:
    """Return the names whose probability is small enough at a ``level`` for all of ``tests`` together."""
    rejected: list[str] = []
    for name, chance in sorted(doubts.items(), key=lambda item: (item[1], item[0])):
        if chance > level / (tests - len(rejected)):
            break
        rejected.append(name)
    return rejected


def doubt(times: Sequence[float], leader: Sequence[float]) -> float:
    """Return the probability of times as much longer than the leader's, paired by round, where neither is slower."""
    mean, error, freedom = _paired(times, leader)
    if not freedom:
        return 1.0
    if not error:
        return float(mean <= 0)
    return tail(mean / error, freedom)


def gap(times: Sequence[float], leader: Sequence[float], sure: float) -> float:
    """Return the upper end of a one-sided interval of the mean of log(time / leader's time), paired by round."""
    mean, error, freedom = _paired(times, leader)
    return mean + quantile(sure, freedom) * error if freedom else float("inf")


def _paired(times: Sequence[float], leader: Sequence[float]) -> tuple[float, float, int]:
    """Return the mean of the logarithms of ratios, its standard error, and the degrees of freedom (0: too few)."""
    logs = [log(t / best) for t, best in zip(times, leader, strict=True)]
    if len(logs) < 2:
        return 0.0, 0.0, 0
    return fmean(logs), stdev(logs) / sqrt(len(logs)), len(logs) - 1
