"""How long rows hold the activations of microbatches at least, and how much time that takes of all.

A row that holds x of its room for t seconds, once for each of m microbatches, needs m x t seconds; but of what takes
more than half of the room it holds one at a time. Functions that map parts of the room to weights, such that parts that
fit together weigh at most 1, say both (dual feasible functions: Fekete and Schepers, Mathematical Methods of Operations
Research 60, 2004): weights times seconds, added up, never exceed the time that there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from piper_core.ir.dag import Floats, Ints

MOST = 4
"""Greatest number held at once for which a row is looked at as so many places."""
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds that rows take at least since their first forward, shape (rows,): ``hold`` because of what memory holds;
    ``idle`` besides their compute, before the first backward and after the last forward. ``mean`` is what all rows hold
    on average."""

    hold: Floats
    idle: Floats | float
    mean: float


@dataclass
class Stages:
    """All stages of a pipeline for one microbatch. Bytes from F to the backward's end, and from BI to BW; seconds of F,
    of B (BI where weights follow apart), and of the ``hop`` to the next stage. Then what they are at least where a row
    begins or ends with them, or overlaps them: of F from its second piece; of F, B and BW what a row is busy with (BW
    takes nothing where it is never apart). Last, of BW by itself (``weight``)."""

    saved: Sequence[float]
    stash: Sequence[float]
    forward: Sequence[float]
    backward: Sequence[float]
    hop: Sequence[float]
    rest: Sequence[float]
    forward_work: Sequence[float]
    backward_work: Sequence[float]
    weight_work: Sequence[float]
    weight: Sequence[float]

    def __post_init__(self) -> None:
        self._down = list(accumulate((f + h for f, h in zip(self.forward, (*self.hop, 0.0), strict=True)), initial=0.0))
        self._up = list(accumulate((b + h for b, h in zip(self.backward, (*self.hop, 0.0), strict=True)), initial=0.0))

    def through(self, first: int, last: int) -> float:
        """Return the seconds of a forward from the start of stage ``first`` to that of ``last``."""
        return self._down[last] - self._down[first]

    def back(self, last: int, first: int) -> float:
        """Return the seconds of a backward from the end of stage ``last`` to that of ``first``."""
        return self._up[last] - self._up[first]

    def beyond(self, last: int) -> float:
        """Return the seconds from the end of the forward of stage ``last`` to the start of its backward."""
        ends = self._down[-1] - self._down[last] + self._up[-1] - self._up[last]
        return ends - self.forward[last] - self.backward[last]


class Life(NamedTuple):
    """What one microbatch of each flow holds on a row: ``phases`` (bytes, seconds) one after another.

    A row's first backward starts no earlier than ``first`` seconds after the step, its last action ends ``last`` after
    its last forward at least. Work in seconds for each byte that it leaves, or that it frees, is at most the rates;
    ``forward_work`` and ``backward_work`` are those of a microbatch. By themselves forwards, and what follows them, are
    work for at most a part of their time (``forward_part``, ``backward_part``); ``alone`` is the rest of a microbatch.
    No single forward or backward has more work than ``most``.
    """

    phases: list[tuple[float, float]]
    first: float
    last: float
    forward_work: float
    backward_work: float
    forward_rate: float
    backward_rate: float
    forward_part: float
    backward_part: float
    alone: float
    most: float


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
    backward_work = sum([stages.backward_work[s] + weights[s] for s in mine])
    works = [(stages.forward_work[s], stages.forward[s]) for s in mine]
    backwards = [(stages.backward_work[s], back[s]) for s in mine]
    parts = [*backwards, *[(weights[s], stages.weight[s]) for s in mine if weights[s]]]
    return Life(
        phases, min(firsts), min(lasts), forward_work, backward_work, forward_rate, max(rates),
        max([work / whole for work, whole in works]), max([work / whole for work, whole in parts]),
        sum([whole - work for work, whole in works + backwards]), max([work for work, _ in works + parts]),
    )  # fmt: skip


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
        once, later = weights(self.held / room[:, None], places), weights(self.stash / room[self.row], places)
        return float(np.minimum(once.sum(axis=0), later) @ self.seconds)


