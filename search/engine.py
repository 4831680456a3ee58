"""The search: propose, evaluate on all cores, keep the best, say how far from optimal it can be."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from math import inf
from pathlib import Path

from search.database import Database
from search.empty import why_empty
from search.generators.base import Generator
from search.generators.best_first import NEEDLESS, TIME, BestFirst
from search.objective import Objective
from search.problem import Candidate, Problem
from search.result import Result, candidate_data, pareto, to_data
from search.shortfall import nothing_found
from search.space import Configuration, Space
from search.state import State
from search.tuning import BATCH, CONSIDERED, Reorder
from search.tuning import tune as tune_best
from search.workers import Run, evaluator

__all__ = ["Candidate", "Problem", "Result", "candidate_data", "pareto", "search", "to_data"]

FINER = "not tried: other buckets, prefetches or streams of configurations that were evaluated"
EXPANDED = 1_000
"""Nodes of the search tree between two decisions: about a second, in which other processes find first orders."""
MANY = 1_000_000
"""Configurations from which on a search simulates for longer than it takes to load compiled loops."""
BOUNDING = 0.75
"""Part of the budget that branch and bound may take where the best are then tuned."""
USUALLY = {
    "cp": ("1",), "outer": ("pp",), "cuts": ("balanced",), "bucket": ("1",), "prefetch": ("1",), "streams": ("own",),
    "recompute": ("none", "selective", "full"),
    "schedule": ("1f1b", "interleaved_1f1b", "zb_h1", "zbv", "dualpipev"),
}  # fmt: skip


def search(
    problem: Problem,
    space: Space,
    *,
    top: int = 10,
    budget_s: float = 12.0,
    workers: int | None = None,
    progress: Callable[[Result, Generator], None] | None = None,
    objective: Objective = "throughput",
    database: Database | None = None,
    seed: int = 0,
    journal: Path | None = None,
    tune: bool = True,
    address: str | None = None,
    batches: tuple[float, float] = (inf, inf),
) -> Result:
    """Search the space for the ``top`` strategies with the least step time (or memory) that fit.

    First a batch of the usual configurations, for something good to measure others by; then branch and bound over all,
    with the orders that their families emit, until nothing left can be among the best; then, for the best, the list
    scheduler's orders, and Optuna over buckets, prefetch and streams. Ends after ``budget_s``, or at Ctrl-C, with the
    best so far; while nothing that fits has been found, the budget is ``PATIENCE`` times as long. ``database`` keeps
    what is evaluated and answers for what was; ``journal`` keeps Optuna's study.

    What is found depends on how many batches were evaluated (``Result.batches``), and on nothing else: not on the
    clock, on how many workers there are, or on what was known before. The budget, Ctrl-C, and ``batches``, the most of
    them before and in tuning, end a search between two batches: what a batch that is cut short has evaluated is kept
    for a search that goes on, and counts as not reached. Only while nothing that fits was found, what there is of a
    batch counts.

    Raises:
        InfeasibleError: no configuration is legal, or none fits; the text says what is short by how much.
        KeyboardInterrupt: at Ctrl-C while nothing that fits has been found.
    """
    space.check()
    capacity = problem.cluster.device.memory_bytes
    generator = BestFirst(space, problem.bounds, capacity, objective=objective)
    if not generator.size:
        raise why_empty(space)
    tuned = tune and objective == "throughput"
    share = BOUNDING if tuned else 1.0
    result = Result(size=generator.size, objective=objective)
    state = State(problem, result, budget_s, database, progress, share, batches)
    with _evaluator(problem, workers, address, many=generator.size > MANY) as run:
        try:
            _seed(state, space, run)
            reorder = Reorder(state, run)
            if tuned:
                reorder.begin()
            state.main = generator
            while state.running():
                state.floor = generator.bound()
                batch = generator.ask(BATCH, state.threshold(max(top, CONSIDERED)), state.deadline_s(), EXPANDED)
                if generator.expired:
                    break
                if batch or generator.paused:
                    reorder.end()
                    if not state.evaluate(batch, generator, run):
                        break
                else:
                    result.stopped = "proved"
                    result.batches[0] += 1  # it was expanded for
                if tuned:
                    reorder.look(generator)
            result.stopped = result.stopped or "budget"
            if tuned:
                tune_best(state, space, run, reorder, seed, journal)
            _prove(state, top, generator, run)
        except KeyboardInterrupt:
            result.stopped = "interrupted"
    _finish(result, generator, state)
    if not result.candidates:
        if result.stopped == "interrupted":
            raise KeyboardInterrupt
        raise nothing_found(problem, result, generator, state.tightest)
    return result


def _evaluator(
    problem: Problem, workers: int | None, address: str | None, *, many: bool
) -> AbstractContextManager[Run]:
    if address is None:
        return evaluator(problem, workers, many=many)
    from search.ray_workers import cluster_evaluator

    return cluster_evaluator(problem, address)


def _seed(state: State, space: Space, run: Run) -> None:
    """Find the best of the usual configurations: those with most axes as most people leave them."""
    usual = {name: values for name, values in USUALLY.items() if name not in space.fix}
    narrow = BestFirst(
        replace(space, fix={**space.fix, **usual}), state.problem.bounds, state.problem.cluster.device.memory_bytes,
        objective=state.result.objective,
    )  # fmt: skip
    if state.running() and (batch := narrow.ask(BATCH)):
        state.evaluate(batch, narrow, run)


def _prove(state: State, top: int, generator: BestFirst, run: Run) -> None:
    """Apply the programs of what will be reported, and verify their plans; what is refused there is no candidate. This
    process bounds other orders while others do."""
    result, proved = state.result, set[Configuration]()
    while fresh := [c.config for c in result.candidates[:top] if c.config not in proved]:
        outcomes = run(fresh, lambda: inf, proved=True)
        if state.any_order_s is None:
            state.any_order_s = generator.any_order_bound()
        for config, outcome in zip(fresh, outcomes, strict=True):
            proved.add(config)
            if isinstance(outcome, str):
                result.rejected += 1
                result.pruned[outcome] = result.pruned.get(outcome, 0) + 1
                result.candidates = [c for c in result.candidates if c.config != config]


def _finish(result: Result, generator: BestFirst, state: State) -> None:
    result.pruned |= {reason: n for reason, n in generator.pruned.items() if n}
    if result.needless:
        result.pruned[NEEDLESS] = result.pruned.get(NEEDLESS, 0) + result.needless
    if result.too_big:
        result.pruned["memory: simulated"] = result.too_big
    if result.close:
        result.pruned["memory: too close to call"] = result.close
    counted = [each for each in result.candidates if each.config.order == "family"]
    if result.candidates:
        best = result.best.value(result.objective)
        floor = state.floor if result.stopped == "interrupted" else inf
        result.least_left_s = min(floor, generator.bound())
        any_order_s = generator.any_order_bound() if state.any_order_s is None else state.any_order_s
        result.least_s = min(result.least_left_s, generator.rest_bound(), any_order_s)
        result.proof_gap = max(0.0, (best - min(best, result.least_s)) / best)
        result.family_gap = max(0.0, (best - min(best, result.least_left_s)) / best)
        finer = generator.rest(best) - result.finer
        if finer > 0:
            result.pruned[FINER] = finer
    total = sum(result.pruned.values()) + len(counted) + result.alike
    if result.size > total:
        result.pruned[TIME if result.stopped == "proved" else "not reached"] = result.size - total
    result.wall_s = time.perf_counter() - state.start
