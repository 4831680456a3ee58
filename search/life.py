"""How long rows hold the activations of microbatches at least, and how much time that takes of all.

A row that holds x of its room for t seconds, once for each of m microbatches, needs m x t seconds; but of what takes
more than half of the room it holds one at a time. Functions that map parts of the room to weights, such that parts that
fit together weigh at most 1, say both (dual feasible functions: Fekete and Schepers, Mathematical Methods of Operations
Research 60, 2004): weights times seconds, added up, never exceed the time that there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor

import numpy as np

from piper_core.ir.dag import Floats, Ints

MOST = 4
"""Greatest number held at once for which a row is looked at as so many places."""
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds that memory costs a row at least: ``hold`` in all, or idle before its first backward (``fill``) and after
    its last forward (``drain``) besides its work."""

    hold: float
    fill: float
    drain: float


NONE = Waits(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Stages:
    """All stages of a pipeline for one microbatch. Bytes from F to the backward's end, and from BI to BW; seconds of F,
    of B (BI where weights follow apart), and of the ``hop`` to the next stage. Then what they are at least where a row
    begins or ends with them, or overlaps them: of F from its second piece; of F, B and BW what a row is busy with (BW
    takes nothing where it is never apart)."""

    saved: Sequence[float]
    stash: Sequence[float]
    forward: Sequence[float]
    backward: Sequence[float]
    hop: Sequence[float]
    rest: Sequence[float]
    forward_work: Sequence[float]
    backward_work: Sequence[float]
    weight_work: Sequence[float]

    def through(self, first: int, last: int) -> float:
        """Return the seconds of a forward from the start of stage ``first`` to that of ``last``."""
        return sum(self.forward[first:last]) + sum(self.hop[first:last])

    def back(self, last: int, first: int) -> float:
        """Return the seconds of a backward from the end of stage ``last`` to that of ``first``."""
        return sum(self.backward[first:last]) + sum(self.hop[first:last])

    def beyond(self, last: int) -> float:
        """Return the seconds from the end of the forward of stage ``last`` to the start of its backward."""
        return sum(self.forward[last + 1 :]) + sum(self.backward[last + 1 :]) + 2 * sum(self.hop[last:])


@dataclass(frozen=True, slots=True)
class Life:
    """What one microbatch of each flow holds on a row: (bytes, seconds) one after another.

    A row's first backward starts no earlier than ``first`` seconds after the step, its last action ends ``last`` after
    its last forward at least. Work in seconds for each byte that it leaves, or that it frees, is at most the rates;
    ``forward_work`` is that of a microbatch's forwards.
    """

    phases: tuple[tuple[float, float], ...]
    first: float
    last: float
    forward_work: float
    forward_rate: float
    backward_rate: float

    def seconds(self, room: float, enough: float) -> float:
        """Return how long a row with ``room`` bytes is at it for one microbatch of each flow, at least; what is below
        ``enough`` may be less than that."""
        area = self.weigh(room, 0)
        if 2 * area <= enough:  # no function weighs anything more than double
            return area
        return max(area, *(self.weigh(room, places) for places in range(1, MOST + 1)))

    def weigh(self, room: float, places: int) -> float:
        """Return weights times seconds."""
        if not places:
            return sum([size * seconds for size, seconds in self.phases]) / room
        scale = (places + 1) * (1 - ROUNDING) / room
        return sum([floor(size * scale) * seconds for size, seconds in self.phases]) / places

    def fill(self, room: float) -> float:
        """Return how long a row is idle before its first backward at least: what it does until then stays held."""
        return self.first - room * self.forward_rate

    def drain(self, room: float) -> float:
        """Return how long a row is idle after its last forward at least: what it does from then on was held."""
        return self.last - room * self.backward_rate


def life_of(flows: Sequence[Sequence[int]], stages: Stages, *, overlapping: bool) -> Life:
    """Return what a row holds of one microbatch of each flow, whose stages are given in order.

    A microbatch's activations of a stage are there from the start of its forward to the end of its backward. Of an
    overlap group, a forward and a backward, they are there to its start alone, but the forward that comes in their
    place waits for the backward too.
    """
    saved, back, weights = stages.saved, stages.backward, stages.weight_work
    own = stages.rest if overlapping else stages.forward
    mine = [s for flow in flows for s in flow]
    least = min([stages.backward_work[s] for s in mine])
    phases: list[tuple[float, float]] = []
    firsts, lasts = [], []
    for flow in flows:
        first, last, held = flow[0], flow[-1], sum([saved[s] for s in flow])
        later = stages.beyond(last)
        phases.append((held, own[last] + (max(later, least) if overlapping else later + back[last])))
        for s, t in zip(reversed(flow[:-1]), reversed(flow[1:]), strict=True):  # between a stage and the one outside it
            held -= saved[t]
            between = own[s] - stages.forward[s] + stages.through(s, t) + stages.back(t, s)
            phases.append((held, between + (back[t] - back[s] if overlapping else 0.0)))
        firsts.append(stages.through(0, last) + own[last] + later)
        lasts.append(later + back[last] + stages.back(last, first) - back[first] + stages.backward_work[first]
                     + weights[first])  # fmt: skip
    rates = [(stages.backward_work[s] + weights[s]) / saved[s] for s in mine]
    rates += [weights[s] / stages.stash[s] for s in mine if weights[s]]
    forward_rate = max([stages.forward_work[s] / saved[s] for s in mine])
    forward_work = sum([stages.forward_work[s] for s in mine])
    return Life(tuple(phases), min(firsts), min(lasts), forward_work, forward_rate, max(rates))


@dataclass(frozen=True, slots=True)
class Delays:
    """What weight gradients cost, computed at once or later, by stage (and flow): at once, all rows hold what they have
    of the microbatch (``held``, shape (rows, n)) for so many ``seconds`` more; later, its own ``row`` holds the
    ``stash`` for as long."""

    held: Floats
    stash: Floats
    row: Ints
    seconds: Floats

    def weigh(self, room: Floats, places: int) -> float:
        """Return weights times seconds, over all rows with ``room`` bytes each."""
        once, later = self.held / room[:, None], self.stash / room[self.row]
        if places:
            scale = (places + 1) * (1 - ROUNDING)
            once, later = np.floor(once * scale) / places, np.floor(later * scale) / places
        return float(np.minimum(once.sum(axis=0), later) @ self.seconds)


def delays_of(rows: Sequence[Sequence[Sequence[int]]], stages: Stages, *, overlapping: bool) -> Delays:
    """Return the delays of a pipeline whose rows have flows as for :func:`life_of`; where they have two, microbatches
    pass each row in one of both directions."""
    places = [(t, r, len(flows) > 1 and t != r) for r, flows in enumerate(rows) for flow in flows for t in flow]
    held = np.zeros((len(rows), len(places)))
    for n, (t, _, back) in enumerate(places):
        for s, row, other in places:
            if other is back and (s < t or (s == t and not overlapping)):
                held[row, n] += stages.saved[s]
    at, row_of = [t for t, _, _ in places], [row for _, row, _ in places]
    return Delays(
        held, np.asarray(stages.stash)[at], np.asarray(row_of, np.int32), np.asarray(stages.weight_work)[at]
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Lives:
    """What rows hold of a microbatch, and the stages that it is found from."""

    stages: Stages
    rows: list[Life]
    delays: Delays


def lives_of(rows: Sequence[Sequence[Sequence[int]]], stages: Stages, *, overlapping: bool) -> Lives:
    """Return what rows hold, each row's flows given as to :func:`life_of`."""
    return Lives(
        stages, [life_of(flows, stages, overlapping=overlapping) for flows in rows],
        delays_of(rows, stages, overlapping=overlapping),
    )  # fmt: skip
