"""Which transactions of a plan contend, and what the loops take and give."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from piper_core.ir.dag import Floats, Ints
from piper_core.schedule.plan import StreamKind
from search.simulator.loops import COMPUTES, CONTENDS, FREE, pick
from search.simulator.lower import COMM_KINDS, ActionSeconds, CommKind, Lowered

CONTENDING = np.asarray([kind not in (CommKind.PIPELINE, CommKind.NORM) for kind in COMM_KINDS])
"""Which kinds of communication contend with compute, by index into ``COMM_KINDS``: collectives, whose kernels take
multiprocessors and memory bandwidth. Messages are copies between two devices, and the norm is a number."""

Run: TypeAlias = tuple[Floats, Floats]
"""When each transaction of one step starts and ends, shape (T,)."""
SOME = 64
"""Collectives of a stream that are looked at before the others: where any contends, one of them does as a rule."""
_CONTENDS = np.append(CONTENDING, False)  # -1, what is no communication, is its last


def kinds(lowered: Lowered, seconds: ActionSeconds) -> Ints:
    """Return what each transaction is to contention, shape (T,)."""
    kind = np.zeros(len(lowered), np.int32)
    kind[lowered.of[_CONTENDS[seconds.comm]]] = CONTENDS
    kind[lowered.of[lowered.computes & (lowered.plan.line < 0)]] = COMPUTES
    return kind


def contends(lowered: Lowered, kind: Ints, duration: Floats, runs: Sequence[Run]) -> bool:
    """Return whether, in runs without contention, a collective ever overlaps compute of one of its rows."""
    plan, what = lowered.plan, np.where(duration > 0, kind, FREE)
    queues = [lowered.of[low:high] for low, high in pairwise(plan.start.tolist())]
    computing = {
        stream.row: queue[what[queue] == COMPUTES]
        for stream, queue in zip(plan.streams, queues, strict=True) if stream.kind is StreamKind.COMPUTE
    }  # fmt: skip
    for stream, queue in zip(plan.streams, queues, strict=True):
        if stream.kind is StreamKind.COLLECTIVE and stream.row in computing:
            talking = queue[what[queue] == CONTENDS]
            for some in (talking[:SOME], talking[SOME:]):
                if any(_meet(run, computing[stream.row], some) for run in runs):
                    return True
    return False


def _meet(run: Run, computing: Ints, talking: Ints) -> bool:
    """Return whether in a run some of ``talking`` overlaps some of ``computing``, which are disjoint and in order: then
    more of these start before its end than end before it."""
    if not (len(computing) and len(talking)):
        return False
    starts, ends = (times[computing] for times in run)
    low, high = (times[talking] for times in run)
    return bool((np.searchsorted(starts, high, "left") > np.searchsorted(ends, low, "right")).any())


def longest_path_runs(lowered: Lowered, duration: Floats, steps: int) -> list[Run]:
    """Run ``steps`` steps in which nothing contends; ``duration`` of each transaction, shape (T,)."""
    loops = pick(0)
    before = np.repeat(np.arange(len(lowered)), np.diff(lowered.later_first))
    begin = np.zeros(len(lowered))
    listed, after = ([], []) if loops.compiled else (duration.tolist(), followers(lowered))
    runs: list[Run] = []
    for _ in range(steps):
        if loops.compiled:
            finish = np.empty(len(lowered))
            loops.longest_path(duration, lowered.first, lowered.targets, begin, finish)
            runs.append((begin, finish))
        else:
            runs.append(_listed_path(listed, after, begin.tolist()))
        begin = np.zeros(len(lowered))
        np.maximum.at(begin, lowered.later, runs[-1][1][before])
    return runs


def followers(lowered: Lowered) -> list[list[int]]:
    """Return, for each transaction, those that wait for it within a step."""
    listed = lowered.targets.tolist()
    return [listed[a:b] for a, b in pairwise(lowered.first.tolist())]


def _listed_path(duration: list[float], after: list[list[int]], begin: list[float]) -> Run:
    """Do as ``loops.longest_path`` does, quicker without numba."""
    finish = []
    for start, lasts, targets in zip(begin, duration, after, strict=True):
        ended = start + lasts
        finish.append(ended)
        for v in targets:
            if ended > begin[v]:
                begin[v] = ended
    return np.asarray(begin), np.asarray(finish)


def overlapped_runs(lowered: Lowered, kind: Ints, duration: Floats, slowdown: float, steps: int) -> list[Run]:
    """Run ``steps`` steps with contention.

    Args:
        kind: see :func:`kinds`.
        duration: seconds of each transaction alone, shape (T,).
        slowdown: factor on both sides while compute and a collective overlap on a row, at least 1.
    """
    size, rows = len(lowered), len(lowered.plan.rows)
    total = size * steps
    loops = pick(total)

    def take(column: Any) -> Any:
        return column if loops.compiled else column.tolist()

    def room(n: int, value: int = 0) -> Any:
        return np.full(n, value, np.int32) if loops.compiled else [value] * n

    def times() -> Any:
        return np.empty(total) if loops.compiled else [0.0] * total

    width = int(np.bincount([stream.row for stream in lowered.plan.streams], minlength=rows).max(initial=1))
    degree = np.bincount(lowered.targets, minlength=size).astype(np.int32)
    later_degree = np.bincount(lowered.later, minlength=size).astype(np.int32)
    columns = (
        duration, kind, lowered.first, lowered.targets, lowered.later_first, lowered.later, degree, later_degree,
        lowered.member_first, lowered.members,
    )  # fmt: skip
    begin, finish = times(), times()
    loops.contended(
        size, steps, float(slowdown), *map(take, columns),
        room(total), times(), times(), times(), finish, begin, room(total), room(total),
        room(rows, -1), room(rows), room(rows * width), width,
    )  # fmt: skip
    starts, ends = np.asarray(begin).reshape(steps, size), np.asarray(finish).reshape(steps, size)
    return [(starts[step], ends[step]) for step in range(steps)]
