"""Turn priorities into an order: simulate rows that always take the most urgent task that may run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from piper_core.schedule.list_problem import ListProblem, Order, slackened


class Fixed:
    """What of a problem does not depend on seconds, as columns, lists or arrays: for each task where its ``preds``
    begin, those and their delays, what it acquires and frees, its row; for each row where its tasks begin, and its
    limit."""

    def __init__(self, problem: ListProblem, limit: list[float]) -> None:
        pairs = [pair for preds in problem.preds for pair in preds]
        counts = [0] * problem.rows
        for row in problem.row:
            counts[row] += 1
        self.row_first = [0, *accumulate(counts)]
        self.lists: tuple[list[Any], ...] = (
            [0, *accumulate(map(len, problem.preds))], [pred for pred, _ in pairs], [delay for _, delay in pairs],
            list(problem.hold_bytes), list(problem.release_bytes), list(problem.row), self.row_first, limit,
        )  # fmt: skip

    @cached_property
    def arrays(self) -> tuple[Any, ...]:
        kinds = np.int32, np.int32, np.float64, np.float64, np.float64, np.int32, np.int32, np.float64
        return tuple(np.asarray(column, kind) for column, kind in zip(self.lists, kinds, strict=True))


@dataclass(frozen=True, slots=True)
class Network:
    """A problem with what every pass over it needs at hand.

    ``head_s[t]`` is the longest path before task t, ``tail_s[t]`` the longest after it. ``kind[t]`` is the
    queue of its row that t waits in: 0 plain, 1 filler, 2 and up for each stage whose tasks acquire memory.
    ``nested`` says of each row whether a microbatch acquires more than once there. ``turn`` numbers the
    microbatches in the order in which the rows that they begin on can take them, one of each row in turn;
    they begin on ``lanes`` rows.
    """

    problem: ListProblem
    limit: list[float]
    succs: list[list[tuple[int, float]]]
    order: list[int]
    head_s: list[float]
    tail_s: list[float]
    kind: list[int]
    kinds: list[int]
    nested: list[bool]
    turn: dict[int, int]
    lanes: int
    quantum_s: float
    fixed: Fixed

    @staticmethod
    def of(problem: ListProblem) -> Network:
        """Compile a problem; its limits get room for rounding.

        Raises:
            DirectiveError: the precedence is cyclic.
        """
        order, seconds = problem.topological(), problem.seconds
        succs: list[list[tuple[int, float]]] = [[] for _ in order]
        for task, preds in enumerate(problem.preds):
            for pred, delay in preds:
                succs[pred].append((task, delay))
        head = [0.0] * len(order)
        tail = [0.0] * len(order)
        for task in order:
            head[task] = max((head[u] + seconds[u] + d for u, d in problem.preds[task]), default=0.0)
        for task in reversed(order):
            tail[task] = max((tail[u] + seconds[u] + d for u, d in succs[task]), default=0.0)
        stages: list[dict[tuple[int, int], int]] = [{} for _ in range(problem.rows)]
        kind = []
        for task, row in enumerate(problem.row):
            if problem.hold_bytes[task]:
                stage = problem.key[task][:2]
                kind.append(stages[row].setdefault(stage, len(stages[row]) + 2))
            else:
                kind.append(int(problem.filler[task]))
        begun: dict[int, list[int]] = {}
        seen = set()
        for task in order:
            if (mb := problem.key[task][2]) not in seen:
                seen.add(mb)
                begun.setdefault(problem.row[task], []).append(mb)
        turns = sorted((at, mb) for mbs in begun.values() for at, mb in enumerate(mbs))
        limit = [slackened(limit) for limit in problem.limit_bytes]
        return Network(
            problem=problem,
            limit=limit,
            succs=succs,
            order=order,
            head_s=head,
            tail_s=tail,
            kind=kind,
            kinds=[len(names) + 2 for names in stages],
            nested=[len(names) > 1 for names in stages],
            turn={mb: turn for turn, (_, mb) in enumerate(turns)},
            lanes=len(begun),
            quantum_s=1e-9 * max(max(seconds, default=0.0), 1e-30),
            fixed=Fixed(problem, limit),
        )

    def reversed(self) -> Network:
        """Return the network with time turned round: what frees memory acquires it, nothing is a filler."""
        old = self.problem
        return Network.of(
            ListProblem(
                old.rows, old.row, old.seconds, self.succs, old.release_bytes, old.hold_bytes,
                old.limit_bytes, [False] * len(old.row), old.key,
            )
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Decoded:
    """An order, when each task starts in it, and its two measures in seconds."""

    order: Order
    start_s: list[float]
    makespan_s: float
    span_s: float


def decode(
    network: Network, urgency: list[float], *, patience: float = 0.0, eager: bool = False, guarded: bool = True
) -> Decoded | None:
    """Simulate: whenever a row is idle it starts the ready task of least ``urgency`` that its memory admits,
    a filler only when nothing else may start. None when memory stops all rows.

    ``eager`` fillers are as urgent as they say while their row has memory left to acquire. With ``patience`` x
    a row leaves a less urgent task of s seconds waiting when a more urgent one is known to become ready within
    x s seconds.

    So that rows cannot starve themselves, a task acquires memory only where every earlier microbatch could
    still get all that it needs on this row from what is free and what microbatches before it give back
    (the banker's rule, with microbatches in order of turn); not where ``guarded`` is false.
    """
    problem, succs, kind, nested = network.problem, network.succs, network.kind, network.nested
    row_of, seconds, key = problem.row, problem.seconds, problem.key
    turn = [network.turn[mb] for _, _, mb in key]
    hold, release = problem.hold_bytes, problem.release_bytes
    total = len(row_of)
    by_rank = sorted(range(total), key=lambda t: (urgency[t], key[t]))
    rank = [0] * total
    for position, task in enumerate(by_rank):
        rank[task] = position
    free = list(network.limit)
    acquiring = [0] * problem.rows
    if eager:
        for task, row in enumerate(row_of):
            acquiring[row] += kind[task] > 1
    queues: list[list[list[int]]] = [[[] for _ in range(count)] for count in network.kinds]
    bank = [_Bank(network, row) if guarded and nested[row] else None for row in range(problem.rows)]
    waiting = [len(preds) for preds in problem.preds]
    arrival = [0.0] * total
    start = [0.0] * total
    order: Order = [[] for _ in range(problem.rows)]
    busy = [False] * problem.rows
    coming: list[list[tuple[float, int]]] = [[] for _ in range(problem.rows)]
    events = [(0.0, total + t) for t in range(total) if not waiting[t]]
    heapify(events)
    quantum, done = network.quantum_s, 0
    while events:
        now = events[0][0]
        until = now + quantum
        touched = set()
        while events and events[0][0] <= until:
            event = heappop(events)[1]
            if event < total:
                row = row_of[event]
                busy[row] = False
                if release[event]:
                    free[row] += release[event]
                    if (ledger := bank[row]) is not None:
                        ledger.free(turn[event], release[event])
            else:
                event -= total
                row = row_of[event]
                heappush(queues[row][kind[event]], rank[event])
            touched.add(row)
        for row in touched:
            if busy[row]:
                continue
            lines = queues[row]
            best = lines[0][0] if lines[0] else total
            if acquiring[row] > 0 and lines[1] and lines[1][0] < best:
                best = lines[1][0]
            room, ledger = free[row], bank[row]
            for line in lines[2:]:
                if line and line[0] < best:
                    task = by_rank[line[0]]
                    if hold[task] <= room and (ledger is None or ledger.admits(turn[task], hold[task], room)):
                        best = line[0]
            if best == total:
                if not lines[1]:
                    continue
                best = lines[1][0]
                threshold = total
            else:
                threshold = best
            task = by_rank[best]
            if patience:
                soon = coming[row]
                while soon and soon[0][0] <= until:
                    heappop(soon)
                horizon = now + patience * seconds[task]
                if any(
                    when < horizon and position < threshold and hold[by_rank[position]] <= room
                    for when, position in soon
                ):
                    continue
            heappop(lines[kind[task]])
            busy[row] = True
            order[row].append(task)
            done += 1
            start[task] = now
            end = now + seconds[task]
            if hold[task]:
                acquiring[row] -= 1
                free[row] -= hold[task]
                if ledger is not None:
                    ledger.take(turn[task], hold[task])
            heappush(events, (end, task))
            for after, delay in succs[task]:
                if end + delay > arrival[after]:
                    arrival[after] = end + delay
                waiting[after] -= 1
                if not waiting[after]:
                    heappush(events, (arrival[after], total + after))
                    if patience and not problem.filler[after]:
                        heappush(coming[row_of[after]], (arrival[after], rank[after]))
    if done < total:
        return None
    return measured(network, order, start)


def measured(network: Network, order: Order, start: list[float]) -> Decoded:
    """Return an order with its measures, given when its tasks start."""
    seconds = network.problem.seconds
    ends = [start[row[-1]] + seconds[row[-1]] for row in order if row]
    begins = [start[row[0]] for row in order if row]
    span = max((end - begin for end, begin in zip(ends, begins, strict=True)), default=0.0)
    return Decoded(order, start, max(ends, default=0.0), span)


def replay(network: Network, order: Order) -> Decoded | None:
    """Start every task of an order as early as it can; None when the order contradicts the precedence."""
    problem, succs = network.problem, network.succs
    seconds = problem.seconds
    total = len(seconds)
    waiting = [len(preds) for preds in problem.preds]
    follower = [-1] * total
    for tasks in order:
        for first, second in pairwise(tasks):
            follower[first] = second
            waiting[second] += 1
    start = [0.0] * total
    ready = [tasks[0] for tasks in order if tasks and not waiting[tasks[0]]]
    for task in ready:
        end = start[task] + seconds[task]
        for after, delay in succs[task]:
            if end + delay > start[after]:
                start[after] = end + delay
            waiting[after] -= 1
            if not waiting[after]:
                ready.append(after)
        after = follower[task]
        if after >= 0:
            if end > start[after]:
                start[after] = end
            waiting[after] -= 1
            if not waiting[after]:
                ready.append(after)
    return measured(network, order, start) if len(ready) == total else None


class _Bank:
    """Who holds and who still needs how much of one row's memory, microbatches by turn."""

    __slots__ = ("_first", "_held", "_need", "_tiny")

    def __init__(self, network: Network, row: int) -> None:
        problem = network.problem
        self._need = [0.0] * len(network.turn)
        self._held = [0.0] * len(network.turn)
        self._first = 0
        for task, at in enumerate(problem.row):
            if at == row:
                self._need[network.turn[problem.key[task][2]]] += problem.hold_bytes[task]
        self._tiny = 1e-9 * max(self._need)

    def take(self, turn: int, amount: float) -> None:
        self._need[turn] -= amount
        self._held[turn] += amount

    def free(self, turn: int, amount: float) -> None:
        self._held[turn] -= amount

    def admits(self, turn: int, amount: float, room: float) -> bool:
        """Say whether earlier microbatches can still be served after that of ``turn`` takes ``amount``."""
        need, held, tiny, first = self._need, self._held, self._tiny, self._first
        while first < turn and need[first] <= tiny and held[first] <= tiny:
            first += 1
        self._first = first
        available = room - amount + tiny
        for other in range(first, turn):
            if need[other] > available and need[other] > tiny:
                return False
            available += held[other]
        return True
