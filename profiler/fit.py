"""From what was measured to what was not: alpha-beta lines by tier, chunks by shape, and how far to trust either.

Every answer has a low and a high end and says where it comes from. *measured* is the very thing, or a size between two
that were measured; *fitted* is an extrapolation from measurements; where neither is possible the answer is None, and
whoever asks takes the preset. The ends of a measured answer are those of the medians' 95 % intervals; a fitted one is
as uncertain as leaving each measurement out and fitting it from the others shows, at least ``FITTED``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from math import ceil, exp, isfinite, log
from statistics import fmean, median

import numpy as np

from piper_core.names import Phase, Recompute, Region
from profiler.record import Profile, Sample, Site, Transfer

FITTED = 0.1
"""Least relative uncertainty of a fitted answer: fits that happen to agree promise nothing for the next shape."""
OTHER_GROUP = 0.3
"""Relative uncertainty of a collective in a group of a size that was not measured: topology decides, and is unknown."""
ONCE = 1.0
"""Relative uncertainty of a fit to what was timed once, and so has no interval: a factor of two either way."""


class Origin(StrEnum):
    """Where an answer comes from."""

    MEASURED = "measured"
    FITTED = "fitted"
    PRESET = "preset"


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds with a low and a high end, and where they come from."""

    seconds: float
    low_s: float
    high_s: float
    origin: Origin

    @staticmethod
    def of(sample: Sample) -> Answer:
        low, high = sample.interval_s
        return Answer(sample.median_s, low, high, Origin.MEASURED)

    @staticmethod
    def fitted(seconds: float, doubt: float) -> Answer:
        seconds, doubt = max(0.0, seconds), doubt if isfinite(doubt) else ONCE
        return Answer(seconds, seconds / (1 + doubt), seconds * (1 + doubt), Origin.FITTED)


class Curve:
    """Times by size: straight between measured sizes, the last slope beyond the largest, the least time below the
    smallest."""

    def __init__(self, points: Iterable[tuple[float, Sample]]) -> None:
        self.points = sorted(points, key=lambda each: each[0])
        self.sizes = [size for size, _ in self.points]

    def __call__(self, size: float) -> Answer:
        at = bisect_left(self.sizes, size)
        if at < len(self.sizes) and (self.sizes[at] == size or at == 0):
            return Answer.of(self.points[at][1])
        if at == len(self.sizes):
            return self._beyond(size)
        (a, x), (b, y) = self.points[at - 1], self.points[at]
        part = (size - a) / (b - a)
        ends = [u + (v - u) * part for u, v in zip(_three(x), _three(y), strict=True)]
        return Answer(ends[0], ends[1], ends[2], Origin.MEASURED)

    def _beyond(self, size: float) -> Answer:
        last, top = self.points[-1]
        if len(self.points) < 2:
            return Answer.fitted(top.median_s * size / last, OTHER_GROUP)
        before, below = self.points[-2]
        slope = max((top.median_s - below.median_s) / (last - before), top.median_s / last / 4)
        return Answer.fitted(top.median_s + slope * (size - last), FITTED + top.doubt)

    @cached_property
    def alpha_beta(self) -> tuple[float, float]:
        """Return (seconds of the smallest size, seconds a byte between the two largest): the two ends of the line."""
        (size, last), alpha = self.points[-1], self.points[0][1].median_s
        return alpha, max(0.0, last.median_s - alpha) / size


def _mean(sample: Sample) -> float:
    """Return the mean of all but the slowest tenth, which something else may have delayed."""
    times = sorted(sample.times_s)
    return fmean(times[: max(1, ceil(0.9 * len(times)))])


def _three(sample: Sample) -> tuple[float, float, float]:
    return sample.median_s, *sample.interval_s


def _rising(points: Iterable[tuple[float, Sample]]) -> list[tuple[float, Sample]]:
    """Return times that never fall with size: neighbours that do are one sample together, since it is chance that
    tells them apart (pool adjacent violators, Ayer et al. 1955)."""
    pools: list[tuple[list[float], Sample]] = []
    for size, sample in sorted(points, key=lambda each: each[0]):
        sizes = [size]
        while pools and pools[-1][1].median_s > sample.median_s:
            before, other = pools.pop()
            sizes = before + sizes
            sample = Sample(other.times_s + sample.times_s, other.interrupted + sample.interrupted)
        pools.append((sizes, sample))
    return [(size, sample) for sizes, sample in pools for size in sizes]


class Transfers:
    """Times of collectives and messages by kind, group and size; one tier for each number of nodes measured."""

    def __init__(self, transfers: Iterable[Transfer]) -> None:
        points: dict[tuple[str, int, int], list[tuple[float, Sample]]] = {}
        for t in transfers:
            points.setdefault((t.kind, t.ranks, t.nodes), []).append((float(t.bytes), t.sample))
        self.curves = {key: Curve(_rising(found)) for key, found in points.items()}

    def __call__(self, kind: str, size: float, ranks: int, nodes: int) -> Answer | None:
        """Return the time of a transfer, None where nothing of its kind and tier was measured."""
        curve = self.curves.get((kind, ranks, nodes))
        if curve is not None:
            return curve(size)
        near = [n for k, n, tier in self.curves if k == kind and tier == nodes]
        if not near:
            return None
        known = min(near, key=lambda n: abs(log(n / ranks)))
        alpha, beta = self.curves[kind, known, nodes].alpha_beta
        steps = (ranks - 1) / (known - 1)
        share = (1 - 1 / ranks) / (1 - 1 / known)
        return Answer.fitted(alpha * steps + beta * share * size, OTHER_GROUP)