def delays_of(rows: Sequence[Sequence[Sequence[int]]], stages: Stages, *, overlapping: bool) -> Delays:
    """Return the delays of a pipeline whose rows have flows as for :func:`life_of`; where they have two, microbatches
    pass each row in one of both directions."""
    places = [(t, r, len(flows) > 1 and t != r) for r, flows in enumerate(rows) for flow in flows for t in flow]
    stage, row, back = np.asarray(places, np.int64).T
    saved = np.asarray(stages.saved)
    before = stage[:, None] < stage if overlapping else stage[:, None] <= stage
    meets = np.where(before & (back[:, None] == back), saved[stage][:, None], 0.0)
    held = np.zeros((len(rows), len(places)))
    np.add.at(held, row, meets)
    return Delays(held, np.asarray(stages.stash)[stage], row, np.asarray(stages.weight_work)[stage])


@dataclass(frozen=True, slots=True)
class Lives:
    """What all rows hold of a microbatch: :class:`Life` by row, shape (rows,), phases (rows, phases); ``turn`` is the
    seconds of a forward until the last stage begins with it."""

    delays: Delays
    turn: float
    size: Floats
    seconds: Floats
    first: Floats
    last: Floats
    forward_work: Floats
    backward_work: Floats
    forward_rate: Floats
    backward_rate: Floats
    forward_part: Floats
    backward_part: Floats
    alone: Floats
    most: Floats

    def hold(self, room: Floats, enough: Floats) -> Floats:
        """Return how long rows with ``room`` bytes are at it for one microbatch of each flow, at least; what is below
        ``enough`` may be less than that."""
        best = self.weigh(room, 0)
        if (2 * best > enough).any():  # no function weighs anything more than double
            for places in range(1, MOST + 1):
                best = np.maximum(best, self.weigh(room, places))
        return best

    def weigh(self, room: Floats, places: int) -> Floats:
        """Return weights times seconds of each row."""
        return np.asarray((weights(self.size / room[:, None], places) * self.seconds).sum(axis=1))

    def mean(self, room: Floats) -> float:
        """Return the mean over rows of weights times seconds where weight gradients may follow apart."""
        found = [float(self.weigh(room, n).sum()) + self.delays.weigh(room, n) for n in range(MOST + 1)]
        return max(found) / len(room)

    def idle(self, room: Floats, more: Floats, share: float, begun: Floats, turned: float) -> Floats:
        """Return the seconds that rows do not compute, at least, after their first forward of ``share``, which starts
        once the step has ``begun`` so long before; the model's last stage may start after ``turned``.

        No more forwards can come before the first backward than there are, and what they make stays held in ``room``;
        no more backwards can come after the last forward than there are, and what they free was held (``more``). No
        overlap group hides what these communicate; where all forwards come first, there is none.
        """
        first, ahead = self.first + turned - self.turn, np.minimum(share * self.forward_work, room * self.forward_rate)
        behind = np.minimum(share * self.backward_work, more * self.backward_rate)
        ends = self.most * (1 - self.forward_part), self.most * (1 - self.backward_part)
        lone = np.minimum(ahead, self.forward_part * (first - begun) + ends[0])
        follow = np.minimum(behind, self.backward_part * self.last + ends[1])
        fill, drain = np.maximum(0.0, first - begun - lone), np.maximum(0.0, self.last - follow)
        apart = np.maximum(np.maximum(first - begun - ahead, self.last - behind), share * self.alone)
        mixed = fill + drain
        return np.where(share * self.forward_work <= room * self.forward_rate, np.minimum(mixed, apart), mixed)


def weights(part: Floats, places: int) -> Floats:
    """Return the weights of parts of the room, of which ``places`` (0: any number) larger than an equal share fit."""
    return np.floor(part * ((places + 1) * (1 - ROUNDING))) / places if places else part


def lives_of(rows: Sequence[Sequence[Sequence[int]]], stages: Stages, *, overlapping: bool) -> Lives:
    """Return what rows hold, each row's flows given as to :func:`life_of`."""
    each = [life_of(flows, stages, overlapping=overlapping) for flows in rows]
    most = max(len(life.phases) for life in each)
    padded = np.asarray([[*life.phases, *[(0.0, 0.0)] * (most - len(life.phases))] for life in each])
    delays, turn = delays_of(rows, stages, overlapping=overlapping), stages.through(0, len(stages.forward) - 1)
    return Lives(delays, turn, padded[..., 0], padded[..., 1], *np.asarray([life[1:] for life in each]).T)
