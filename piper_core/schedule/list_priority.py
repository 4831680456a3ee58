"""Where a search for an order starts: rules of urgency, and periodic patterns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from piper_core.names import Phase
from piper_core.schedule.list_decode import Decoded, Network, decode, replay
from piper_core.schedule.list_problem import Order, peaks


def period_s(network: Network) -> float:
    """Return the least time between microbatches in a steady state: the most work of a row, shared out."""
    work = [0.0] * network.problem.rows
    for task, row in enumerate(network.problem.row):
        work[row] += network.problem.seconds[task]
    return max(work) / len(network.turn)


@dataclass(frozen=True, slots=True)
class Rule:
    """One way to say how urgent a task is, and how a row decides.

    Urgency is when the task could run at best, plus ``drift`` periods for each microbatch before it (in rounds
    of ``rounds`` microbatches that follow each other by one F), less ``acquire_first`` periods for what
    acquires memory and ``filler_first`` for fillers. ``eager`` and ``patience``: see :func:`decode`.
    """

    drift: float
    acquire_first: float = 0.0
    filler_first: float = 0.0
    rounds: int = 1
    eager: bool = False
    patience: float = 0.0

    def decode(self, network: Network) -> Decoded | None:
        """Run the rule."""
        return decode(network, self.urgency(network), patience=self.patience, eager=self.eager)

    def urgency(self, network: Network) -> list[float]:
        """Return the urgency of each task, seconds."""
        problem, size, period = network.problem, self.rounds, period_s(network)
        forwards = [s for s, key in zip(problem.seconds, problem.key, strict=True) if key[1] == Phase.F]
        pace = sum(forwards) / max(1, len(forwards))
        after = {
            mb: (turn - turn % size) * period * self.drift + turn % size * pace for mb, turn in network.turn.items()
        }
        less = 0.0, self.filler_first * period, self.acquire_first * period
        return [
            head + after[mb] - less[min(kind, 2)]
            for head, (_, _, mb), kind in zip(network.head_s, problem.key, network.kind, strict=True)
        ]


def rules(network: Network) -> Iterator[Rule]:
    """Yield rules, the most promising first."""
    yield Rule(0.5)
    yield Rule(0.4, 0.5, 0.5, eager=True)
    if any(network.nested):
        count, rows = len(network.turn), network.problem.rows
        rounds = -(-count // max(1, count // rows))  # as even as can be, none shorter than the pipeline
        yield Rule(0.34, rounds=rounds)
        for drift, first in ((0.6, 1.0), (0.5, 0.25), (0.4, 0.0), (0.34, -1.0), (0.4, -1.0)):
            yield Rule(drift, first, rounds=rounds, patience=3.0)
    for patience, drift in product((0.0, 0.5, 1.0), (0.4, 0.5, 0.75, 1.0, 0.25)):
        yield Rule(drift, patience=patience)
        yield Rule(drift, 0.5, 0.5, eager=True, patience=patience)


def patterns(network: Network) -> Iterator[Decoded]:
    """Yield schedules that repeat one pattern, slow enough to keep the limits.

    Patterns are sought for the durations as they are, and for equal ones without delays, which leave fewer
    odd gaps; with and without slack (in mean durations) wherever work passes to another stage, which uses
    memory that is left to wait less for links and slow stages.
    """
    problem = network.problem
    mean_s = sum(problem.seconds) / len(problem.seconds)
    plain = [[(pred, 0.0) for pred, _ in pairs] for pairs in problem.preds]
    even = replace(network, problem=replace(problem, seconds=[mean_s] * len(problem.seconds), preds=plain))
    for base, slack, more in (
        (even, 0.0, 0.0),
        (even, 0.5, 0.0),
        (even, 2.0, 0.0),
        (network, 0.0, 0.0),
        (network, 0.0, 0.1),
        (network, 2.0, 0.0),
    ):
        pattern = _fitting(base, slack * mean_s, more)
        found = as_ordered(network, pattern.starts(network))
        if found is not None:
            yield found


def _fitting(network: Network, slack_s: float, more: float) -> Pattern:
    """Return the fastest pattern that keeps the limits, slowed by ``more`` of the least period."""
    least = period_s(network) * network.lanes
    longest = max(map(sum, zip(network.head_s, network.tail_s, strict=True)), default=0.0)
    stretch = 1.0
    pattern = Pattern.of(network, least, slack_s)
    while not pattern.fits(network) and stretch * least < 2 * longest:
        stretch *= 1.025
        pattern = Pattern.of(network, stretch * least, slack_s)
    return Pattern.of(network, (stretch + more) * least, slack_s) if more else pattern


@dataclass(frozen=True, slots=True)
class Pattern:
    """Starts (seconds) of the tasks of ``lanes`` microbatches in a schedule that repeats every ``period_s``.

    ``offset`` is by (stage, phase, lane).
    """

    period_s: float
    offset: dict[tuple[int, int, int], float]

    @staticmethod
    def of(network: Network, period_s: float, slack_s: float = 0.0) -> Pattern:
        """Place tasks in topological order, fillers last, each as early as its predecessors and the time that
        its row has left in every period allow (modulo scheduling, Rau 1994), and no earlier than ``slack_s``
        after predecessors of other stages."""
        problem, lanes, key = network.problem, network.lanes, network.problem.key
        seconds, quantum = problem.seconds, network.quantum_s
        one = [t for t in network.order if network.turn[problem.key[t][2]] < lanes]
        one.sort(key=lambda t: problem.filler[t])
        taken: list[list[tuple[float, float]]] = [[] for _ in range(problem.rows)]
        begin: dict[int, float] = {}
        for task in one:
            ready = 0.0
            for pred, delay in problem.preds[task]:
                if pred in begin:
                    wait = delay + slack_s if key[pred][0] != key[task][0] else delay
                    ready = max(ready, begin[pred] + seconds[pred] + wait)
            busy, need = taken[problem.row[task]], seconds[task]
            begin[task] = ready
            for wait in sorted({0.0, *((at + long - ready) % period_s for at, long in busy)}):
                when = ready + wait
                if all(
                    (when - at) % period_s >= long - quantum and (at - when) % period_s >= need - quantum
                    for at, long in busy
                ):
                    begin[task] = when
                    break
            busy.append((begin[task], need))
        names = {task: (*problem.key[task][:2], network.turn[problem.key[task][2]]) for task in one}
        return Pattern(period_s, {names[task]: when for task, when in begin.items()})

    def starts(self, network: Network) -> list[float]:
        """Return the start of every task."""
        when = {mb: divmod(turn, network.lanes) for mb, turn in network.turn.items()}
        return [
            self.offset.get((stage, phase, when[mb][1]), 0.0) + when[mb][0] * self.period_s
            for stage, phase, mb in network.problem.key
        ]

    def fits(self, network: Network) -> bool:
        """Say whether what the steady state holds on each row is within its limit."""
        problem, period, slack = network.problem, self.period_s, network.quantum_s
        copies = -(-len(network.turn) // network.lanes)
        held: list[list[tuple[float, float, float]]] = [[] for _ in range(problem.rows)]
        until: dict[tuple[int, int], float] = {}
        for task, (stage, phase, mb) in enumerate(problem.key):
            lane = network.turn[mb]
            if lane < network.lanes and problem.release_bytes[task]:
                until[stage, lane] = self.offset[stage, phase, lane] + problem.seconds[task]
        for task, (stage, phase, mb) in enumerate(problem.key):
            lane = network.turn[mb]
            if lane < network.lanes and problem.hold_bytes[task]:
                begin = self.offset[stage, phase, lane]
                end = until.get((stage, lane), float("inf"))
                held[problem.row[task]].append((begin, end, problem.hold_bytes[task]))
        for row, spans in enumerate(held):
            for now, _, _ in spans:
                bytes_now = 0.0
                for begin, end, amount in spans:
                    alive = (now - begin + slack) // period - (now - end + slack) // period
                    bytes_now += min(alive, copies) * amount
                if bytes_now > network.limit[row]:
                    return False
        return True


def as_ordered(network: Network, start: list[float]) -> Decoded | None:
    """Replay each row in order of ``start``; None where that is illegal or exceeds a limit."""
    problem = network.problem
    order: Order = [[] for _ in range(problem.rows)]
    for task in sorted(range(len(start)), key=lambda t: (start[t], problem.key[t])):
        order[problem.row[task]].append(task)
    if any(peak > limit for peak, limit in zip(peaks(problem, order), network.limit, strict=True)):
        return None
    return replay(network, order)