Preset = Callable[[Site], float]
"""Seconds of a site by the preset's cost model, 0 where it has none."""


class Chunks:
    """Times of chunks by site; a shape that was not measured is the preset's time of it, times how far the preset was
    off for the nearest shapes of the same region and phase (its efficiency there)."""

    def __init__(self, profile: Profile) -> None:
        self.known = {site: each.sample for site, each in profile.by_site.items() if each.sample is not None}
        self.failed = {site for site, each in profile.by_site.items() if each.failed}
        self.kinds: dict[tuple[Region, Phase, Recompute], list[Site]] = {}
        for site in self.known:
            self.kinds.setdefault((site.region, site.phase, site.policy), []).append(site)

    def __call__(self, site: Site, preset: Preset) -> Answer | None:
        """Return the time of a site, None where nothing of its phase was measured."""
        sample = self.known.get(site)
        if sample is not None:
            return Answer.of(sample)
        sizes = [
            (float(each.micro_batch), self.known[each])
            for each in self.kinds.get((site.region, site.phase, site.policy), ())
            if replace(each, micro_batch=site.micro_batch) == site
        ]
        if len(sizes) > 1:
            return self._line(Curve(sizes), float(site.micro_batch))
        near = self._near(site)
        expected = preset(site)
        if not near or not expected:
            return None
        ratio = self._ratio(near[0], preset)
        return Answer.fitted(expected * ratio, self._doubt(site, preset))

    @staticmethod
    def _line(curve: Curve, micro_batch: float) -> Answer:
        """Between two measured sizes, or beyond: a fit all the same, because the site itself was not measured."""
        if micro_batch < curve.sizes[0]:
            (a, x), (b, y) = curve.points[:2]
            slope = (y.median_s - x.median_s) / (b - a)
            least = x.median_s * micro_batch / a
            return Answer.fitted(max(x.median_s - slope * (a - micro_batch), least), FITTED + x.doubt)
        made = curve(micro_batch)
        doubt = max(FITTED, (made.high_s - made.low_s) / 2 / made.seconds if made.seconds else 0.0)
        return Answer.fitted(made.seconds, doubt)

    def _near(self, site: Site) -> list[Site]:
        """Return measured sites from which to take the efficiency, the nearest first."""
        same = self.kinds.get((site.region, site.phase, site.policy)) or [
            each for each in self.known if each.phase is site.phase and each.policy is site.policy
        ]
        return sorted(same, key=lambda each: (_distance(each, site), str(each)))

    def _ratio(self, site: Site, preset: Preset) -> float:
        expected = preset(site)
        return self.known[site].median_s / expected if expected else 1.0

    def _doubt(self, site: Site, preset: Preset) -> float:
        """Return how far off the other shapes are when each is fitted from its nearest, the median and a quarter."""
        near = self._near(site)
        off = []
        for each in near:
            others = sorted((o for o in near if o != each), key=lambda o: (_distance(o, each), str(o)))
            if others:
                off.append(abs(log(self._ratio(others[0], preset) / self._ratio(each, preset))))
        foreign = near[0].region is not site.region
        return max(FITTED, exp(1.5 * median(off)) - 1 if off else OTHER_GROUP) * (2 if foreign else 1)


def _distance(a: Site, b: Site) -> float:
    """Return how unlike two shapes are: the sum of the logarithms by which they differ."""
    pairs = (
        (a.micro_batch, b.micro_batch), (a.seq_len, b.seq_len), (a.degrees.tensor, b.degrees.tensor),
        (a.degrees.expert, b.degrees.expert), (a.degrees.context, b.degrees.context),
    )  # fmt: skip
    return sum(abs(log(x / y)) for x, y in pairs) + (a.degrees.sequence != b.degrees.sequence)


class Updates:
    """Time of a step's update by number of parameters."""

    def __init__(self, profile: Profile) -> None:
        self._curve = Curve((float(each.numel), each.sample) for each in profile.updates)

    def __call__(self, numel: float) -> Answer | None:
        return self._curve(numel) if self._curve.points and numel > 0 else None


class Meetings:
    """What ranks lose that exchange after computing, by how long each computes: straight between measured times, in
    proportion below the first, and no more than at the longest beyond, where it is theirs that wait for a thread."""

    def __init__(self, profile: Profile) -> None:
        points, most = [(0.0, 0.0, 0.0, 0.0)], [0.0, 0.0, 0.0]
        for each in sorted(profile.meetings, key=lambda each: each.compute_s):
            _, low, high = _three(each.factors)
            mean = _mean(each.factors)  # few of many wait long, and a step pays for all
            ends = (mean, min(mean, low), max(mean, high))
            lost = [max(0.0, factor - 1) * each.compute_s for factor in ends]
            most = [max(pair) for pair in zip(most, lost, strict=True)]  # a longer one loses no less
            points.append((each.compute_s, most[0], most[1], most[2]))
        self._columns = tuple(zip(*points, strict=True))

    def __call__(self, compute_s: float) -> Answer:
        times, *ends = self._columns
        middle, low, high = (float(np.interp(compute_s, times, end)) for end in ends)
        return Answer(middle, low, high, Origin.MEASURED)


def overlap_factor(profile: Profile, what: str) -> float | None:
    """Return by how much two kinds of work slow each other, at least 1, None where that was not measured."""
    found = [each.factors.median_s for each in profile.overlaps if each.what == what]
    return max(1.0, found[-1]) if found else None
