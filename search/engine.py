"""The search: propose, evaluate on all cores, keep the best, say how far from optimal it can be."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from math import inf
from pathlib import Path

from piper_core.schedule.families import FAMILIES
from search.candidate import Outcome, Score
from search.database import Database
from search.empty import why_empty
from search.generators.base import Generator
from search.generators.best_first import NEEDLESS, TIME, BestFirst, less
from search.objective import Objective
from search.partial_bound import overlaps
from search.problem import Candidate, Problem
from search.result import Result, candidate_data, pareto, to_data
from search.shortfall import nothing_found
from search.space import Configuration, Space
from search.workers import Outcomes, Run, evaluator

__all__ = ["Candidate", "Problem", "Result", "candidate_data", "pareto", "search", "to_data"]

BATCH = 8
"""Configurations evaluated between two decisions, whatever the number of workers."""
FINER = "not tried: other buckets, prefetches or streams of configurations that were evaluated"
PATIENCE = 5
"""How many times its budget a search goes on for while nothing that fits has been found. The first batch is never cut
short before that."""
REORDERED = 5
"""Best candidates whose compute the list scheduler orders anew."""
LONGEST = 8000
"""Actions of a step up to which it does (16,000 take it 10 s and more)."""
BOUNDING = 0.75
"""Part of the budget that branch and bound may take where the best are then tuned."""
SEEDING = 0.4
"""Part of that which the usual configurations may take."""
SEEDS = 3
SAME = 1e-6
"""What another order, bucket, prefetch or streams must gain at least to count as something else."""
USUALLY = {
    "cp": ("1",), "outer": ("pp",), "cuts": ("balanced",), "bucket": ("1",), "prefetch": ("1",), "streams": ("own",),
    "recompute": ("none", "selective", "full"),
    "schedule": ("1f1b", "interleaved_1f1b", "zb_h1", "zbv", "dualpipev"),
}  # fmt: skip
TUNED = 2
"""Best candidates for which other buckets, prefetches and streams are tried."""


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
) -> Result:
    """Search the space for the ``top`` strategies with the least step time (or memory) that fit.

    First branch and bound over the usual configurations alone, for something good to measure others by; then over all,
    with the orders that their families emit, until nothing left can be among the best; then, for the best, the list
    scheduler's orders, and Optuna over buckets, prefetch and streams. Ends after ``budget_s``, or at Ctrl-C, with the
    best so far. What is being evaluated when the budget ends is dropped, and counts as not reached; while nothing that
    fits has been found, the budget is ``PATIENCE`` times as long. ``database`` keeps what is evaluated and answers for
    what was; ``journal`` keeps Optuna's study.

    Raises:
        InfeasibleError: no configuration is legal, or none fits; the text says what is short by how much.
        KeyboardInterrupt: at Ctrl-C while nothing that fits has been found.
    """
    space.check()
    capacity = problem.cluster.device.memory_bytes
    generator = BestFirst(space, problem.bounds, capacity, objective=objective)
    if not generator.size:
        raise why_empty(space)
    share = BOUNDING if tune and objective == "throughput" else 1.0
    state = _State(problem, Result(size=generator.size, objective=objective), budget_s, database, progress, share)
    with _evaluator(problem, workers, address) as run:
        try:
            _seed(state, space, run)
            reorder = _Reorder(state, run)
            if tune and objective == "throughput":
                reorder.begin()
            state.main = generator
            while state.running:
                state.floor = generator.bound()
                batch = generator.ask(BATCH, state.threshold(top), state.deadline_s())
                reorder.end()
                if generator.expired or not batch:
                    state.result.stopped = "budget" if generator.expired else "proved"
                    break
                state.evaluate(batch, generator, run)
            if tune and objective == "throughput":
                _tune(state, space, run, reorder, seed, journal)
            _prove(state, top, run)
        except KeyboardInterrupt:
            state.result.stopped = "interrupted"
    result = state.result
    _finish(result, generator, state)
    if not result.candidates:
        if result.stopped == "interrupted":
            raise KeyboardInterrupt
        raise nothing_found(problem, result, generator, state.tightest)
    return result


def _evaluator(problem: Problem, workers: int | None, address: str | None) -> AbstractContextManager[Run]:
    if address is None:
        return evaluator(problem, workers)
    from search.ray_workers import cluster_evaluator

    return cluster_evaluator(problem, address)


class _State:
    """A search under way."""

    def __init__(
        self,
        problem: Problem,
        result: Result,
        budget_s: float,
        database: Database | None,
        progress: Callable[[Result, Generator], None] | None,
        share: float,
    ) -> None:
        self.problem, self.result, self.budget_s, self.share = problem, result, budget_s, share
        self.database, self.progress = database, progress
        self.start = time.perf_counter()
        self.seen: dict[Configuration, Candidate] = {}
        self.known = database.known if database is not None else {}
        self.told: set[Configuration] = set()
        self.told_main: set[Configuration] = set()
        self.main: Generator | None = None
        self.tightest: tuple[float, Candidate | None] = (inf, None)
        self.floor = inf  # what an interrupt in mid-expansion may lose from the generator

    def running_time_s(self) -> float:
        return time.perf_counter() - self.start

    @property
    def running(self) -> bool:
        """Whether nothing has ended the search."""
        return not self.result.stopped

    def threshold(self, top: int) -> float:
        """Return what a configuration must beat to be among the ``top``."""
        found, objective = self.result.candidates, self.result.objective
        return found[top - 1].value(objective) if len(found) >= top else inf

    def deadline_s(self) -> float:
        """Return the time at which the budget ends: never before something was tried."""
        tried = self.result.simulated or self.result.rejected
        return self.start + self.budget_s * (self.share if self.seen else PATIENCE) if self.seen or tried else inf

    def begin(self, batch: Sequence[Configuration], run: Run) -> Outcomes:
        """Begin to evaluate what is not known yet of a batch."""
        return iter(run([config for config in batch if config not in self.known], self.deadline_s))

    def evaluate(
        self, batch: Sequence[Configuration], generator: Generator, run: Run, begun: Outcomes | None = None
    ) -> None:
        """Evaluate a batch, tell the generator, keep what fits, and stop at the end of the budget."""
        result, known = self.result, self.known
        fresh = self.begin(batch, run) if begun is None else begun
        told: list[tuple[Configuration, Outcome]] = []
        for config in batch:
            outcome = known[config] if config in known else next(fresh)
            if outcome is None:
                result.stopped = "budget"
                break
            told.append((config, outcome))
            generator.tell(config, outcome if isinstance(outcome, Score) else None)
            if config in self.told:
                continue
            self.told.add(config)
            if isinstance(outcome, Score):
                self._keep(config, outcome)
            else:
                result.rejected += 1
                result.pruned[outcome] = result.pruned.get(outcome, 0) + 1
        if self.database is not None:
            self.database.record(told)
        known.update(told)
        result.candidates = sorted(self._needed(), key=lambda candidate: candidate.rank(result.objective))
        if generator is self.main:
            self.told_main.update(config for config, _ in told)
        kept = {candidate.config for candidate in result.candidates}
        result.needless = sum(config not in kept for config in self.seen if config in self.told_main)
        result.wall_s = time.perf_counter() - self.start
        if self.progress is not None:
            self.progress(result, generator)
        if time.perf_counter() > self.deadline_s() and not result.stopped:
            result.stopped = "budget"

    def _needed(self) -> list[Candidate]:
        """Return what fits, without what recomputes more than another that is the same otherwise."""
        if self.result.objective != "throughput":
            return list(self.seen.values())
        fitting: dict[Configuration, list[str]] = {}
        for config in self.seen:
            fitting.setdefault(replace(config, recompute=""), []).append(config.recompute)
        return [
            candidate for config, candidate in self.seen.items()
            if not any(less(other, config.recompute) for other in fitting[replace(config, recompute="")])
        ]  # fmt: skip

    def _keep(self, config: Configuration, score: Score) -> None:
        result, candidate = self.result, Candidate(config, self.problem.costs.of(config)[0], score)
        result.simulated += 1
        if score.fits == "yes":
            simpler = (config.plain, replace(config.plain, order=config.order))
            known = [self.seen[each].score.step_time_s for each in simpler if each != config and each in self.seen]
            if score.step_time_s < min(known, default=inf) * (1 - SAME):
                self.seen[config] = candidate
        else:
            result.close += score.fits == "close"
            result.too_big += score.fits == "no"
            self.tightest = min(self.tightest, (-score.margin_bytes, candidate), key=lambda pair: pair[0])


class _Given:
    """A generator of configurations that are at hand."""

    name = "list scheduler"
    expired = False

    def __init__(self, least: float) -> None:
        self.pruned: dict[str, int] = {}
        self.least = least

    def ask(self, n: int, threshold_s: float = inf, deadline_s: float = inf) -> list[Configuration]:
        return []

    def tell(self, config: Configuration, score: Score | None) -> None:
        pass

    def bound(self) -> float:
        return self.least


def _seed(state: _State, space: Space, run: Run) -> None:
    """Find the best of the usual configurations: those with most axes as most people leave them."""
    usual = {name: values for name, values in USUALLY.items() if name not in space.fix}
    narrow = BestFirst(
        replace(space, fix={**space.fix, **usual}), state.problem.bounds, state.problem.cluster.device.memory_bytes,
        objective=state.result.objective,
    )  # fmt: skip
    whole, state.share = state.share, state.share * SEEDING
    while state.running:
        batch = narrow.ask(BATCH, state.threshold(SEEDS), state.deadline_s())
        if narrow.expired or not batch:
            break
        state.evaluate(batch, narrow, run)
    state.share = whole
    if state.result.stopped == "budget" and state.running_time_s() < state.share * state.budget_s:
        state.result.stopped = ""


class _Reorder:
    """The list scheduler's orders of the best so far. Other processes find them while this one bounds."""

    def __init__(self, state: _State, run: Run) -> None:
        self.state, self.run = state, run
        self.ordered: set[Configuration] = set()
        self.orders: list[Configuration] = []
        self.begun: Outcomes = iter(())

    def begin(self) -> None:
        fresh: dict[Configuration, Configuration] = {}
        for candidate in self.state.result.candidates:
            config = candidate.config.plain
            actions = 3 * config.stages * config.num_microbatches
            if config.pp > 1 and config.num_microbatches > 1 and actions <= LONGEST:
                fresh.setdefault(_unordered(config), config)
        fresh = dict(list(fresh.items())[:REORDERED])
        self.orders = [replace(config, order="list") for key, config in fresh.items() if key not in self.ordered]
        self.ordered.update(fresh)
        self.begun = self.state.begin(self.orders, self.run)

    def end(self) -> None:
        if not self.orders:
            return
        result, stopped = self.state.result, self.state.result.stopped
        before = result.close, result.too_big
        self.state.evaluate(self.orders, _Given(result.least_left_s), self.run, self.begun)
        result.reordered += len(self.orders)
        result.close, result.too_big = before  # other orders are no configurations of their own
        result.stopped = result.stopped or stopped
        self.orders = []


