"""Make an order better: move tasks into idle time that they fit, forwards and backwards in time."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from random import Random

from piper_core.schedule.list_decode import Decoded, Network, measured
from piper_core.schedule.list_problem import Measure


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
    problem = network.problem
    seconds, hold, release, row_of, preds = (
        problem.seconds, problem.hold_bytes, problem.release_bytes, problem.row, problem.preds,
    )  # fmt: skip
    quantum = network.quantum_s
    new = [0.0] * len(start)
    rows: list[list[int]] = [[] for _ in range(problem.rows)]
    begins: list[list[float]] = [[] for _ in range(problem.rows)]
    ends: list[list[float]] = [[] for _ in range(problem.rows)]
    held: list[list[float]] = [[] for _ in range(problem.rows)]  # while the task at this position runs
    limit = network.limit
    for task in sorted(network.order, key=start.__getitem__):  # ties stay in topological order
        row, need, acquires = row_of[task], seconds[task], hold[task]
        ready = lag[row] if lag else 0.0
        for pred, delay in preds[task]:
            end = new[pred] + seconds[pred] + delay
            if end > ready:
                ready = end
        tasks, begin, finish, profile = rows[row], begins[row], ends[row], held[row]
        last = len(tasks)
        at, when = last, max(ready, finish[-1]) if last else ready
        if last and finish[-1] > ready + quantum:
            if acquires:
                room = limit[row] - acquires
                index = last
                while index and profile[index - 1] <= room:
                    index -= 1
                    gap = finish[index - 1] if index else 0.0
                    if gap < ready:
                        gap = ready
                    if gap + need <= begin[index] + quantum:
                        at, when = index, gap
                    if begin[index] <= ready:
                        break
            else:
                index = bisect_right(finish, ready)
                gap = ready
                while index < last:
                    if gap + need <= begin[index] + quantum:
                        at, when = index, gap
                        break
                    gap = finish[index]
                    index += 1
        before = profile[at - 1] - release[tasks[at - 1]] if at else 0.0
        tasks.insert(at, task)
        begin.insert(at, when)
        finish.insert(at, when + need)
        profile.insert(at, before + acquires)
        if at < last:
            change = acquires - release[task]
            if change:
                for index in range(at + 1, last + 1):
                    profile[index] += change
        new[task] = when
    return measured(network, rows, new)
