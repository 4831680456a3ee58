"""The longest path through a plan's transactions, step after step, and what can be read from it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from piper_core.ir.action import Action
from piper_core.ir.dag import Floats
from piper_core.ir.timeline import Event, Lane, Timeline
from piper_core.names import Sync
from piper_core.schedule.plan import KINDS, Plan, StreamKind
from search.simulator.loops import pick
from search.simulator.lower import (
    COMM_KINDS,
    ActionSeconds,
    Lowered,
    lower_plan,
    plain_seconds,
    sums,
)
from search.simulator.overlap import Run, contends, kinds, longest_path_runs, overlapped_runs


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a plan does when every action starts as early as the rendezvous rules let it.

    Times are in seconds from the start of the first step. By action, shape (A,): ``start_s`` and ``end_s`` of the first
    step. By transaction, shape (T,): when each starts and ends in the last step simulated (``late``), and ends in the
    one before (``previous_end``). ``step_time_s`` is the steady-state period. Per row: ``busy_s`` of the compute stream
    in one step, inner collectives and updates included, and ``contention_s``, how much of that is because collectives
    slow it.
    """

    lowered: Lowered
    seconds: ActionSeconds
    start_s: Floats
    end_s: Floats
    late: Run
    previous_end: Floats
    step_time_s: float
    makespan_s: float
    busy_s: Floats
    contention_s: Floats

    @property
    def plan(self) -> Plan:
        """The plan that was simulated."""
        return self.lowered.plan

    @property
    def late_start_s(self) -> Floats:
        """When each action starts in the last step simulated, shape (A,)."""
        return self.late[0][self.lowered.of]

    @property
    def late_end_s(self) -> Floats:
        """When each action ends in the last step simulated, shape (A,)."""
        return self.late[1][self.lowered.of]

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
        plan, lowered, loops = self.plan, self.lowered, pick(0)
        floors, ends, indices = [np.zeros(0)], [np.zeros(0)], [np.zeros(0, np.int64)]
        for s, stream in enumerate(plan.streams):
            low, high = int(plan.start[s]), int(plan.start[s + 1])
            if stream.kind is not StreamKind.COMPUTE or low == high:
                continue
            mine = lowered.of[low:high]
            start = self.late[0][mine]
            since = np.concatenate([self.previous_end[mine[-1:]], self.late[1][mine[:-1]]])
            idle = np.flatnonzero(start > since + 1e-12)
            floors.append(since[idle])
            ends.append(start[idle])
            indices.append(low + idle)
        index = np.concatenate(indices)
        columns = (
            np.concatenate(floors), np.concatenate(ends), lowered.of[index], lowered.row[index], *self.late,
            self.seconds.comm, lowered.of, lowered.heads, plan.wait_start, plan.waits, lowered.member_first,
            lowered.member_of,
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
        lowered, path = self.lowered, [int(self.lowered.of[int(np.argmax(self.end_s))])]
        while (cause := self._cause(path[-1])) >= 0:
            path.append(cause)
        rows = lowered.row
        members = lowered.member_of[lowered.member_first[path[::-1]]].tolist()
        lasts = self.end_s - self.start_s
        return [(int(rows[i]), plan.action(i), float(lasts[i])) for i in members]

    def _cause(self, t: int) -> int:
        """Return the transaction that one waited for last in the first step (-1: none); of several, the first."""
        lowered, plan = self.lowered, self.plan
        mine = lowered.member_of[lowered.member_first[t] : lowered.member_first[t + 1]]
        before = mine[~lowered.heads[mine]] - 1
        actions = np.concatenate([before, *(plan.waits[plan.wait_start[a] : plan.wait_start[a + 1]] for a in mine)])
        found = lowered.of[actions[self.end_s[actions] == self.start_s[mine[0]]]]
        return int(found.min()) if len(found) else -1

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
    duration = np.zeros(0)
    if len(lowered):
        duration = np.maximum.reduceat(seconds.total[lowered.member_of], lowered.member_first[:-1])
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
    held = np.flatnonzero(lowered.computes)
    row = lowered.row[held]
    busy = sums(row, seconds.total[held], len(plan.rows))
    slower = np.zeros(len(plan.rows))
    if overlapped:
        longer = np.maximum(0.0, (late_end - late_start)[of[held]] - seconds.total[held])
        slower = sums(row, longer, len(plan.rows))
    return Simulation(
        lowered, seconds, start[of], end[of], (late_start, late_end), previous, period, makespan, busy + slower, slower,
    )  # fmt: skip
