"""Rules that say which task is more urgent, and periodic patterns."""

from __future__ import annotations

from collections.abc import Iterator

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


def starts(network: Network, effort: int) -> Iterator[Decoded]:
    """Yield schedules that keep the limits, from rules in order of promise."""
    problem = network.problem
    key, tasks = problem.key, range(len(problem.row))
    period = _period(network)
    for stretch in (1.0, 1.03, 1.1)[: 1 + 2 * effort]:
        found = _as_ordered(network, pattern(network, stretch))
        if found is not None:
            yield found
            if not effort:
                return
    for drift in (0.5, 0.4, 0.75, 1.0, 0.25, 1.5):
        rule = [key[t][2] * period * drift + network.head_s[t] for t in tasks]
        for patience in (0.0, 0.5, 1.0) if effort else (0.0,):
            found = decode(network, rule, patience=patience)
            if found is not None:
                yield found
                if not effort:
                    return
    rules = [
        [-network.tail_s[t] - problem.seconds[t] for t in tasks],
        [key[t][2] + (1e6 if problem.hold_bytes[t] else 0.0) - 1e-3 * key[t][0] for t in tasks],
        pattern(network),
    ]
    for rule in rules:
        for patience in (0.0, 0.5, 1.0):
            found = decode(network, rule, patience=patience)
            if found is not None:
                yield found
                if not effort:
                    return


def _period(network: Network) -> float:
    problem = network.problem
    work = [0.0] * problem.rows
    for task, row in enumerate(problem.row):
        work[row] += problem.seconds[task]
    return max(work) / len({mb for _, _, mb in problem.key})


def _as_ordered(network: Network, start: list[float]) -> Decoded | None:
    """Replay each row in order of ``start``; None where that is illegal or exceeds a limit."""
    problem = network.problem
    order: Order = [[] for _ in range(problem.rows)]
    for task in sorted(range(len(start)), key=lambda t: (start[t], problem.key[t])):
        order[problem.row[task]].append(task)
    if any(peak > limit for peak, limit in zip(peaks(problem, order), network.limit, strict=True)):
        return None
    return replay(network, order)
