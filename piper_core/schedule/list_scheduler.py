"""Order compute on rows under memory limits: many starts, each justified, the best shaken, the best kept.

A start is a periodic pattern, or a rule of urgency run through a simulation. Justification moves tasks into idle
time, backwards and forwards in time, until that gains nothing. No published schedule is consulted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise

from piper_core.errors import InfeasibleError
from piper_core.schedule.list_bound import jackson_s, lower_bound_s, work_bound_s
from piper_core.schedule.list_decode import Decoded, Network, decode
from piper_core.schedule.list_improve import Improver
from piper_core.schedule.list_priority import Rule, patterns, rules
from piper_core.schedule.list_problem import ListProblem, Measure, Order, check_limits, peaks, slackened

_VISITS = 220_000
"""Visits of tasks that each step of effort allows, about 0.25 s."""

_SHARE = 0.6
"""Of these, the part that goes to finding a start; the rest shakes the best."""

_STALL = 150
"""Shakes without gain, for each step of effort, after which no more is expected."""


def list_schedule(problem: ListProblem, *, effort: int = 1, measure: Measure = "makespan", seed: int = 0) -> Order:
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
    network = Network.of(_timed(problem))
    best = _search(network, measure, effort, seed)
    if best is None:
        best = decode(network, network.head_s, guarded=False)
    if best is None:
        raise _infeasible(network)
    return best.order


def _timed(problem: ListProblem) -> ListProblem:
    """Give tasks of no duration a small one, so that the order of starts says which comes first."""
    least = 1e-6 * (max(problem.seconds) or 1.0)
    if min(problem.seconds) >= least:
        return problem
    return replace(problem, seconds=[max(seconds, least) for seconds in problem.seconds])


def _search(network: Network, measure: Measure, effort: int, seed: int) -> Decoded | None:
    """Return the best schedule that the work allowed by ``effort`` finds, or one that meets a lower bound."""
    problem = network.problem
    rounding = network.quantum_s * len(network.order)
    goal = (jackson_s(network) if measure == "makespan" else work_bound_s(problem)) + rounding
    improver = Improver(network, measure, goal, seed)
    allowed = effort * _VISITS
    best: Decoded | None = None
    waiting: list[Decoded] = []
    starts = _starts(network)
    while batch := list(islice(starts, 4 if effort else 1)):
        improver.work += 4 * len(network.order) * len(batch)
        waiting += [found for found in batch if found is not None]
        waiting.sort(key=improver.score)
        for found in waiting[:2]:
            settled = improver.settle(found)
            if best is None or improver.score(settled) < improver.score(best):
                best = settled
        del waiting[:2]
        if best is not None and (improver.done(best) or improver.work > _SHARE * allowed):
            break
    if best is None or improver.done(best) or not effort:
        return best
    proving = len(network.order) ** 2 // (2 * problem.rows)
    if measure == "makespan" and not any(network.nested) and proving < 0.5 * allowed:
        improver.goal_s = lower_bound_s(problem) + rounding
        improver.work += proving
    serial = gained = 0
    while improver.work < allowed and serial < gained + _STALL * effort and not improver.done(best):
        shaken = improver.shake(best, serial)
        serial += 1
        if improver.score(shaken) < improver.score(best):
            gained = serial
        if improver.score(shaken) <= improver.score(best):
            best = shaken
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
    """Say which row the partial order makes exceed its limit, and what it needs for sure, or at best found."""
    problem = network.problem
    need = _least_bytes(network)
    excess, row = max((need[row] / limit if limit else 0.0, -row) for row, limit in enumerate(network.limit))
    if excess > 1.0:
        row = -row
        return InfeasibleError(
            f"row {row} holds at least {need[row]:.6g} bytes of activations under the given partial order and its "
            f"limit is {problem.limit_bytes[row]:.6g}: {need[row] - problem.limit_bytes[row]:.6g} too many"
        )
    roomy = Network.of(replace(problem, limit_bytes=[float("inf")] * problem.rows))
    loose = decode(roomy, Rule(10.0).urgency(roomy), eager=True)
    held = peaks(problem, loose.order) if loose is not None else need
    row = max(range(problem.rows), key=lambda r: (held[r] / network.limit[r] if network.limit[r] else 0.0, -r))
    return InfeasibleError(
        f"row {row} cannot keep its limit of {problem.limit_bytes[row]:.6g} bytes of activations under the given "
        f"partial order: the least found is {held[row]:.6g}, {held[row] - problem.limit_bytes[row]:.6g} too many"
    )


def _least_bytes(network: Network) -> list[float]:
    """Return what each row must hold at some time: where a task starts, all that precedence makes be acquired
    before it and freed after it."""
    problem = network.problem
    before = [0] * len(network.order)  # bit sets
    for task in network.order:
        for pred, _ in problem.preds[task]:
            before[task] |= before[pred] | 1 << pred
    frees = {(*problem.key[t][::2], problem.row[t]): t for t in network.order if problem.release_bytes[t]}
    need = [0.0] * problem.rows
    holders: list[list[tuple[int, int]]] = [[] for _ in range(problem.rows)]
    for task in network.order:
        if problem.hold_bytes[task]:
            row = problem.row[task]
            held = problem.hold_bytes[task]
            for other, freed in holders[row]:
                if before[task] >> other & 1 and before[freed] >> task & 1:
                    held += problem.hold_bytes[other]
            need[row] = max(need[row], held)
            freed = frees.get((*problem.key[task][::2], row), -1)
            if freed >= 0:
                holders[row].append((task, freed))
    return need
