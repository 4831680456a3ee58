"""Best-first branch and bound over the whole space."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import product
from math import inf
from typing import NamedTuple

from piper_core.names import Recompute
from piper_core.schedule.families import FAMILIES
from piper_core.schedule.grid import Layout
from search.bound import Bounds
from search.candidate import Score
from search.cost.memory import TIGHT_GAPS, USABLE
from search.generators.collecting import collecting_later
from search.generators.ladder import Ladder
from search.generators.other_orders import PROMISING, OtherOrders
from search.loads import Choice
from search.objective import Objective
from search.partial_bound import OVERLAPPING
from search.space import SOME, USUAL, Configuration, Degrees, Space
from search.stage_costs import shards_of

_DEGREES, _PARTIAL, _SHAPE, _FITTING, _WHOLE, _REPLAYED = range(6)
ROUNDING = 1 + 1e-9
"""What a bound may exceed a step time by that it equals, since they add up in different orders."""

STATE, ACTIVATIONS, ORDER, TIME, SAME, NEEDLESS = (
    "memory: state alone", "memory: state and activations", "memory: along the order", "time bound",
    "same layers per stage as another", "recomputes more than memory asks for",
)  # fmt: skip


class _Bounded(NamedTuple):
    """A schedule and cut of a partial assignment: seconds (bytes, where memory is made small) at least, and the numbers
    of layers that may be recomputed, or the policy, and ZeRO stages of its leaves."""

    least: float
    choice: Choice
    cut: str
    recompute: tuple[str, ...]
    zeros: list[int]


class BestFirst:
    """Expands the assignment with the least bound first: degrees and mesh order; then microbatch, recompute, sequence
    parallelism, and whether the schedule has overlap groups; then schedule and cuts; then what memory leaves of these;
    then ZeRO stage; then what data parallelism adds to the order that the family emits. Of the numbers of layers that
    may be recomputed, the next is looked at after the one before.

    A node whose least memory, with what the allocator may lose on a full device, exceeds what is usable of
    ``capacity_bytes`` is dropped with all its leaves, which are counted by multiplication and never listed. Every
    node's bound is at most that of its leaves, so that what is taken off the heap last bounds all that is left. A leaf
    is asked for with the first bucket, prefetch and streams that are legal; its bound without those
    (:meth:`rest_bound`) holds for the others.
    """

    name = "branch and bound"

    def __init__(
        self, space: Space, bounds: Bounds, capacity_bytes: float, *, objective: Objective = "throughput"
    ) -> None:
        self.space, self.bounds, self.capacity, self.gap = space, bounds, USABLE * capacity_bytes, TIGHT_GAPS[1]
        self.by_memory = objective == "memory"
        self.size = 0
        self.expired = self.paused = False
        self.pruned: dict[str, int] = dict.fromkeys((STATE, ACTIVATIONS, ORDER, SAME, NEEDLESS), 0)
        self.partials = self.bounded = self.asked = 0
        self.nearest: tuple[float, Configuration | None] = (inf, None)
        self._heap: list[tuple[float, int, Configuration]] = []
        self._open: dict[Configuration, float] = {}
        self._rest: list[tuple[float, int]] = []
        self._others = OtherOrders(bounds, self.gap, self.capacity)
        self._threshold = inf
        self._left: dict[Configuration, list[_Bounded]] = {}
        self._shapes: dict[Configuration, tuple[Ladder, list[int]]] = {}
        self._more: dict[Configuration, Ladder] = {}
        self._fitting: dict[Configuration, list[str]] = {}
        self._schedules = lru_cache(maxsize=None)(lambda pp: list(space.schedules(pp)))
        self._finer = lru_cache(maxsize=None)(space.fine)
        self._recomputes = space.recomputes()
        self._zeros = lru_cache(maxsize=None)(space.zeros)
        self._cuts = lru_cache(maxsize=None)(space.cuts)
        self._counts = lru_cache(maxsize=None)(space.counts)
        self._groups = lru_cache(maxsize=None)(self._legal)
        self._leaves = lru_cache(maxsize=None)(self._count)
        self._start()

    def _start(self) -> None:
        for degrees in self.space.degrees():
            leaves = sum(
                self._leaves(degrees.pp, m, degrees.dp * degrees.cp, degrees.ep, overlaps, None)
                for _, m in self.space.batches(degrees.dp)
                for overlaps in (True, False)
            ) * len(self.space.sequence(degrees.tp, degrees.cp))
            if not leaves:
                continue
            self.size += leaves
            self.partials += 1
            part, seconds, size = self._bounded(degrees)
            if size > self.capacity:
                self.pruned[STATE] += leaves
                self._near(size, part)
            else:
                self._heap.append((size if self.by_memory else seconds, _DEGREES, part))
        heapify(self._heap)

    def _bounded(self, degrees: Degrees) -> tuple[Configuration, float, float]:
        """Return (a part with those degrees, seconds and bytes at least of all of them): a sequence takes least time in
        the largest microbatch, and none with collectives hidden and nothing recomputed."""
        pp, tp, dp, ep, cp, outer = degrees
        share = self.space.global_batch // dp
        parts = [
            Configuration(pp, tp, dp, ep, OVERLAPPING[0], 1, 0, share, 1, "none", sequence, "", cp, outer)
            for sequence in self.space.sequence(tp, cp)
        ]
        bounds = [self.bounds.degrees(part) for part in parts]
        return replace(parts[0], micro_batch=0), min(seconds for seconds, _ in bounds), min(size for _, size in bounds)

    def _legal(self, pp: int, m: int, overlaps: bool) -> list[tuple[str, int]]:
        """Return the (family, virtual stages) legal with m microbatches, those with overlap groups or the others."""
        return [
            (name, v) for name, v in self._schedules(pp)
            if m in FAMILIES[name].microbatches(pp, v) and (name in OVERLAPPING) == overlaps
        ]  # fmt: skip

    def _count(self, pp: int, m: int, replicas: int, ep: int, overlaps: bool, policy: str | None) -> int:
        """Return the number of leaves under a partial assignment; of all policies where none is named."""
        total = 0
        for name, v in self._groups(pp, m, overlaps):
            stages, layout = _stages(name, pp, v), FAMILIES[name].layout
            policies = len(self._recomputes) if policy is None else policy in self._recomputes
            if policy in (None, SOME):
                policies += len(self._counts(stages))
            fine = sum(len(self._finer(replicas, zero, ep, layout)) for zero in self._zeros(replicas, name))
            total += policies * len(self._cuts(stages)) * fine
        return total

    def _divide(self, found: Configuration, bound: float) -> None:
        """Replace degrees by the partial assignments that have them."""
        pp, tp, dp, ep, cp = found.pp, found.tp, found.dp, found.ep, found.cp
        for (b, m), policy, sequence, groups in product(
            self.space.batches(dp), [*self._recomputes, SOME], self.space.sequence(tp, cp), (True, False)
        ):
            leaves = self._leaves(pp, m, dp * cp, ep, groups, policy)
            if not leaves:
                continue
            self.partials += 1
            first = self._groups(pp, m, groups)[0]
            part = Configuration(pp, tp, dp, ep, *first, 0, b, m, policy, sequence, "", cp, found.outer)
            seconds, size = self.bounds.partial(part, self.gap)
            if size > self.capacity:
                self.pruned[STATE if self.bounds.partial_state(part) > self.capacity else ACTIVATIONS] += leaves
                self._near(size, part)
            else:
                least = self.bounds.partial(part)[1] if self.by_memory else seconds
                heappush(self._heap, (max(bound, least), _PARTIAL, part))

    def _expand(self, part: Configuration, bound: float) -> None:
        """Replace a partial assignment by its leaves that are of interest; it stands for the others."""
        found, left = self._left.pop(part, None), list[_Bounded]()
        for each in self._bound(part) if found is None else found:
            if each.least > self._threshold:
                left.append(each)
                continue
            first = _node(part, each.choice, each.cut, each.recompute[0], each.zeros[-1])
            self._shapes[first] = Ladder(first, each.recompute), each.zeros
            heappush(self._heap, (max(bound, each.least), _SHAPE, first))
        if left:
            self._left[part] = left
            heappush(self._heap, (max(bound, min([each.least for each in left])), _PARTIAL, part))

    def _bound(self, part: Configuration) -> list[_Bounded]:
        """Return what there is under a partial assignment: each schedule and cut, bounded."""
        bounds, replicas, layers = self.bounds, part.dp * part.cp, self.bounds.costs.counts
        pp, m, b, shard = part.pp, part.num_microbatches, part.micro_batch, shards_of(part)
        found: list[tuple[Choice, str, tuple[str, ...], list[int]]] = []
        for name, v in self._groups(pp, m, part.schedule in OVERLAPPING):
            stages, layout = _stages(name, pp, v), FAMILIES[name].layout
            policies = tuple(self._counts(stages)) if part.recompute == SOME else (part.recompute,)
            zeros = self._zeros(replicas, name)
            if not (policies and zeros):
                continue
            cuts = {cut: layers(layout, pp, v, cut, shard, b, policies[0]) for cut in self._cuts(stages)}
            if len(set(cuts.values())) < len(cuts):
                cuts = dict([*cuts.items()][:1])
                same = sum(len(self._finer(replicas, zero, part.ep, layout)) for zero in zeros)
                self.pruned[SAME] += same * len(policies)
            found += [(Choice(name, v, counts, policies[0]), cut, policies, zeros) for cut, counts in cuts.items()]
        self.bounded += len(found)
        if self.by_memory:
            least = [bounds.memory_floor(_node(part, choice, cut, policies[-1], zeros[-1]))
                     for choice, cut, policies, zeros in found]  # fmt: skip
        else:
            least = bounds.busy_bounds(part, [choice for choice, *_ in found]).tolist() if found else []
        return [_Bounded(seconds, *each) for seconds, each in zip(least, found, strict=True)]

    def _fit(self, node: Configuration, bound: float) -> None:
        """Find the first leaf of a node of :meth:`_expand` that leaves room for the rest, at the highest ZeRO stage,
        which holds least; they recompute more and more."""
        bounds, (leaves, zeros), lowest = self.bounds, self._shapes.pop(node), 0
        if not self.by_memory:
            lowest = self._first(leaves, any_order=True)
            if lowest < len(leaves):
                least = self._least(leaves[lowest], zeros)
                if least > self._threshold:  # none is of interest yet
                    self.bounded += len(zeros)
                    self._shapes[node] = leaves, zeros
                    heappush(self._heap, (least, _SHAPE, node))
                    return
                self.bounded += self._others.add(leaves.above(lowest), zeros, bound, self._threshold)
        first = max(lowest, self._first(leaves, any_order=False))
        if first == len(leaves):
            fine = sum(len(self._finer(node.dp * node.cp, zero, node.ep, node.layout)) for zero in zeros)
            most = leaves[-1]
            self._too_big(most, bounds.memory_floor(most, self.gap), fine * len(leaves))
            return
        node = leaves[first]
        if not self.by_memory:
            least = self._least(node, zeros) if first > lowest else 0.0
            bound = max(bound, least if least > self._threshold else bounds.order_bound(node))
        self._shapes[node] = leaves, zeros
        heappush(self._heap, (bound, _FITTING, node))

    def _least(self, node: Configuration, zeros: list[int]) -> float:
        """Return seconds that a node takes at least in any order, and so do those that recompute more, where that is
        above the threshold; else some that are not. ZeRO-1 tends to take least."""
        least = inf
        for zero in sorted(zeros, key=lambda zero: zero != 1):
            least = min(least, self.bounds.time_bound(replace(node, zero=zero), enough=self._threshold))
            if least <= self._threshold:
                break
        return least

    def _spread(self, node: Configuration, bound: float) -> None:
        """Replace a node of :meth:`_fit` by its leaves."""
        leaves, zeros = self._shapes.pop(node)
        for zero in zeros:
            fine = self._finer(node.dp * node.cp, zero, node.ep, node.layout)
            if fine:
                self._next(leaves.with_zero(zero, *fine[0]), len(fine), bound)

    def _next(self, leaves: Ladder, fine: int, bound: float) -> None:
        """Push the first of some leaves that leaves room for the rest; they recompute more and more, and hold less and
        less. ``bound`` holds for all."""
        bounds = self.bounds
        self.bounded += 1
        if self.by_memory:
            for leaf in leaves:
                self._push(leaf, bound)
            return
        first = self._first(leaves, any_order=False)
        if first:
            most = leaves[first - 1]
            self._too_big(most, bounds.memory_floor(most, self.gap), first * fine)
        if first < len(leaves):
            leaf = leaves[first]
            if first + 1 < len(leaves):
                self._more[leaf] = leaves.above(first + 1)
            least = bounds.time_bound(leaf, self.gap, self.capacity, self._threshold)
            heappush(self._heap, (max(bound, least), _WHOLE, leaf))

    def _first(self, leaves: Ladder, *, any_order: bool) -> int:
        """Return the first of some leaves, each with less to hold than the one before, whose floor leaves room."""
        bounds, low = self.bounds, leaves[0]
        floor = bounds.any_order_floor(low, self.gap) if any_order else bounds.memory_floor(low, self.gap)
        if floor <= self.capacity or len(leaves) == 1:
            return int(floor > self.capacity)
        floors = bounds.floors(low, leaves.recompute, self.gap, any_order=any_order)
        return int((floors > self.capacity).sum())

    def _push(self, leaf: Configuration, bound: float) -> None:
        """Push a leaf by its memory."""
        need = self.bounds.memory_floor(leaf, self.gap)
        if need > self.capacity:
            self._too_big(leaf, need, self._fine(leaf))
        else:
            self._others.add_memory(leaf, bound)
            heappush(self._heap, (max(bound, self.bounds.memory_floor(leaf)), _WHOLE, leaf))

    def _too_big(self, leaf: Configuration, need: float, count: int) -> None:
        static = max(self.bounds.static_bytes(leaf)) + self.bounds.context_bytes
        self.pruned[STATE if static > self.capacity else ACTIVATIONS] += count
        self._near(need, leaf)

    def _fine(self, config: Configuration) -> int:
        return len(self._finer(config.dp * config.cp, config.zero, config.ep, config.layout))

    def _replay(self, config: Configuration, bound: float) -> None:
        if self._needless(config):
            self._drop(config, NEEDLESS)
            return
        need = self.bounds.memory_of_order(config, self.gap)
        if need > self.capacity:
            self.pruned[ORDER] += self._fine(config)
            self._near(need, config)
            self._go_on(config, bound)
        else:
            more = self.bounds.memory_of_order(config) if self.by_memory else self.bounds.replay(config)
            heappush(self._heap, (max(bound, more), _REPLAYED, config))

    def _go_on(self, config: Configuration, bound: float) -> None:
        """Look at the next number of recomputed layers, since this one does not fit."""
        if more := self._more.pop(config, None):
            self._next(more, self._fine(config), bound)

    def _drop(self, config: Configuration, reason: str) -> None:
        """Leave out a configuration, and those that recompute more layers."""
        self.pruned[reason] += self._fine(config) * (1 + len(self._more.pop(config, ())))

    def _needless(self, config: Configuration) -> bool:
        """Say whether the same configuration fits with part of the recompute: a longer action never makes the step of
        one order shorter."""
        fitting = self._fitting.get(replace(config, recompute=""), ())
        return not self.by_memory and any(less(other, config.recompute) for other in fitting)

    def _near(self, need: float, config: Configuration) -> None:
        """Remember the configuration that comes nearest to fitting, for the day when none fits."""
        if need < self.nearest[0]:
            self.nearest = (need, config)

    def ask(self, n: int, threshold_s: float = inf, deadline_s: float = inf, most: float = inf) -> list[Configuration]:
        """Return up to ``n`` configurations whose value may be the threshold or less (seconds, or bytes where memory is
        made small); fewer at the deadline (``expired``), or after ``most`` nodes (``paused``)."""
        with collecting_later():
            return self._ask(n, threshold_s, deadline_s, most)

    def _ask(self, n: int, threshold_s: float, deadline_s: float, most: float) -> list[Configuration]:
        batch: list[Configuration] = []
        later: list[tuple[float, int, Configuration]] = []
        asked: set[Configuration] = set()
        self.expired, self.paused, self._threshold = False, False, threshold_s * ROUNDING
        while self._heap and len(batch) < n and self._heap[0][0] <= threshold_s * ROUNDING:
            if time.perf_counter() > deadline_s:
                self.expired = True
                break
            if most <= 0:
                self.paused = True
                break
            most -= 1
            bound, level, config = heappop(self._heap)
            if level == _REPLAYED and self._needless(config):
                self._drop(config, NEEDLESS)
            elif level == _DEGREES:
                self._divide(config, bound)
            elif level == _PARTIAL:
                self._expand(config, bound)
            elif level == _SHAPE:
                self._fit(config, bound)
            elif level == _FITTING:
                self._spread(config, bound)
            elif level == _WHOLE:
                self._replay(config, bound)
            elif (alike := replace(config, recompute="")) in asked:  # one answer may make the other needless
                later.append((bound, level, config))
            else:
                asked.add(alike)
                batch.append(config)
                self._open[config] = bound
        for each in later:
            heappush(self._heap, each)
        self.asked += len(batch)
        return batch

    def tell(self, config: Configuration, score: Score | None) -> None:
        """Hear of a configuration (None: it cannot run). Its bound no longer counts, but that of the finer choices it
        stands for does; where it fits, none that recomputes more is of interest."""
        bound = self._open.pop(config)
        others = self._fine(config) - 1
        if others:
            needs_replay = config.zero == 3 and not self.by_memory
            loose = self.bounds.replay(replace(config, bucket=0)) if needs_replay else bound
            self._rest.append((loose, others))
        if score is not None and score.fits == "yes":
            self._fitting.setdefault(replace(config, recompute=""), []).append(config.recompute)
            more = len(self._more.pop(config, ()))
            self.pruned[NEEDLESS] += more * (others + 1)
        else:
            self._go_on(config, bound)

    def bound(self) -> float:
        """Return a step time that nothing left can beat, but for other buckets, prefetches and streams of what was
        asked for (:meth:`rest_bound`)."""
        return min(self._heap[0][0] if self._heap else inf, min(self._open.values(), default=inf))

    def rest_bound(self) -> float:
        """Return a step time that no other bucket, prefetch or streams of a configuration asked for can beat."""
        return min((bound for bound, _ in self._rest), default=inf)

    def any_order_bound(self) -> float:
        """Return a step time that no order of compute can beat, be it of a family or not, of any configuration."""
        return self._others.bound(self.bound(), self._threshold)

    def promising(self) -> list[Configuration]:
        """Return the configurations whose bounds of any order are least, least first; other orders of these may gain
        most."""
        return [] if self.by_memory else [config for _, config in self._others.promising()]

    def settled(self) -> bool:
        """Say whether :meth:`promising` has all that it ever will."""
        found = self._others.promising()
        return len(found) == PROMISING and found[-1][0] <= self.bound()

    def bound_of(self, config: Configuration) -> float:
        """Return seconds that a configuration takes at least in any order that fits."""
        return self.bounds.time_bound(config, self.gap, self.capacity)

    def rest(self, threshold_s: float) -> int:
        """Return how many finer choices of what was asked for may take ``threshold_s`` or less."""
        return sum(count for bound, count in self._rest if bound <= threshold_s)


def _node(part: Configuration, choice: Choice, cut: str, policy: str, zero: int) -> Configuration:
    """Return a partial assignment with the rest assigned."""
    return Configuration(
        part.pp, part.tp, part.dp, part.ep, choice.schedule, choice.virtual_stages, zero, part.micro_batch,
        part.num_microbatches, policy, part.sequence_parallel, cut, part.cp, part.outer, *USUAL,
    )  # fmt: skip


def less(policy: str, than: str) -> bool:
    """Say whether one recompute policy repeats part of what another does."""
    if policy.isdecimal() and than.isdecimal():
        return int(policy) < int(than)
    return policy != than and (policy == Recompute.NONE or than == Recompute.FULL)


def _stages(schedule: str, pp: int, v: int) -> int:
    return pp * (1 if FAMILIES[schedule].layout is Layout.BIDIRECTIONAL else v)
