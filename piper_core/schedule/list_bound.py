"""Times that no order can beat."""

from __future__ import annotations

from heapq import heappop, heappush

from piper_core.schedule.list_decode import Network


def makespan_bound_s(network: Network) -> float:
    """Return a lower bound of the makespan in seconds.

    For each row: the end of Jackson's preemptive schedule of its tasks with their heads and tails (Carlier
    1982), which is the largest, over all subsets of them, of the least head plus all work plus the least
    tail. With one task in the subset this is the longest path through it.
    """
    problem = network.problem
    rows: list[list[int]] = [[] for _ in range(problem.rows)]
    for task, row in enumerate(problem.row):
        rows[row].append(task)
    return max(max(_jackson(network, tasks), _memory(network, tasks)) for tasks in rows)


def span_bound_s(network: Network) -> float:
    """Return a lower bound of the longest span of a row in seconds: the most work of a row."""
    work = [0.0] * network.problem.rows
    for task, row in enumerate(network.problem.row):
        work[row] += network.problem.seconds[task]
    return max(work)


def _jackson(network: Network, tasks: list[int]) -> float:
    head, tail, seconds = network.head_s, network.tail_s, network.problem.seconds
    arrivals = sorted(tasks, key=lambda t: head[t])
    count = len(arrivals)
    left = {t: seconds[t] for t in tasks}
    ready: list[tuple[float, int]] = []
    now = bound = 0.0
    at = 0
    while at < count or ready:
        if not ready:
            now = max(now, head[arrivals[at]])
        while at < count and head[arrivals[at]] <= now:
            heappush(ready, (-tail[arrivals[at]], arrivals[at]))
            at += 1
        task = ready[0][1]
        until = head[arrivals[at]] if at < count else float("inf")
        if now + left[task] <= until:
            now += left[task]
            heappop(ready)
            bound = max(bound, now + tail[task])
        else:
            left[task] -= until - now
            now = until
    return bound


def _memory(network: Network, tasks: list[int]) -> float:
    return 0.0
