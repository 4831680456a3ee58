"""What one row takes at least in any order that keeps its memory, found action by action.

A row works for microbatches that come and go: each does the forwards of the row's stages in order, then their
backwards, and between two of these is elsewhere for as long as other rows need for it at least. Microbatches of a flow
are alike: let the first that may do an action be the first that does, and neither what waits for what nor what is held
changes. So an order is how many have done what, step by step. All of these are followed, those first that have lost
least (A*: Hart, Nilsson, Raphael, IEEE Transactions on Systems Science and Cybernetics 4, 1968): seconds in which
nothing is computed, and exchanges of actions that are in no overlap group, are lost for good. What other rows do beside
is free, which makes this less than any step takes, not its time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import accumulate
from operator import le
from typing import NamedTuple

MOST = 3000
"""Beginnings of orders that are followed; where there are more, the least of those left is what holds."""
ROUNDING = 1e-9


class Work(NamedTuple):
    """One action. Seconds: by itself (``whole``); in an overlap group of its row's ``compute``, and from its start to
    its result (``chain``). It computes in ``fewest`` to ``most`` pieces there, none longer than ``piece`` but that the
    first and the last may be by ``ends``, both together."""

    whole: float
    compute: float
    chain: float
    fewest: int
    most: int
    piece: float
    ends: float

    def beyond(self, other: Work) -> float:
        """Return the most seconds that this one computes before another of its group starts, or after it is done.

        Members take turns: the i-th of n pieces comes at (2 i + 1) / 2 n of the way. So before the first of n' pieces,
        and after the last, are at most (n / n' + 1) / 2.
        """
        return min(self.compute, (self.most + other.fewest) // (2 * other.fewest) * self.piece + self.ends)


class Visit(NamedTuple):
    """A stage on a row: its forward, its backward, and the two parts of that where it may be cut (``inward`` for the
    stage before, ``weight`` later). Bytes: what a forward keeps for the backward, what stays of it between the two
    parts, and what a backward needs besides when it begins. Seconds to ``reduce`` its gradients once a step."""

    forward: Work
    backward: Work
    inward: Work | None
    weight: Work | None
    saved: float
    stash: float
    workspace: float
    reduce: float

    @property
    def both(self) -> float:
        """Seconds of compute of a backward, whole or in two parts."""
        if self.inward is None or self.weight is None:
            return self.backward.compute
        return min(self.backward.compute, self.inward.compute + self.weight.compute)

    @property
    def exposed(self) -> float:
        """Seconds of exchange of a backward of which no part is in an overlap group."""
        parts = [self.backward.whole]
        if self.inward is not None and self.weight is not None:
            parts.append(self.inward.whole + self.weight.whole)
        return min(parts) - self.both


class Flow(NamedTuple):
    """The stages of a row that each of some ``microbatches`` passes. Seconds at least: until the first may ``enter``;
    ``away`` between one action and the next (one less than actions); and after the last's result (``leave``)."""

    visits: tuple[Visit, ...]
    microbatches: int
    enter: float
    away: tuple[float, ...]
    leave: float


class _Begun(NamedTuple):
    """The beginning of an order: when it ends, and when the step may; when the stages that are done with are reduced,
    and what the others take for that; seconds of compute left and bytes held; how many have done each action; how many
    weight gradients are due, by stage; when those come back who did the action before each, but not that."""

    clock: float
    end: float
    reduced: float
    reductions: float
    left: float
    held: float
    done: tuple[int, ...]
    due: tuple[int, ...]
    back: tuple[tuple[float, ...], ...]


class _Next(NamedTuple):
    """What may be done next: the action (-1: a weight gradient) of a stage, from when on; which part it is of the
    compute left, how it changes the bytes held and the weight gradients due, and the bytes needed besides."""

    action: int
    stage: int
    start: float
    work: Work
    part: float
    held: float
    due: int
    workspace: float


def least_s(flows: Sequence[Flow], room: float, enough: float, *, overlapping: bool, late: float = 0.0) -> float:
    """Return the seconds that a row with ``room`` bytes takes at least from when it may start until all is reduced,
    ``late`` after its last action; ``enough`` where that is less. A group may overlap a forward with a backward, or a
    part of one, where they are ``overlapping``."""
    row = _Row(flows, room * (1 + ROUNDING), overlapping, late)
    first = row.begin()
    heap, serial = [(row.bound(first), 0, 0, first)], 0
    known: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[float, ...]]] = {}
    for _ in range(MOST):
        if not heap or heap[0][0] >= enough:
            return enough
        if row.complete(heap[0][-1]):
            break
        before, *_, begun = heappop(heap)
        for made in row.following(begun):
            bound = max(before, row.bound(made))  # what holds for a beginning holds for what begins so
            if bound < enough and _new(made, known.setdefault((made.done, made.due), [])):
                serial += 1
                heappush(heap, (bound, -sum(made.done), serial, made))
    return min(heap[0][0], enough) if heap else enough


