"""How often a call is timed: until the interval is tight or its time is gone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil

import torch

from profiler.measure.clock import Clock, Timing
from profiler.measure.pace import Pace
from profiler.record import Sample

LEAST, MOST = 7, 40
"""Times of a call, fewer where its seconds are gone before."""

READ_EVERY = 8
"""Calls between two readings of the pace."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How hard to try.

    A time is the mean of calls in a row that take ``run_s`` together: far longer than a clock's tick, and shorter than
    a time slice, so that most times are of calls that nobody interrupted. There are ``least`` to ``most`` times,
    fewer where ``seconds`` are gone before; ``doubt`` is the relative half-width that is tight enough.
    """

    least: int = LEAST
    most: int = MOST
    run_s: float = 5e-4
    seconds: float = 0.4
    doubt: float = 0.02
    warm_up: int = 2


def sample(call: Callable[[], object], clock: Clock, effort: Effort) -> Sample:
    """Time a call, at least once, whatever it takes.

    Times that something else interrupted are left out where there are enough others.
    """
    spent = clock.time(call, effort.warm_up).wall_s if effort.warm_up else 0.0
    once = clock.time(call, 1)
    spent += once.wall_s
    inner = max(1, min(1000, ceil(effort.run_s / once.seconds))) if once.seconds > 0 else 1000
    taken = [once] if inner == 1 else []
    while not taken or (spent < effort.seconds and len(taken) < effort.most):
        now = clock.time(call, inner)
        spent += now.wall_s
        taken.append(Timing(now.seconds / inner, now.wall_s, now.interrupted))
        if len(taken) >= effort.least and _chosen(taken, effort).doubt <= effort.doubt:
            break
    return _chosen(taken, effort)


def in_turn(
    calls: Mapping[str, Callable[[], object]], clock: Clock, effort: Effort, pace: Pace | None = None
) -> dict[str, Sample]:
    """Time calls one by one, all of them round after round, until all are tight or their time is gone.

    Code and values of a call have then left the nearest caches when its turn comes again, as they have in a step. The
    times of a round are brought to the base of ``pace``. What runs out of memory is left out.
    """
    alive, taken, spent = dict(calls), {key: list[Timing]() for key in calls}, 0.0
    for turn in range(effort.warm_up + effort.most):
        times: dict[str, Timing] = {}
        readings: list[float] = []
        for at, (key, call) in enumerate(list(alive.items())):
            if pace is not None and at % READ_EVERY == 0:
                readings.append(pace.read())
            try:
                times[key] = clock.time(call, 1)
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                del alive[key]
        spent += sum(each.wall_s for each in times.values())
        gone = spent >= effort.seconds * len(calls)
        if turn < effort.warm_up and not gone:
            continue
        factor = 1.0 if pace is None else pace.factor([*readings, pace.read()])
        for key, each in times.items():
            taken[key].append(replace(each, seconds=each.seconds * factor))
        if gone:
            break
        if turn + 1 - effort.warm_up >= effort.least and all(
            _chosen(taken[key], effort).doubt <= effort.doubt for key in alive
        ):
            break
    return {key: _chosen(taken[key], effort) for key in alive}


def out_of_memory(error: RuntimeError) -> bool:
    """Whether torch says by this that a device has no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)  # of a CPU


def _chosen(taken: list[Timing], effort: Effort) -> Sample:
    clean = [each.seconds for each in taken if not each.interrupted]
    if len(clean) >= effort.least:
        return Sample(tuple(clean), len(taken) - len(clean))
    return Sample(tuple(each.seconds for each in taken))
