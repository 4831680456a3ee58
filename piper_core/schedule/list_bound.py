"""Times that no order can beat."""

from __future__ import annotations

from dataclasses import replace
from heapq import heappop, heappush
from itertools import pairwise

from piper_core.schedule.list_decode import Network
from piper_core.schedule.list_problem import ListProblem, Measure, slackened


def lower_bound_s(problem: ListProblem, measure: Measure = "makespan") -> float:
    """Return a lower bound of a measure over all orders within the limits, seconds.

    The span is at least the most work of a row. The makespan: where microbatches are alike, precedence first
    gains what their symmetry allows (:func:`ordered_alike`); heads and tails are raised by the work that must
    come between; then :func:`jackson_s` on each row.

    Raises:
        DirectiveError: the precedence is cyclic.
    """
    if measure == "span":
        return work_bound_s(problem)
    network = Network.of(ordered_alike(problem))
    return jackson_s(replace(network, head_s=_raised_heads(network), tail_s=_raised_heads(network.reversed())))


def work_bound_s(problem: ListProblem) -> float:
    """Return the most work of a row, seconds."""
    work = [0.0] * problem.rows
    for task, row in enumerate(problem.row):
        work[row] += problem.seconds[task]
    return max(work, default=0.0)


def jackson_s(network: Network) -> float:
    """Return the latest end of Jackson's preemptive schedules of the rows, with heads and tails (Carlier 1982).

    On each row it is the largest, over all subsets of its tasks, of least head plus work plus least tail.
    """
    problem, head, tail = network.problem, network.head_s, network.tail_s
    rows: list[list[int]] = [[] for _ in range(problem.rows)]
    for task, row in enumerate(problem.row):
        rows[row].append(task)
    bound = 0.0
    for tasks in rows:
        arrivals = sorted(tasks, key=lambda t: head[t])
        left = list(problem.seconds)
        ready: list[tuple[float, int]] = []
        now, at, count = 0.0, 0, len(arrivals)
        while at < count or ready:
            if not ready:
                now = max(now, head[arrivals[at]])
            while at < count and head[arrivals[at]] <= now:
                heappush(ready, (-tail[arrivals[at]], arrivals[at]))
                at += 1
            task = ready[0][1]
            if at < count and now + left[task] > head[arrivals[at]]:
                left[task] -= head[arrivals[at]] - now
                now = head[arrivals[at]]
            else:
                now += left[task]
                heappop(ready)
                bound = max(bound, now + tail[task])
    return bound


def ordered_alike(problem: ListProblem) -> ListProblem:
    """Add the precedence that symmetry allows where all microbatches are alike; else return the problem.

    Renaming the k-th start of each (stage, phase) to microbatch k keeps any schedule legal, so microbatches
    may be taken to pass everywhere in order of index. Then, on a row that holds one stage of ``hold`` bytes a
    microbatch, F of microbatch j + K follows what frees microbatch j, with K = limit // hold.
    """
    key, preds = problem.key, [list(pairs) for pairs in problem.preds]
    if any(key[pred][2] != key[task][2] for task, pairs in enumerate(preds) for pred, _ in pairs):
        return problem
    copies: dict[tuple[int, int], list[int]] = {}
    for task in sorted(range(len(key)), key=lambda t: key[t][2]):
        copies.setdefault(key[task][:2], []).append(task)
    acquire: dict[int, list[list[int]]] = {}
    release: dict[int, list[list[int]]] = {}
    for tasks in copies.values():
        if len({_shape(problem, task) for task in tasks}) > 1 or len(tasks) != len(copies[key[0][:2]]):
            return problem
        for one, other in pairwise(tasks):
            preds[other].append((one, 0.0))
        if problem.hold_bytes[tasks[0]]:
            acquire.setdefault(problem.row[tasks[0]], []).append(tasks)
        if problem.release_bytes[tasks[0]]:
            release.setdefault(problem.row[tasks[0]], []).append(tasks)
    for row, holders in acquire.items():
        if len(holders) == len(release.get(row, ())) == 1:
            slots = slackened(problem.limit_bytes[row]) / problem.hold_bytes[holders[0][0]]
            if 1 <= slots < len(holders[0]):
                for freed, held in zip(release[row][0], holders[0][int(slots) :], strict=False):
                    preds[held].append((freed, 0.0))
    return replace(problem, preds=preds)


def _shape(problem: ListProblem, task: int) -> tuple[object, ...]:
    before = tuple(sorted((problem.key[pred][:2], delay) for pred, delay in problem.preds[task]))
    held = problem.hold_bytes[task], problem.release_bytes[task]
    return problem.row[task], problem.seconds[task], held, before


def _raised_heads(network: Network) -> list[float]:
    """Return heads that also count the work of predecessors on the same row: any last few of them take their
    work after the least head among them."""
    problem, seconds = network.problem, network.problem.seconds
    head = list(network.head_s)
    before = [0] * len(head)  # bit sets
    on_row: list[list[int]] = [[] for _ in range(problem.rows)]
    same: list[list[int]] = [[] for _ in head]
    for task in network.order:
        mask = 0
        for pred, _ in problem.preds[task]:
            mask |= before[pred] | 1 << pred
        before[task] = mask
        row = on_row[problem.row[task]]
        same[task] = [u for u in row if mask >> u & 1]
        row.append(task)
    for _ in range(2):
        for task in network.order:
            best = head[task]
            for pred, delay in problem.preds[task]:
                end = head[pred] + seconds[pred] + delay
                if end > best:
                    best = end
            work = 0.0
            for pred in sorted(same[task], key=head.__getitem__, reverse=True):
                work += seconds[pred]
                if head[pred] + work > best:
                    best = head[pred] + work
            head[task] = best
    return head
