"""Order compute on rows under memory limits: many priority rules through one simulation, the best kept."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, TypeAlias

from piper_core.errors import InfeasibleError
from piper_core.schedule.list_decode import Decoded, Network, decode, replay
from piper_core.schedule.list_problem import ListProblem, Order, check_limits, peaks, slackened

Measure: TypeAlias = Literal["makespan", "span"]


def list_schedule(problem: ListProblem, *, effort: int = 1, measure: Measure = "makespan") -> Order:
    """Return the total order of tasks on each row, the best found for ``measure`` (ties by the other one).

    A problem whose precedence already orders each row keeps that order. The order comes from a simulation,
    so it cannot deadlock. ``effort`` 0 takes the best of very few rules, 1 and up try more.

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
    best: Decoded | None = None
    T = max(
        sum(problem.seconds[t] for t in range(len(problem.row)) if problem.row[t] == r and problem.key[t][2] == 0)
        for r in range(problem.rows)
    )
    rules = [
        [-network.tail_s[t] - problem.seconds[t] for t in range(len(problem.row))],
        [problem.key[t][2] * T + network.head_s[t] for t in range(len(problem.row))],
    ]
    for rule in rules:
        found = decode(network, rule)
        if found is not None and (best is None or found.makespan_s < best.makespan_s):
            best = found
    if best is None:
        raise InfeasibleError("no order found that keeps the limits under the given partial order")
    return best.order


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