def _new(made: _Begun, others: list[tuple[float, ...]]) -> bool:
    """Say whether none of the others is as early in all; if so, keep it in place of those that are later in all."""
    times = made.clock, made.end, made.reduced, *(t for queue in made.back for t in queue)
    for other in others:
        if all(map(le, other, times)):
            return False
    others[:] = [other for other in others if not all(map(le, times, other))]
    others.append(times)
    return True


class _Row:
    """The actions of a row, flow by flow, each after the one before but the first of a flow."""

    def __init__(self, flows: Sequence[Flow], room: float, overlapping: bool, late: float) -> None:
        self.room, self.overlapping, self.late = room, overlapping, late
        self.visits = [visit for flow in flows for visit in flow.visits]
        self.stage: list[int] = []
        self.forward: list[bool] = []
        self.first: list[bool] = []
        self.total: list[int] = []
        self.away: list[float] = []
        self.leave: list[float] = []
        for start, flow in zip(accumulate([len(flow.visits) for flow in flows], initial=0), flows, strict=False):
            n = len(flow.visits)
            self.stage += [*range(start, start + n), *reversed(range(start, start + n))]
            self.forward += [True] * n + [False] * n
            self.first += [True] + [False] * (2 * n - 1)
            self.total += [flow.microbatches] * (2 * n)
            self.away += [flow.enter, *flow.away]
            self.leave += [0.0] * (2 * n - 1) + [flow.leave]
        self.exposed = min(visit.exposed for visit in self.visits)
        self.backward = {s: a for a, (s, f) in enumerate(zip(self.stage, self.forward, strict=True)) if not f}

    def begin(self) -> _Begun:
        left = 0.0
        for total, stage, forward in zip(self.total, self.stage, self.forward, strict=True):
            left += total * (self.visits[stage].forward.compute if forward else self.visits[stage].both)
        none = (0,) * len(self.stage)
        reductions = sum(visit.reduce for visit in self.visits)
        due, back = (0,) * len(self.visits), ((),) * len(self.stage)
        return _Begun(0.0, 0.0, 0.0, reductions, left, 0.0, none, due, back)

    def complete(self, begun: _Begun) -> bool:
        return begun.done == tuple(self.total) and not any(begun.due)

    def bound(self, begun: _Begun) -> float:
        """Return when an order that begins so is done at the earliest: each forward left may share a group with a
        part of one backward, and of more backwards are left by as many as are under way."""
        under_way = sum(n if forward else -n for n, forward in zip(begun.done, self.forward, strict=True))
        computed = begun.clock + begun.left + under_way * self.exposed
        reduced = max(begun.reduced, begun.clock) + begun.reductions if begun.reductions > 0.0 else begun.reduced
        return max(computed + self.late, begun.end, reduced)

    def following(self, begun: _Begun) -> Iterator[_Begun]:
        """Yield the beginnings that are longer by one action or by an overlap group, of those that have room."""
        forwards: list[_Next] = []
        backwards: list[_Next] = []
        for action, (done, total) in enumerate(zip(begun.done, self.total, strict=True)):
            if done < total and (self.first[action] or begun.back[action]):
                start = self.away[action] if self.first[action] else begun.back[action][0]
                (forwards if self.forward[action] else backwards).extend(self._ways(action, max(begun.clock, start)))
        for stage, due in enumerate(begun.due):
            visit = self.visits[stage]
            if due and visit.weight is not None:
                part = visit.weight.compute
                backwards.append(_Next(-1, stage, begun.clock, visit.weight, part, -visit.stash, -1, 0.0))
        for one in (*forwards, *backwards):
            if begun.held + max(one.held, one.workspace) <= self.room:
                end = one.start + one.work.whole
                yield self._after(begun, end, ((one, end),))
        for one in forwards if self.overlapping else ():
            for two in backwards:
                if begun.held + max(one.held + two.held, two.workspace) <= self.room:
                    end, *results = meet(one.start, one.work, two.start, two.work)
                    yield self._after(begun, end, ((one, results[0]), (two, results[1])))

    def _ways(self, action: int, start: float) -> Iterator[_Next]:
        """Yield what an action may be: a backward whole, or its first part."""
        stage = self.stage[action]
        visit = self.visits[stage]
        if self.forward[action]:
            yield _Next(action, stage, start, visit.forward, visit.forward.compute, visit.saved, 0, 0.0)
            return
        yield _Next(action, stage, start, visit.backward, visit.both, -visit.saved, 0, visit.workspace)
        if visit.inward is not None and visit.weight is not None:
            part, held = visit.both - visit.weight.compute, visit.stash - visit.saved
            yield _Next(action, stage, start, visit.inward, part, held, 1, visit.workspace)

    def _after(self, begun: _Begun, end: float, chosen: Sequence[tuple[_Next, float]]) -> _Begun:
        """Return a beginning with what was chosen, which gives its results when it says, and leaves the row at the
        end."""
        done, due, back = list(begun.done), list(begun.due), list(begun.back)
        ends, left, held = begun.end, begun.left, begun.held
        reduced, reductions = begun.reduced, begun.reductions
        for one, result in chosen:
            due[one.stage] += one.due
            left -= one.part
            held += one.held
            if one.action >= 0:
                done[one.action] += 1
            if not due[one.stage] and done[last := self.backward[one.stage]] == self.total[last]:
                reduced = max(reduced, one.start) + self.visits[one.stage].reduce
                reductions -= self.visits[one.stage].reduce
            if one.action < 0:
                continue
            if not self.first[one.action]:
                back[one.action] = back[one.action][1:]
            after = one.action + 1
            if after < len(back) and not self.first[after]:
                back[after] = (*back[after], result + self.away[after])
            else:
                ends = max(ends, result + self.leave[one.action])
        waits = tuple([tuple([max(t, end) for t in queue]) for queue in back])
        return _Begun(end, ends, reduced, reductions, left, held, tuple(done), tuple(due), waits)


def meet(a: float, one: Work, b: float, two: Work) -> tuple[float, float, float]:
    """Return when an overlap group leaves its row, and when its two members, which may begin at ``a`` and ``b``, give
    their results, at the earliest."""
    before_two, before_one = one.beyond(two), two.beyond(one)
    first, both = min(a, b), one.compute + two.compute
    rest_one, rest_two = max(0.0, one.compute - before_two), max(0.0, two.compute - before_one)
    end = max(first + both, a + one.compute + rest_two, b + two.compute + rest_one, a + one.chain, b + two.chain)
    done_one = max(a + max(one.chain, one.compute), first + one.compute + rest_two)
    done_two = max(b + max(two.chain, two.compute), first + two.compute + rest_one)
    if rest := rest_one + rest_two:  # then the first piece of each comes before the last of the other
        done_one, done_two = max(done_one, b + rest), max(done_two, a + rest)
    return end, done_one, done_two
