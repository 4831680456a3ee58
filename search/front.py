"""The main search under each objective: quickest, leanest, or the front between the two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from piper_core.errors import InfeasibleError
from search.database import Database
from search.engine import Candidate, Problem, Result, pareto, search
from search.generators.base import Generator
from search.objective import Objective
from search.space import Space

POINTS = 6
"""Most points of a front."""
LESS = 0.85
"""Memory that the next point of a front may take, of what the last one took."""


def find(
    problem: Problem,
    space: Space,
    *,
    objective: Objective,
    budget_s: float,
    progress: Callable[[Result, Generator], None] | None = None,
    **options: Any,
) -> Result:
    """Search for the quickest, or the leanest; for ``pareto``, search for the quickest again and again, each time with
    less memory, then for the leanest, and return what no other beats in both, with the proof of the first (options as
    :func:`search`'s; each further search has a database of its own, since what fits changes)."""
    if objective != "pareto":
        return search(problem, space, objective=objective, budget_s=budget_s, progress=progress, **options)
    share = budget_s / 2
    database: Database | None = options.get("database")
    leaner = options | {"budget_s": share / POINTS, "progress": progress, "tune": False, "journal": None}
    result = search(problem, space, budget_s=share, progress=progress, **options)
    result.objective = objective
    found = {each.config: each for each in result.candidates}
    last = result.best

    def add(more: Result, lent_bytes: float) -> Candidate:
        """Keep what was found with less memory; what is free counts all of it."""
        result.simulated += more.simulated
        result.wall_s += more.wall_s
        if more.stopped == "interrupted":
            result.stopped = "interrupted"
        for each in more.candidates:
            free = replace(each.score, margin_bytes=each.score.margin_bytes + lent_bytes)
            found.setdefault(each.config, replace(each, score=free))
        return more.best

    def apart(number: int, objective: Objective, limit_bytes: float) -> dict[str, Any]:
        """Return the options of a further search."""
        kept = database and database.further(number, objective=objective, memory_bytes=limit_bytes)
        return leaner | {"objective": objective, "database": kept}

    has_bytes = problem.cluster.device.memory_bytes
    for number in range(1, POINTS - 1):
        if result.stopped == "interrupted":
            break
        less = _with_less(problem, last.score.worst_row_bytes * LESS)
        try:
            more = search(less, space, **apart(number, "throughput", less.cluster.device.memory_bytes))
        except InfeasibleError:
            break
        last = add(more, has_bytes - less.cluster.device.memory_bytes)
    if result.stopped != "interrupted":
        add(search(problem, space, **apart(POINTS - 1, "memory", has_bytes)), 0.0)
    ranked = sorted(found.values(), key=lambda each: each.key)
    result.candidates = [ranked[i] for i in pareto(ranked)]
    return result


def _with_less(problem: Problem, memory_bytes: float) -> Problem:
    device = replace(problem.cluster.device, memory_bytes=memory_bytes)
    cluster = replace(problem.cluster, device=device)
    less = Problem(problem.architecture, cluster, problem.gpus, problem.global_batch, problem.seq_len)
    less.price_with(problem.model, problem.cost)
    return less
