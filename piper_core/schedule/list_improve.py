"""Make an order better: move tasks into idle time that they fit, forwards and backwards in time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any, TypeAlias

import numpy as np

from piper_core.jit import Loops
from piper_core.schedule.list_decode import Decoded, Network, measured
from piper_core.schedule.list_problem import Measure

Column: TypeAlias = Any
"""Numbers: a list, or an array for compiled loops."""
TURNS = 4
"""What a task is to the loops that are counted: they take 0.8 us a turn uncompiled."""


class Improver:
    """Improves schedules of one network for one measure; ``work`` counts visits of tasks.

    Justification (Valls, Ballestin and Quintanilla 2005) compacts a schedule towards its end, then towards its
    start. For the span, each row has an end of its own to be moved towards, as late as its earliest start.
    """

    def __init__(self, network: Network, measure: Measure, goal_s: float, seed: int) -> None:
        self.work, self.goal_s = 0, goal_s
        self._forward, self._backward, self._measure = network, network.reversed(), measure
        self._random = Random(seed)
        first = [float("inf")] * network.problem.rows
        for task, row in enumerate(network.problem.row):
            first[row] = min(first[row], network.head_s[task])
        latest = max((s for s in first if s < float("inf")), default=0.0)
        self._lag = [0.0 if measure == "makespan" or s > latest else latest - s for s in first]

    def score(self, schedule: Decoded) -> tuple[float, float]:
        """Return what to make small: the measure, then the other one."""
        if self._measure == "makespan":
            return schedule.makespan_s, schedule.span_s
        return schedule.span_s, schedule.makespan_s

    def done(self, schedule: Decoded) -> bool:
        """Say whether the schedule meets the goal."""
        return self.score(schedule)[0] <= self.goal_s

    def settle(self, schedule: Decoded) -> Decoded:
        """Justify as long as that gains."""
        while not self.done(schedule):
            late = compact(self._backward, self._mirrored(schedule), self._lag)
            moved = compact(self._forward, self._mirrored(late))
            self.work += 2 * len(schedule.start_s)
            if self.score(moved) >= self.score(schedule):
                break
            schedule = moved
        return schedule

    def shake(self, schedule: Decoded, serial: int) -> Decoded:
        """Justify once as if durations were different, by stage and phase or by task, then settle.

        The order stays legal, as legality does not depend on durations (noising: Storer, Wu and Vaccari 1992).
        """
        problem, random = self._backward.problem, self._random
        if serial % 2:
            seconds = [s * random.uniform(0.1, 1.9) for s in problem.seconds]
        else:
            kinds = sorted({key[:2] for key in problem.key})
            factor = {kind: random.uniform(0.4, 1.6) for kind in kinds}
            seconds = [s * factor[key[:2]] for s, key in zip(problem.seconds, problem.key, strict=True)]
        noisy = replace(self._backward, problem=replace(problem, seconds=seconds))
        late = compact(noisy, self._mirrored(schedule), self._lag)
        start = [late.makespan_s - at - s for at, s in zip(late.start_s, seconds, strict=True)]
        self.work += 2 * len(start)
        return self.settle(compact(self._forward, start))

    def _mirrored(self, schedule: Decoded) -> list[float]:
        seconds = self._forward.problem.seconds
        return [schedule.makespan_s - at - s for at, s in zip(schedule.start_s, seconds, strict=True)]


def compact(network: Network, start: list[float], lag: list[float] | None = None) -> Decoded:
    """Start each task, in order of ``start``, as early as precedence, idle time and memory allow.

    ``start`` is that of a legal schedule, and no task starts later than in it (serial generation scheme),
    save where ``lag`` (seconds before which a row may not start) says so. A task that acquires memory moves
    forward past others only while the row stays within its limit all the way.
    """
    order, new, fixed = sorted(network.order, key=start.__getitem__), [0.0] * len(start), network.fixed
    tasks, slots, lows = list(range(len(start))), len(start), fixed.row_first  # ties stay in topological order
    seconds, lag = network.problem.seconds, lag or [0.0] * network.problem.rows
    loops = LOOPS.pick(TURNS * slots)
    if loops.compiled:
        found, placed = np.zeros(slots), np.empty(slots, np.int32)
        loops.place(
            np.asarray(order, np.int32), *fixed.arrays, np.asarray(seconds, np.float64), np.asarray(lag, np.float64),
            network.quantum_s, placed, *np.empty((3, slots)), np.zeros(len(lag), np.int32), found,
        )  # fmt: skip
        new, tasks = found.tolist(), placed.tolist()
    else:
        room = [[0.0] * slots for _ in range(3)]
        loops.place(
            order, *fixed.lists, seconds, lag, network.quantum_s, tasks, *room, [0] * len(lag), new
        )  # fmt: skip
    return measured(network, [tasks[a:b] for a, b in pairwise(lows)], new)


def place(
    order: Column, first: Column, preds: Column, delays: Column, hold: Column, release: Column, row_of: Column,
    row_first: Column, limit: Column, seconds: Column, lag: Column, quantum: float,
    tasks: Column, begin: Column, finish: Column, profile: Column, count: Column, new: Column,
) -> None:  # fmt: skip
    """Fill ``tasks`` (tasks,) with those of each row in order and ``new`` with when each starts; ``profile`` is what is
    held while the task at a place runs, and the two before it are when it does. ``count`` is room to work in."""
    for task in order:
        row = row_of[task]
        low = row_first[row]
        end = low + count[row]
        need, acquires, ready = seconds[task], hold[task], lag[row]
        for k in range(first[task], first[task + 1]):
            there = new[preds[k]] + seconds[preds[k]] + delays[k]
            if there > ready:
                ready = there
        at, when = end, ready
        if end > low and finish[end - 1] > ready:
            when = finish[end - 1]
        if end > low and finish[end - 1] > ready + quantum:
            index = end
            if acquires != 0.0:
                room = limit[row] - acquires
                while index > low and profile[index - 1] <= room:
                    index -= 1
                    gap = finish[index - 1] if index > low else 0.0
                    if gap < ready:
                        gap = ready
                    if gap + need <= begin[index] + quantum:
                        at, when = index, gap
                    if begin[index] <= ready:
                        break
            else:
                index, high = low, end
                while index < high:  # the first that ends later
                    middle = (index + high) // 2
                    if ready < finish[middle]:
                        high = middle
                    else:
                        index = middle + 1
                gap = ready
                while index < end:
                    if gap + need <= begin[index] + quantum:
                        at, when = index, gap
                        break
                    gap = finish[index]
                    index += 1
        for index in range(end, at, -1):
            tasks[index], begin[index] = tasks[index - 1], begin[index - 1]
            finish[index], profile[index] = finish[index - 1], profile[index - 1]
        before = profile[at - 1] - release[tasks[at - 1]] if at > low else 0.0
        tasks[at], begin[at], finish[at], profile[at] = task, when, when + need, before + acquires
        change = acquires - release[task]
        if change != 0.0:
            for index in range(at + 1, end + 1):
                profile[index] += change
        count[row] += 1
        new[task] = when


LOOPS = Loops(place)
