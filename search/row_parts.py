"""What rows hold: parameters on a rank, stages, and activations alive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from piper_core.arch.chunk import Chunk
from piper_core.ir.action import ActionKind, Slot
from piper_core.ir.dag import Floats, Ints
from piper_core.schedule.families import get_family
from piper_core.schedule.grid import Layout, rows_of_stage


@dataclass(frozen=True, slots=True)
class RowParameters:
    """Parameters that one rank of a row holds when whole: dense ones, and sharded experts."""

    dense: float
    expert: float

    def over(self, dense: int, expert: int) -> float:
        """Return the parameters left on a rank when each class is sharded over its own group."""
        return self.dense / dense + self.expert / expert

    def __add__(self, other: RowParameters) -> RowParameters:
        return RowParameters(self.dense + other.dense, self.expert + other.expert)


class StageSync(NamedTuple):
    """Seconds of a stage's update on one row, of reducing and of gathering all its parameters as one bucket, and of
    those that share buckets with its first chunk: the last to be reduced, the first to be gathered."""

    update: float
    reduce: float
    first_reduce: float
    gather: float
    first_gather: float


class RowSyncs(NamedTuple):
    """What data parallelism and the update ask of rows, each gathered and reduced once: seconds of all stages of a row,
    shape (rows,), and of its first stage's ``first_update``; of each stage of a row, shape (rows, stages of a row).
    ``enter``, ``ready`` and ``reduce_stage`` are those of :class:`RowEnds`."""

    updates: Floats
    gathers: Floats
    reductions: Floats
    first_update: Floats
    least_update: Floats
    gather: Floats
    reduce: Floats
    first_reduce: Floats
    enter: float
    ready: Floats
    reduce_stage: Floats


class RowEnds(NamedTuple):
    """What data parallelism adds to rows at least, shape (rows,). From the norm of the step before: ``enter`` is when a
    first forward of the model may start, ``update`` when a row has updated its stages, ``floor`` when its
    collectives may be through. ``late`` comes after its last backward. ``talk`` is what the busier of its streams of
    collectives takes, ``between`` what passes from its first forward until they are through. Of stages, shape
    (stages,): when one is ``ready`` with all parameters, and what it takes to ``reduce`` it."""

    enter: float
    update: Floats
    floor: Floats
    late: Floats
    talk: Floats
    between: Floats
    ready: Floats
    reduce: Floats


class RowWork(NamedTuple):
    """What rows do themselves, in seconds, shape (rows,): ``head`` before one can start with its ``first`` stage,
    ``work`` of one microbatch and ``tail`` after its last; of the work what is ``compute``, and beside it what the
    busier of the streams of inner collectives takes where overlap groups may hide them, ``talk``."""

    first: Ints
    head: Floats
    work: Floats
    tail: Floats
    compute: Floats
    talk: Floats


@dataclass(frozen=True)
class Frame:
    """What holds for a step whatever a row does inside, in seconds, shape (rows,): what comes ``before`` its first
    forward, which is later than when the model's may ``enter``, and, of data parallelism, after its last backward
    (``late``), or of that and other rows (``after``); its own ``work`` of the whole step, and what of that is
    ``compute``; what the busiest of its streams of collectives takes, of those of data parallelism (``talk``) and of
    those inside actions (``inner``), which run neither before the first action nor after the last; and when the former
    may be through (``floor``). While one runs, compute takes ``slower`` longer for each second. Of stages, shape
    (stages,): when the first forward ``arrives``, and what it takes to ``reduce`` one once a step."""

    enter: float
    before: Floats
    late: Floats
    after: Floats
    work: Floats
    compute: Floats
    talk: Floats
    inner: Floats
    floor: Floats
    arrives: Floats
    reduce: Floats
    slower: float

    @cached_property
    def least(self) -> float:
        """What a step takes at least in which no row waits."""
        return float(np.maximum.reduce(self.longest(self.before + self.work + self.after)))

    @cached_property
    def alone(self) -> Floats:
        """How long rows need so that no collective runs beside compute: what is not compute hides them for nothing."""
        return self.compute + np.maximum(self.talk, self.before + self.inner + self.late)

    def longest(self, least: Floats) -> Floats:
        """Return what a step takes at least in which rows are busy or idle for so long without what overlapping
        costs."""
        return np.maximum(least + self.slower * np.maximum(0.0, self.alone - least), self.floor)

    def within(self, seconds: float, row: int) -> float:
        """Return for how long a row may be busy or idle so that :meth:`longest` is no more than ``seconds``."""
        most = float(self.alone[row])
        return (seconds - self.slower * most) / (1 - self.slower) if seconds < most and self.slower < 1 else seconds


def count_parameters(chunks: Sequence[Chunk], tp: int, ep: int) -> RowParameters:
    """Return the parameters of some chunks on one rank."""
    dense = expert = 0.0
    for parameter in (p for chunk in chunks for p in chunk.parameters):
        share = parameter.numel / (tp if parameter.tensor else 1)
        if parameter.expert and ep > 1:
            expert += share / ep
        else:
            dense += share
    return RowParameters(dense, expert)


def sum_parameters(kinds: Sequence[RowParameters], counts: Sequence[int]) -> RowParameters:
    """Return the parameters of some layers of each kind."""
    pairs = list(zip(kinds, counts, strict=True))
    return RowParameters(sum(p.dense * n for p, n in pairs), sum(p.expert * n for p, n in pairs))


@cache
def stages_of_row(layout: Layout, pp: int, v: int) -> tuple[tuple[int, ...], ...]:
    """Return the stages that each row holds."""
    held: list[list[int]] = [[] for _ in range(pp)]
    for stage, rows in enumerate(rows_of_stage(layout, pp, v)):
        for row in rows:
            held[row].append(stage)
    return tuple(map(tuple, held))


@lru_cache(maxsize=100_000)
def kinds_of_row(layout: Layout, pp: int, v: int, kind_of: bytes) -> Floats:
    """Return how many stages of each kind there are before the first of each row, and on it, and last how many messages
    pass those before: shape (2, rows, kinds + 1); ``kind_of`` has the kind of each stage, in four bytes."""
    kinds = np.frombuffer(kind_of, np.int32)
    n = int(kinds.max()) + 1
    found = np.zeros((2, pp, n + 1))
    for row, stages in enumerate(stages_of_row(layout, pp, v)):
        found[0, row] = *np.bincount(kinds[: stages[0]], minlength=n), stages[0]
        found[1, row, :n] = np.bincount(kinds[list(stages)], minlength=n)
    return found


def flows_of(layout: Layout, row: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the stages of a row, those apart that different microbatches pass."""
    return tuple((s,) for s in row) if layout is Layout.BIDIRECTIONAL else (row,)


