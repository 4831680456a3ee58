"""What a step takes at least because stages follow one another: down with the first microbatch, up with the last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from piper_core.ir.dag import Floats, Ints


class Stop(NamedTuple):
    """A stage: seconds from start to end of its ``forward``, and of what its ``backward`` does before the stage before
    may begin with it; of its row's compute that of the forward (``own``), of that part of the backward (``inward``) and
    of the ``whole`` backward; of the streams of its row's collectives those of both; and from start to end of the whole
    backward, when it follows the next stage's (``last``) and when it is the row's turn (``turn``: its first exchange
    may be through then)."""

    forward: float
    backward: float
    own: float
    inward: float
    whole: float
    tensor: float
    expert: float
    context: float
    last: float
    turn: float


class Route(NamedTuple):
    """The stages that a microbatch passes, seconds of shape (stages,): latencies ``down`` and ``up``; what the row of a
    stage does at least of each other microbatch before the last backward of that stage, since its own first forward
    (``through``) and since that of its row (``entry`` says of which stage, ``all_through``), and with the whole of
    those backwards (``since``, ``all_since``); the ``last`` backward, and when it is its row's ``turn``; when a
    microbatch may ``start`` that never waits, and what a backward takes from the start of a stage to the end of the
    first (``rise``); the ``hop`` to each next stage, one less."""

    down: Floats
    up: Floats
    through: Floats
    all_through: Floats
    since: Floats
    all_since: Floats
    last: Floats
    turn: Floats
    entry: Ints
    start: Floats
    rise: Floats
    hop: Floats

    @staticmethod
    def of(stops: Floats, rows: Ints, hop: Floats) -> Route:
        """Return the route through ``stops``, shape (stages, fields of :class:`Stop`); ``rows`` are the stages of each
        row that one microbatch passes, shape (rows, stages of a row)."""
        down, up, _, inward, whole, *_, last, turn = stops.T
        later = np.empty_like(stops)  # the sum over a stage and those after it on its row
        later[rows] = np.cumsum(stops[rows][:, ::-1], axis=1)[:, ::-1]
        _, _, forwards, backwards, _, *streams, _, _ = later.T
        talk, through, entry = np.maximum.reduce(streams), forwards + backwards, np.empty(len(stops), np.int64)
        entry[rows] = rows[:, :1]
        before, since = forwards[entry] - forwards, through + whole - inward
        return Route(
            down, up, np.maximum(through, talk), np.maximum(through + before, talk), np.maximum(since, talk),
            np.maximum(since + before, talk), last, turn, entry, np.concatenate(([0.0], np.cumsum(down[:-1] + hop))),
            np.cumsum(up + np.concatenate(([0.0], hop))), hop,
        )  # fmt: skip


def arrivals(by: Route, enter: float, ready: Floats) -> Floats:
    """Return when the first forward of each stage may start, at least, since the norm of the step before.

    That of the first stage may start at ``enter``. ``ready`` is when all parameters of a stage are there, before which
    no forward of it ends.
    """
    after = np.full(len(by.start), enter)
    after[1:] = ready[:-1] + by.hop - by.start[1:]
    return np.asarray(by.start + np.maximum.accumulate(after))


def passage(by: Route, m: int, arrives: Floats, ready: Floats, reduce: Floats) -> float:
    """Return the seconds from the norm of the step before to the end of all reductions, at least, in any order.

    ``m`` microbatches pass; the first ``arrives`` and stages are ``ready`` as :func:`arrivals` says. The last backward
    of a stage ends when its row has done what all others needed before theirs; then it goes up through the stages
    before. A stage is reduced in ``reduce`` seconds from its last backward on. A row does one forward and one backward
    at a time.
    """
    first, others = np.maximum(arrives + by.down, ready), m - 1
    entered, arrived = first[by.entry], arrives[by.entry]
    done = np.maximum(first + others * by.through, entered + others * by.all_through) + by.up
    done = np.maximum(done, arrived + m * by.all_through)
    turn = np.maximum(first + others * by.since, entered + others * by.all_since)
    turn = np.maximum(turn, arrived + m * by.all_since - by.last)
    rise = by.rise[:-1]
    from_next = done[1:] + by.hop + rise
    follows = np.maximum.accumulate(from_next[::-1])[::-1] - rise
    ends = turn + np.maximum(reduce, by.turn)
    ends[:-1] = np.maximum(ends[:-1], follows + np.maximum(reduce, by.last)[:-1])
    return float(np.maximum.reduce(ends))


@dataclass(frozen=True, slots=True)
class Visits:
    """The stages of rows in order, seconds of shape (rows, stages of a row): of a microbatch's ``forward``, its whole
    ``backward``, and what of that the stage before waits for (``inward``); of gathering a stage's parameters, and of
    reducing their gradients."""

    forward: Floats
    backward: Floats
    inward: Floats
    gather: Floats
    reduce: Floats


def synced(by: Visits, m: int, *, alone: bool) -> tuple[Floats, Floats]:
    """Return the seconds until rows have reduced all their gradients, at least, in any order, shape (rows,): since
    their first forward, and since they began to gather; both once a step.

    ``m`` microbatches pass a row's stages one after another, or half of them each where stages are ``alone``. All but
    one, which may be in the midst of a stage then, go from the forward of the stage that was gathered last through the
    rest of the row to the backward of the one that reduces first.
    """
    gathers, reduces = by.gather.sum(axis=1), by.reduce.sum(axis=1)
    if alone:
        own = max(0, m // 2 - 1) * (by.forward + by.backward)
        last = (gathers[:, None] + own + by.reduce).min(axis=1)  # of the stage that is gathered last
        return own.min(axis=1) + reduces, np.maximum(last, (by.gather + own).min(axis=1) + reduces)
    forwards = np.cumsum(by.forward[:, ::-1], axis=1)[:, ::-1]
    backwards = np.cumsum(by.inward[:, ::-1], axis=1)[:, ::-1] - by.inward + by.backward
    others = max(0, m - 1)
    first = forwards[:, 0] + backwards.min(axis=1)
    every = forwards.min(axis=1) + backwards.min(axis=1)
    return others * first + reduces, gathers + others * every + reduces
