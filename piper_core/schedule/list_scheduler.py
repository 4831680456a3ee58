"""Order compute on rows under memory limits: many starts, each justified, the best shaken, the best kept.

A start is a periodic pattern, or a rule of urgency run through a simulation. Justification moves tasks into idle
time, backwards and forwards in time, until that gains nothing. No published schedule is consulted.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from piper_core.errors import InfeasibleError
from piper_core.schedule.list_bound import jackson_s, lower_bound_s, work_bound_s
from piper_core.schedule.list_decode import Decoded, Network
from piper_core.schedule.list_improve import Improver
from piper_core.schedule.list_priority import patterns, rules
from piper_core.schedule.list_problem import ListProblem, Measure, Order, check_limits, peaks, slackened

_VISITS = 200_000
"""Visits of tasks that each step of effort allows, about 0.25 s."""


def list_schedule(
    problem: ListProblem, *, effort: int = 1, measure: Measure = "makespan", seed: int = 0
) -> Order:
    """Return the total order of tasks on each row, the best found for ``measure`` (ties by the other one).

    A problem whose precedence already orders each row keeps that order. The order comes from a simulation,
    so it cannot deadlock. ``effort`` 0 takes the first start that works; each step up allows about 0.25 s.

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
    best = _search(network, measure, effort, seed)
    if best is None:
        raise _infeasible(network)
    return best.order


def _search(network: Network, measure: Measure, effort: int, seed: int) -> Decoded | None:
    """Return the best schedule that the work allowed by ``effort`` finds, or one that meets a lower bound."""
    problem = network.problem
    rounding = network.quantum_s * len(network.order)
    goal = (jackson_s(network) if measure == "makespan" else work_bound_s(problem)) + rounding
    improver = Improver(network, measure, goal, seed)
    allowed = effort * _VISITS
    best: Decoded | None = None
    waiting: list[tuple[tuple[float, float], int, Decoded]] = []
    for serial, found in enumerate(_starts(network)):
        improver.work += 4 * len(network.order)
        if found is not None:
            waiting.append((improver.score(found), serial, found))
        if waiting and (serial % 4 == 3 or not effort):
            waiting.sort()
            for _, _, start in waiting[:2]:
                settled = improver.settle(start)
                if best is None or improver.score(settled) < improver.score(best):
                    best = settled
            del waiting[:2]
        if best is not None and (improver.done(best) or improver.work > 0.6 * allowed):
            break
    if best is None or improver.done(best) or not effort:
        return best
    if measure == "makespan" and not any(network.nested):
        improver.goal_s = lower_bound_s(problem) + rounding
    serial = 0
    while improver.work < allowed and not improver.done(best):
        shaken = improver.shake(best, serial)
        if improver.score(shaken) <= improver.score(best):
            best = shaken
        serial += 1
    return best


def _starts(network: Network) -> Iterator[Decoded | None]:
    yield from patterns(network)
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
