"""Best-first branch and bound over the whole space."""

from __future__ import annotations

import time
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import product
from math import inf

from piper_core.schedule.families import FAMILIES, get_family
from search.bound import OVERLAPPING, Bounds
from search.space import Configuration, Space

_PARTIAL, _WHOLE, _REPLAYED = range(3)
ROUNDING = 1 + 1e-9
"""What a bound may exceed a step time by that it equals, since they add up in different orders."""

STATE, ACTIVATIONS, ORDER, TIME, SAME = (
    "memory: state alone", "memory: state and activations", "memory: along the order", "time bound",
    "same layers per stage as another",
)  # fmt: skip


class BestFirst:
    """Expands the assignment with the least bound first: degrees, microbatch, recompute, sequence parallelism, and
    whether the schedule has overlap groups; then schedule, cuts and ZeRO stage; then the order that the family emits.

    A node whose least memory exceeds ``capacity_bytes`` is dropped with all its leaves, which are counted by
    multiplication and never listed. Every node's bound is at most that of its leaves, so that what is taken off the
    heap last bounds all that is left.
    """

    name = "branch and bound"

    def __init__(self, space: Space, bounds: Bounds, capacity_bytes: float) -> None:
        self.space, self.bounds, self.capacity = space, bounds, capacity_bytes
        self.size = 0
        self.expired = False
        self.pruned: dict[str, int] = dict.fromkeys((STATE, ACTIVATIONS, ORDER, SAME), 0)
        self.partials = self.bounded = self.asked = 0
        self.nearest: tuple[float, Configuration | None] = (inf, None)
        self._heap: list[tuple[float, int, Configuration]] = []
        self._open: dict[Configuration, float] = {}
        self._start()

    def _start(self) -> None:
        for pp, tp, dp, ep in self.space.degrees():
            schedules = list(self.space.schedules(pp))
            for (b, m), recompute, sequence in product(
                self.space.batches(dp), self.space.recomputes(), self.space.sequence(tp)
            ):
                for legal in self._groups(schedules, pp, m):
                    leaves = 0
                    for name, v in legal:
                        leaves += len(self.space.zeros(dp, name)) * len(self.space.cuts(self._stages(name, pp, v)))
                    if not leaves:
                        continue
                    self.size += leaves
                    self.partials += 1
                    part = Configuration(pp, tp, dp, ep, *legal[0], 0, b, m, recompute, sequence, "")
                    seconds, size = self.bounds.partial(part)
                    if size > self.capacity:
                        self.pruned[STATE] += leaves
                        self._near(size, part)
                    else:
                        self._heap.append((seconds, _PARTIAL, part))
        heapify(self._heap)

    @staticmethod
    def _groups(schedules: Sequence[tuple[str, int]], pp: int, m: int) -> list[list[tuple[str, int]]]:
        """Return the (family, virtual stages) legal with m microbatches: those with overlap groups, and the others."""
        legal = [(name, v) for name, v in schedules if m in FAMILIES[name].microbatches(pp, v)]
        groups = [[each for each in legal if (each[0] in OVERLAPPING) == some] for some in (True, False)]
        return [group for group in groups if group]

    @staticmethod
    def _stages(schedule: str, pp: int, v: int) -> int:
        return Configuration(pp, 1, 1, 1, schedule, v, 0, 1, 1, "none", False, "").stages

    def _expand(self, part: Configuration) -> None:
        """Replace a partial assignment by its leaves, bounded."""
        bounds, m = self.bounds, part.num_microbatches
        schedules = self._groups(list(self.space.schedules(part.pp)), part.pp, m)
        mine = next(group for group in schedules if (part.schedule in OVERLAPPING) == (group[0][0] in OVERLAPPING))
        for name, v in mine:

            def leaf(cut: str, zero: int, name: str = name, v: int = v) -> Configuration:
                return Configuration(
                    part.pp, part.tp, part.dp, part.ep, name, v, zero, part.micro_batch, m, part.recompute,
                    part.sequence_parallel, cut,
                )  # fmt: skip

            cuts, zeros = self.space.cuts(self._stages(name, part.pp, v)), self.space.zeros(part.dp, name)
            if len({bounds.costs.of(leaf(cut, 0))[0] for cut in cuts}) < len(cuts):
                cuts = cuts[:1]
                self.pruned[SAME] += len(zeros)
            for cut, zero in product(cuts, zeros):
                config = leaf(cut, zero)
                self.bounded += 1
                need = bounds.memory_floor(config)
                if need > self.capacity:
                    state = max(bounds.static_bytes(config)) + bounds.context_bytes
                    self.pruned[STATE if state > self.capacity else ACTIVATIONS] += 1
                    self._near(need, config)
                else:
                    heappush(self._heap, (bounds.time_bound(config), _WHOLE, config))

    def _replay(self, config: Configuration) -> None:
        grid = get_family(config.schedule).grid(config.pp, config.num_microbatches, config.virtual_stages)
        need = self.bounds.memory_of_order(config, grid)
        if need > self.capacity:
            self.pruned[ORDER] += 1
            self._near(need, config)
        else:
            heappush(self._heap, (self.bounds.replay(config), _REPLAYED, config))

    def _near(self, need: float, config: Configuration) -> None:
        """Remember the configuration that comes nearest to fitting, for the day when none fits."""
        if need < self.nearest[0]:
            self.nearest = (need, config)

    def ask(self, n: int, threshold_s: float, deadline_s: float = inf) -> list[Configuration]:
        """Return up to ``n`` configurations that may take ``threshold_s`` or less; fewer at the deadline."""
        batch: list[Configuration] = []
        self.expired = False
        while self._heap and len(batch) < n and self._heap[0][0] <= threshold_s * ROUNDING:
            if time.perf_counter() > deadline_s:
                self.expired = True
                break
            bound, level, config = heappop(self._heap)
            if level == _PARTIAL:
                self._expand(config)
            elif level == _WHOLE:
                self._replay(config)
            else:
                batch.append(config)
                self._open[config] = bound
        self.asked += len(batch)
        return batch

    def tell(self, config: Configuration, step_time_s: float | None) -> None:
        """Hear of a configuration; its bound no longer counts."""
        self._open.pop(config, None)

    def bound(self) -> float:
        """Return a step time that nothing left can beat."""
        return min(self._heap[0][0] if self._heap else inf, min(self._open.values(), default=inf))
