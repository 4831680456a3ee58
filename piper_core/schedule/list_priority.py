"""Rules that say which task is more urgent, and periodic patterns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from piper_core.schedule.list_decode import Decoded, Network, decode, replay
from piper_core.schedule.list_problem import Order, peaks


def pattern(network: Network, stretch: float = 1.0) -> list[float]:
    """Return the start of each task in a periodic schedule: every microbatch alike, one period apart.

    The period is the most work that a microbatch gives a row, times ``stretch``. The tasks of one microbatch
    are placed in topological order, each as early as its predecessors and the time that the row has left in
    every period allow, those that acquire and free memory first, fillers after them (modulo scheduling, Rau
    1994).
    """
    problem = network.problem
    seconds, key, row_of = problem.seconds, problem.key, problem.row
    first = min(mb for _, _, mb in key)
    one = [t for t in network.order if key[t][2] == first]
    work = [0.0] * problem.rows
    for t in one:
        work[row_of[t]] += seconds[t]
    period = max(work) * stretch
    quantum = network.quantum_s
    taken: list[list[tuple[float, float]]] = [[] for _ in range(problem.rows)]
    offset: dict[tuple[int, int], float] = {}
    begin: dict[int, float] = {}

    def place(t: int) -> None:
        ready = max((begin[u] + seconds[u] + d for u, d in problem.preds[t] if u in begin), default=0.0)
        busy = taken[row_of[t]]
        candidates = sorted({ready, *(ready + (end - ready) % period for _, end in busy)})
        for when in candidates:
            phase = when % period
            if all(
                (phase - b) % period >= e - b - quantum and (b - phase) % period >= seconds[t] - quantum
                or (abs((phase - b) % period - period) < quantum)
                for b, e in busy
            ):
                break
        else:
            when = ready
        phase = when % period
        busy.append((phase, phase + seconds[t]))
        begin[t] = when
        offset[key[t][:2]] = when

    for t in one:
        if not problem.filler[t]:
            place(t)
    for t in one:
        if problem.filler[t]:
            place(t)
    return [offset.get((s, f), 0.0) + (mb - first) * period for s, f, mb in key]


@dataclass(frozen=True, slots=True)
class Rule:
    """One way to say how urgent a task is, and how a row decides.

    Urgency is when the task could run at best, plus ``drift`` periods for each microbatch before it (rounds
    of ``rounds`` microbatches travel together, one task apart), less ``forward_first`` periods for what
    acquires memory and ``filler_first`` for fillers. ``eager`` and ``patience``: see :func:`decode`.
    """

    drift: float
    forward_first: float = 0.0
    filler_first: float = 0.0
    rounds: int = 1
    eager: bool = False
    patience: float = 0.0

    def decode(self, network: Network) -> Decoded | None:
        """Run the rule."""
        problem, head = network.problem, network.head_s
        period, size = _period(network), self.rounds
        pace = min(s for s in problem.seconds if s > 0.0) if size > 1 else 0.0
        after = {
            mb: (mb - mb % size) * period * self.drift + mb % size * pace for mb in {k[2] for k in problem.key}
        }
        less = [0.0, self.filler_first * period, self.forward_first * period]
        urgency = [
            head[t] + after[mb] - less[min(kind, 2)]
            for t, ((_, _, mb), kind) in enumerate(zip(problem.key, network.kind, strict=True))
        ]
        return decode(network, urgency, patience=self.patience, eager=self.eager)


def rules(network: Network) -> Iterator[Rule]:
    """Yield rules in order of promise."""
    rows = network.problem.rows
    yield Rule(0.5)
    yield Rule(0.4, 0.5, 0.5, eager=True)
    if any(network.nested):
        yield Rule(0.34, rounds=rows)
    for patience in (0.0, 0.5, 1.0):
        for drift in (0.4, 0.5, 0.75, 1.0, 0.25):
            yield Rule(drift, patience=patience)
            yield Rule(drift, 0.5, 0.5, eager=True, patience=patience)


def _period(network: Network) -> float:
    problem = network.problem
    work = [0.0] * problem.rows
    for task, row in enumerate(problem.row):
        work[row] += problem.seconds[task]
    return max(work) / len({mb for _, _, mb in problem.key})


def as_ordered(network: Network, start: list[float]) -> Decoded | None:
    """Replay each row in order of ``start``; None where that is illegal or exceeds a limit."""
    problem = network.problem
    order: Order = [[] for _ in range(problem.rows)]
    for task in sorted(range(len(start)), key=lambda t: (start[t], problem.key[t])):
        order[problem.row[task]].append(task)
    if any(peak > limit for peak, limit in zip(peaks(problem, order), network.limit, strict=True)):
        return None
    return replay(network, order)
