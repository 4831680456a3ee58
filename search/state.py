"""A search under way: what was evaluated, the best of it, and when the budget ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

from search.candidate import Outcome, Score
from search.database import Database
from search.generators.base import Generator
from search.generators.best_first import BestFirst, less
from search.problem import Candidate, Problem
from search.result import Result
from search.space import Configuration
from search.workers import Outcomes, Run

PATIENCE = 5
"""How many times its budget a search goes on for while nothing that fits has been found."""
SAME = 1e-6
"""What another order, bucket, prefetch or streams must gain at least to count as something else."""


class State:
    """A search under way."""

    def __init__(
        self,
        problem: Problem,
        result: Result,
        budget_s: float,
        database: Database | None,
        progress: Callable[[Result, Generator], None] | None,
        share: float,
        most: tuple[float, float],
    ) -> None:
        self.problem, self.result, self.budget_s, self.share = problem, result, budget_s, share
        self.database, self.progress, self.most = database, progress, most
        self.start = time.perf_counter()
        self.seen: dict[Configuration, Candidate] = {}
        self.known = database.known if database is not None else {}
        self.told: set[Configuration] = set()
        self.told_main: set[Configuration] = set()
        self.main: BestFirst | None = None
        self.tightest: tuple[float, Candidate | None] = (inf, None)
        self.any_order_s: float | None = None  # what no order takes less than, once that is known
        self.floor = inf  # what an interrupt in mid-expansion may lose from the generator

    def running(self, tuning: bool = False) -> bool:
        """Return whether nothing has ended the search."""
        return not self.result.stopped and self.result.batches[tuning] < self.most[tuning]

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
        if self.database is not None and batch:
            self.database.begin()
        return iter(run([config for config in batch if config not in self.known], self.deadline_s))

    def evaluate(
        self, batch: Sequence[Configuration], generator: Generator, run: Run, begun: Outcomes | None = None,
        *, tuning: bool = False,
    ) -> bool:  # fmt: skip
        """Evaluate a batch, tell the generator, keep what fits, and stop at the end of the budget. Return whether it
        was evaluated before that; where not, it is as if nothing of it had been, unless nothing had been found yet."""
        result, first = self.result, not self.seen
        fresh = self.begin(batch, run) if begun is None else begun
        heard: list[tuple[Configuration, Outcome]] = []
        try:
            for config in batch:
                outcome = self.known[config] if config in self.known else next(fresh)
                if outcome is None:
                    break
                heard.append((config, outcome))
                if first:  # what fits ends the patience at once
                    self._hear(config, outcome, generator)
        finally:
            if self.database is not None:
                self.database.record(heard)
            self.known.update(heard)
            whole = len(heard) == len(batch)
            if whole and not first:
                for config, outcome in heard:
                    self._hear(config, outcome, generator)
            self._rank()
        result.batches[tuning] += whole
        result.wall_s = time.perf_counter() - self.start
        if self.progress is not None:
            self.progress(result, generator)
        if not whole or (time.perf_counter() > self.deadline_s() and not result.stopped):
            result.stopped = "budget"
        return whole

    def _hear(self, config: Configuration, outcome: Outcome, generator: Generator) -> None:
        """Tell the generator; count an outcome, and keep what fits, once."""
        generator.tell(config, outcome if isinstance(outcome, Score) else None)
        if generator is self.main:
            self.told_main.add(config)
        if config in self.told:
            return
        self.told.add(config)
        if isinstance(outcome, Score):
            self._keep(config, outcome)
        else:
            self.result.rejected += 1
            self.result.pruned[outcome] = self.result.pruned.get(outcome, 0) + 1

    def _rank(self) -> None:
        """Rank what fits; of those that differ in bucket, prefetch or streams alone, the best."""
        result = self.result
        needed = sorted(self._needed(), key=lambda candidate: candidate.rank(result.objective))
        kept = {candidate.config for candidate in needed}
        result.needless = sum(config not in kept for config in self.seen if config in self.told_main)
        different: dict[Configuration, Candidate] = {}
        for candidate in needed:
            different.setdefault(replace(candidate.config.plain, order=candidate.config.order), candidate)
        result.candidates = list(different.values())
        result.alike = sum(each.order == "family" for each in kept - {each.config for each in result.candidates})

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