def _tune(state: _State, space: Space, run: Run, reorder: _Reorder, seed: int, journal: Path | None) -> None:
    """Try what a configuration leaves open for the best ones: the list scheduler's order, then finer choices."""
    from search.generators.sampled import Sampled

    result = state.result
    ended, result.stopped, state.share = result.stopped, "", 1.0
    reorder.end()
    reorder.begin()
    reorder.end()
    for candidate in result.candidates[:TUNED]:
        config, problem = candidate.config, state.problem
        only = replace(space, fix={**space.fix, **fix_of(config)})
        domain = space.fine(config.dp * config.cp, config.zero, config.ep, config.layout)
        if len(domain) < 2:
            continue
        if journal is not None and not result.finer:
            journal.unlink(missing_ok=True)  # answers are in the database; a study is of one run
        name = f"finer choices of {config}"
        sampled = Sampled(
            only, problem.bounds, problem.cluster.device.memory_bytes, seed=seed, journal=journal, name=name,
            order=config.order, seen=state.seen,
        )  # fmt: skip
        finer = [replace(config, bucket=bucket, prefetch=ahead, streams=streams) for bucket, ahead, streams in domain]
        left = sum(each not in state.seen for each in finer)
        while state.running and left and (batch := sampled.ask(min(BATCH, left), deadline_s=state.deadline_s())):
            state.evaluate(batch, sampled, run)
            result.finer += len(batch)
            left -= len(batch)
    result.stopped = ended


