"""The longest path through a plan's transactions, step after step, and what can be read from it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from piper_core.ir.action import Action
from piper_core.ir.dag import Floats, Ints
from piper_core.ir.timeline import Event, Lane, Timeline
from piper_core.names import Sync
from piper_core.schedule.plan import KINDS, Plan, StreamKind
from search.simulator.loops import pick
from search.simulator.lower import (
    COMM_KINDS,
    ActionSeconds,
    Lowered,
    lower_plan,
    on_compute,
    plain_seconds,
    row_of,
    sums,
)
from search.simulator.overlap import contends, kinds, longest_path_runs, overlapped_runs


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a plan does when every action starts as early as the rendezvous rules let it.

    Arrays are by action, shape (A,), in seconds from the start of the first step: ``start_s`` and ``end_s`` of the
    first step, ``late_start_s`` and ``late_end_s`` of the last one simulated; ``step_time_s`` is the steady-state
    period. Per row: ``busy_s`` of the compute stream in one step, inner collectives and updates included, and
    ``contention_s``, how much of that is because collectives slow it.
    """

    lowered: Lowered
    seconds: ActionSeconds
    start_s: Floats
    end_s: Floats
    late_start_s: Floats
    late_end_s: Floats
    previous_end_s: Floats
    step_time_s: float
    makespan_s: float
    busy_s: Floats
    contention_s: Floats

    @property
    def plan(self) -> Plan:
        """The plan that was simulated."""
        return self.lowered.plan

    @property
    def bubble_ratio(self) -> float:
        """1 - busy / period, mean over rows, at least 0: the share in which a row's compute stream stands still."""
        return max(0.0, float(1.0 - (self.busy_s / self.step_time_s).mean())) if self.step_time_s else 0.0

    def exposed_s(self) -> Floats:
        """Return the seconds of one step in which communication holds up compute, shape (rows, ``COMM_KINDS``).

        Collectives inside compute actions count in full. Where a compute stream idles, the chain of communication
        that it waited for last counts, as far as it ran in that time; the rest is waiting for other
        rows' compute.
        """
        plan, loops = self.plan, pick(0)
        before = _Reasons(self)
        floors, ends, indices = [np.zeros(0)], [np.zeros(0)], [np.zeros(0, np.int64)]
        for s, stream in enumerate(plan.streams):
            low, high = int(plan.start[s]), int(plan.start[s + 1])
            if stream.kind is not StreamKind.COMPUTE or low == high:
                continue
            start = self.late_start_s[low:high]
            since = np.concatenate([self.previous_end_s[high - 1 : high], self.late_end_s[low : high - 1]])
            idle = np.flatnonzero(start > since + 1e-12)
            floors.append(since[idle])
            ends.append(start[idle])
            indices.append(low + idle)
        index = np.concatenate(indices)
        columns = (
            np.concatenate(floors), np.concatenate(ends), before.cause[self.lowered.of[index]], row_of(plan)[index],
            self.seconds.comm[before.member], self.late_start_s[before.member], before.cause,
        )  # fmt: skip
        found = np.zeros(self.seconds.inner.size)
        if loops.compiled:
            loops.exposed(*columns, len(COMM_KINDS), found)
        else:
            listed = found.tolist()
            loops.exposed(*(column.tolist() for column in columns), len(COMM_KINDS), listed)
            found = np.asarray(listed)
        return self.seconds.inner + found.reshape(self.seconds.inner.shape)

    def exposed_communication_s(self) -> dict[str, float]:
        """Return the exposed seconds by kind of communication, mean over rows."""
        mean = self.exposed_s().mean(axis=0).tolist()
        return {str(kind): seconds for kind, seconds in zip(COMM_KINDS, mean, strict=True)}

    def critical_path(self) -> list[tuple[int, Action]]:
        """Return (row, action) along the longest path of the first step, from its start to its end."""
        return [(row, action) for row, action, _ in self.critical_path_s()]

    def critical_path_s(self) -> list[tuple[int, Action, float]]:
        """Return (row, action, seconds) along the longest path of the first step."""
        plan = self.plan
        if not len(plan):
            return []
        before = _Reasons(self, first=True)
        path = [int(self.lowered.of[int(np.argmax(self.end_s))])]
        while (cause := int(before.cause[path[-1]])) >= 0:
            path.append(cause)
        rows = row_of(plan)
        members = [before.member[t] for t in reversed(path)]
        lasts = self.end_s - self.start_s
        return [(int(rows[i]), plan.action(i), float(lasts[i])) for i in members]

    def timeline(self) -> Timeline:
        """Return the first step as a timeline; a message shows on both its streams."""
        plan = self.plan
        start, end, kinds = self.start_s.tolist(), self.end_s.tolist(), plan.kind.tolist()
        return Timeline(
            tuple(
                Lane(
                    stream.row,
                    stream.name,
                    tuple(
                        Event(start[i], end[i], str(plan.action(i)), KINDS[kinds[i]])
                        for i in range(int(plan.start[s]), int(plan.start[s + 1]))
                    ),
                )
                for s, stream in sorted(enumerate(plan.streams), key=lambda pair: (pair[1].row, pair[0]))
            )
        )


