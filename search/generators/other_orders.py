"""Orders of compute that no family emits: how quick they can be, and of which configurations most can be hoped for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush, nsmallest

from piper_core.schedule.families import FAMILIES
from search.bound import Bounds
from search.generators.ladder import Ladder
from search.partial_bound import overlaps
from search.space import Configuration
from search.stepwise import stepwise_bound

FOLLOWED = 200
"""Configurations whose orders are followed for the bound of any order (0.1 s each at most)."""
PROMISING = 24
"""Configurations named to be ordered anew."""


class OtherOrders:
    """Bounds that hold for any order, be it of a family or not, of configurations that need at most ``capacity_bytes``,
    of which the allocator loses ``gap``."""

    def __init__(self, bounds: Bounds, gap: float, capacity_bytes: float) -> None:
        self.bounds, self.gap, self.capacity = bounds, gap, capacity_bytes
        self._heap: list[tuple[float, bool, Configuration]] = []
        self._seen: set[tuple[int, bool, bool, tuple[int, ...]]] = set()

    def add(self, leaves: Ladder, zeros: Sequence[int], bound: float, threshold_s: float) -> int:
        """Let leaves count that take less than the threshold, of those that leave room for one microbatch and recompute
        more and more, which takes longer and longer but where it leaves room for more microbatches at once. ``bound``
        holds for all. Return how many were bounded."""
        bounds, low, bounded = self.bounds, leaves.lowest, 0
        if low.pp == 1:  # one row has one order
            return 0
        alike = id(bounds.shape(low)), FAMILIES[low.schedule].splits_backward, overlaps(low), tuple(zeros)
        if alike in self._seen:  # of a family that differs in its own order alone
            return 0
        self._seen.add(alike)
        for leaf in leaves:
            if max(bound, bounds.busy_bound(leaf)) >= threshold_s:
                break
            for zero in zeros:
                other = replace(leaf, zero=zero)
                least = max(bound, bounds.time_bound(other, self.gap, self.capacity, threshold_s))
                bounded += 1
                if least < threshold_s:
                    heappush(self._heap, (least, False, other))
        return bounded

    def add_memory(self, leaf: Configuration, bound: float) -> None:
        """Let the bytes of a leaf count, where memory is made small."""
        heappush(self._heap, (max(bound, self.bounds.any_order_floor(leaf)), True, leaf))

    def bound(self, least: float, threshold_s: float) -> float:
        """Return what nothing that was added can beat, nor anything that takes ``least``. The orders of those with the
        least bounds are followed, until none is left that would be less."""
        others = self._heap
        for _ in range(FOLLOWED):
            if not others or others[0][1] or others[0][0] >= least:
                break
            bound, _, config = heappop(others)
            enough = min(least, threshold_s)
            bound = max(bound, stepwise_bound(self.bounds, config, self.gap, self.capacity, enough))
            least = min(least, bound)
            heappush(others, (bound, True, config))
        return min(others[0][0], least) if others else least

    def promising(self) -> list[tuple[float, Configuration]]:
        """Return (seconds at least, configuration) of those of which most can be hoped for, least first."""
        return [(least, config) for least, _, config in nsmallest(PROMISING, self._heap)]
