"""Order compute on rows under memory limits: many starts, each justified, the best kept.

A start is a priority rule run through a simulation, or a periodic pattern; justification then moves tasks into
idle time, backwards and forwards in time, until that gains nothing. No published schedule is consulted.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from piper_core.errors import InfeasibleError
from piper_core.schedule.list_bound import makespan_bound_s, span_bound_s
from piper_core.schedule.list_decode import Decoded, Network
from piper_core.schedule.list_improve import Justifier
from piper_core.schedule.list_priority import as_ordered, pattern, rules
from piper_core.schedule.list_problem import ListProblem, Measure, Order, check_limits, peaks, slackened


def list_schedule(problem: ListProblem, *, effort: int = 1, measure: Measure = "makespan") -> Order:
    """Return the total order of tasks on each row, the best found for ``measure`` (ties by the other one).

    A problem whose precedence already orders each row keeps that order. The order comes from a simulation,
    so it cannot deadlock. ``effort`` 0 takes the first rule that works, each step up tries more.

    Raises:
        DirectiveError: the precedence is cyclic.
        InfeasibleError: a row cannot keep its memory limit.
    """
    network = Network.of(problem)
    given = _given(network)
    if given is not None:
        _fits(problem, given)
        return given
    check_limits(problem)
    bound = makespan_bound_s(network) if measure == "makespan" else span_bound_s(network)
    goal = bound + network.quantum_s * len(problem.row)
    best = _search(network, Justifier(network, measure), goal, effort)
    if best is None:
        raise _infeasible(network)
    return best.order


def _search(network: Network, justifier: Justifier, goal: float, effort: int) -> Decoded | None:
    """Return the best schedule that the work allowed by ``effort`` finds; stop at ``goal`` seconds."""
    allowed = effort * 60_000 // max(1, len(network.order))
    best: Decoded | None = None
    settled = 0
    waiting: list[tuple[tuple[float, float], int, Decoded]] = []
    for serial, found in enumerate(_starts(network)):
        if found is not None:
            waiting.append((justifier.score(found), serial, found))
        if (serial % 4 == 3 or not effort) and waiting:
            waiting.sort()
            for _ in range(2):
                if waiting:
                    found = justifier.settle(waiting.pop(0)[2], goal)
                    if best is None or justifier.score(found) < justifier.score(best):
                        best = found
            if best is not None and (justifier.score(best)[0] <= goal or justifier.work + serial > allowed):
                break
    return best


def _starts(network: Network) -> Iterator[Decoded | None]:
    for stretch in (1.0, 1.03, 1.1):
        yield as_ordered(network, pattern(network, stretch))
    for rule in rules(network):
        yield rule.decode(network)


def _given(network: Network) -> Order | None:
    """Return the order of each row where the precedence states all of it edge by edge."""
    problem = network.problem
    rows: Order = [[] for _ in range(problem.rows)]
    for task in network.order:
        rows[problem.row[task]].append(task)
    for row in rows:
        for first, second in pairwise(row):
            if all(pred != first for pred, _ in problem.preds[second]):
                return None
    return rows


def _fits(problem: ListProblem, order: Order) -> None:
    for row, peak in enumerate(peaks(problem, order)):
        if peak > slackened(problem.limit_bytes[row]):
            raise InfeasibleError(
                f"row {row} holds {peak:.6g} bytes of activations at once in the given order and its limit is "
                f"{problem.limit_bytes[row]:.6g}: {peak - problem.limit_bytes[row]:.6g} too many"
            )


def _infeasible(network: Network) -> InfeasibleError:
    return InfeasibleError("no order found that keeps the limits under the given partial order")