class _Reasons:
    """For each transaction, the one that it waited for last, within its step or in the step before (-1: none)."""

    def __init__(self, simulation: Simulation, *, first: bool = False) -> None:
        lowered = simulation.lowered
        self.member = lowered.member_of[lowered.member_first[:-1]]
        ends, starts = simulation.late_end_s, simulation.late_start_s
        if first:
            ends, starts = simulation.end_s, simulation.start_s
        source = np.repeat(np.arange(len(lowered)), np.diff(lowered.first))
        last = np.flatnonzero(ends[self.member][source] == starts[self.member][lowered.targets])[::-1]
        cause = np.full(len(lowered), -1, np.int32)
        cause[lowered.targets[last]] = source[last]  # of several, the first
        self.cause: Ints = cause


def simulate(
    plan: Plan | Lowered, seconds: ActionSeconds | Floats, *, steps: int | None = None, slowdown: float = 1.0
) -> Simulation:
    """Run a verified plan under rendezvous rules, every transaction as early as it may.

    A transaction starts when each member is at the head of its stream and all that it waits for has ended, and
    lasts as long as its slowest member. Steps run back to back: streams keep their order over the boundary, and the
    gathers of a step follow the update of their stage in the step before. While a row computes and a collective runs on
    it, both are slower by ``slowdown`` (messages and the norm are not, see ``overlap``); messages do not share links.
    Where nothing overlaps so, the answer is the longest path.

    Args:
        seconds: what each action lasts; a bare array of shape (A,) will do.
        steps: steps to run, at least 2; the period is the last one's distance from the one before (default: 2 where
            the plan's ``sync`` is a barrier, else 4).
        slowdown: at least 1; 1 is none.
    """
    lowered = plan if isinstance(plan, Lowered) else lower_plan(plan)
    plan = lowered.plan
    if isinstance(seconds, np.ndarray):
        seconds = plain_seconds(plan, seconds.astype(np.float64))
    steps = max(2, steps or (2 if plan.sync is Sync.GLOBAL_NORM else 4))
    duration = np.zeros(len(lowered))
    np.maximum.at(duration, lowered.of, seconds.total)
    runs = longest_path_runs(lowered, duration, steps)
    overlapped = False
    if slowdown > 1.0:
        kind = kinds(lowered, seconds)
        overlapped = contends(lowered, kind, duration, runs)
        if overlapped:
            runs = overlapped_runs(lowered, kind, duration, slowdown, steps)
    of = lowered.of
    (start, end), (_, previous), (late_start, late_end) = runs[0], runs[-2], runs[-1]
    makespan = float(end.max(initial=0.0))
    period = float(late_end.max(initial=0.0) - previous[late_end.argmax()]) if len(late_end) else 0.0
    held = on_compute(plan)
    busy = sums(row_of(plan)[held], seconds.total[held], len(plan.rows))
    slower = np.zeros(len(plan.rows))
    if overlapped:
        longer = np.maximum(0.0, (late_end - late_start)[of[held]] - seconds.total[held])
        slower = sums(row_of(plan)[held], longer, len(plan.rows))
    return Simulation(
        lowered, seconds, start[of], end[of], late_start[of], late_end[of], previous[of], period, makespan,
        busy + slower, slower,
    )  # fmt: skip