@cache
def alive_chunks(schedule: str, pp: int, m: int, v: int) -> tuple[int, ...]:
    """Return how many (stage, microbatch) each row keeps alive at least at its fullest, between F and B or BI.

    Beyond 4 p microbatches only GPipe's number grows, so no longer grid is walked.
    """
    if schedule == "gpipe":
        return (m,) * pp
    family = get_family(schedule)
    legal = family.microbatches(pp, v)
    shorter = m if m <= 4 * pp or 4 * pp not in legal else 4 * pp
    ones = [1.0] * (pp * v)
    return tuple(int(peak_of(row, ones)) for row in family.grid(pp, shorter, v).rows)


def peak_of(slots: Sequence[Slot], saved: Sequence[float], workspace: Sequence[float] = ()) -> float:
    """Return the most that a row holds at once between F and B or BI, and at the start of a backward its ``workspace``;
    in an overlap group what ends counts first."""
    now = peak = 0.0
    for slot in slots:
        for action in slot:
            if action.kind in (ActionKind.B, ActionKind.BI):
                if workspace:
                    peak = max(peak, now + workspace[action.stage])
                now -= saved[action.stage]
        for action in slot:
            if action.kind is ActionKind.F:
                now += saved[action.stage]
        peak = max(peak, now)
    return peak