def _prove(state: _State, top: int, run: Run) -> None:
    """Apply the programs of what will be reported, and verify their plans; what is refused there is no candidate."""
    result, proved = state.result, set[Configuration]()
    while fresh := [c.config for c in result.candidates[:top] if c.config not in proved]:
        for config, outcome in zip(fresh, run(fresh, lambda: inf, proved=True), strict=True):
            proved.add(config)
            if isinstance(outcome, str):
                result.rejected += 1
                result.pruned[outcome] = result.pruned.get(outcome, 0) + 1
                result.candidates = [c for c in result.candidates if c.config != config]


def _unordered(config: Configuration) -> Configuration:
    """Return what configurations have in common that differ in the order of their schedule's family alone."""
    family = FAMILIES[config.schedule]
    return replace(config, schedule=f"{config.layout} {family.splits_backward} {overlaps(config)}")


def fix_of(config: Configuration) -> dict[str, tuple[str, ...]]:
    """Return what ``--fix`` would say to leave only the finer choices of a configuration open."""
    words = {True: "on", False: "off"}
    coarse = ("pp", "tp", "dp", "ep", "cp", "outer", "schedule", "virtual_stages", "zero", "micro_batch",
              "num_microbatches", "recompute", "cuts")  # fmt: skip
    fixed: dict[str, tuple[str, ...]] = {name: (str(getattr(config, name)),) for name in coarse}
    return fixed | {"sequence_parallel": (words[config.sequence_parallel],)}


def _finish(result: Result, generator: BestFirst, state: _State) -> None:
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
        result.least_s = min(result.least_left_s, generator.rest_bound(), generator.any_order_bound())
        result.proof_gap = max(0.0, (best - min(best, result.least_s)) / best)
        result.family_gap = max(0.0, (best - min(best, result.least_left_s)) / best)
        finer = generator.rest(best) - result.finer
        if finer > 0:
            result.pruned[FINER] = finer
    total = sum(result.pruned.values()) + len(counted)
    if result.size > total:
        result.pruned[TIME if result.stopped == "proved" else "not reached"] = result.size - total
    result.wall_s = time.perf_counter() - state.start
