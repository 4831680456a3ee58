"""What a search tries of its best: the list scheduler's orders, then other buckets, prefetches and streams."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import inf
from pathlib import Path

from piper_core.schedule.families import FAMILIES
from search.candidate import Score
from search.generators.best_first import BestFirst
from search.list_order import LONGEST, actions, orderable
from search.partial_bound import overlaps
from search.space import OUTERS, Configuration, Space
from search.state import State
from search.workers import Outcomes, Run

BATCH = 8
"""Configurations evaluated between two decisions, whatever the number of workers."""
REORDERED, CONSIDERED = 12, 5
"""Best candidates, and others of which most can be hoped for, whose compute is ordered anew; and how many of them where
steps are longer than ``LONGEST`` actions. As many as the latter are found at least."""
TUNED = 2
"""Best candidates for which other buckets, prefetches and streams are tried."""


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


def _different(configs: Iterable[Configuration]) -> dict[Configuration, Configuration]:
    """Return the first few that can be ordered anew, of those that differ in family or mesh order alone one."""
    found: dict[Configuration, Configuration] = {}
    for config in configs:
        if orderable(config) and len(found) < (REORDERED if actions(config) <= LONGEST else CONSIDERED):
            found.setdefault(_unordered(config), config.plain)
    return found


class Reorder:
    """The list scheduler's orders of the best so far. Other processes find them while this one bounds."""

    def __init__(self, state: State, run: Run) -> None:
        self.state, self.run = state, run
        self.ordered: set[Configuration] = set()
        self.orders: list[Configuration] = []
        self.begun: Outcomes = iter(())
        self.promising: list[Configuration] = []
        self.early = False

    def look(self, main: BestFirst) -> None:
        """Learn what is promising, between two batches; begin with it once nothing can be more so."""
        self.promising = main.promising()
        if not self.early and not self.orders and main.settled():
            self.early = True
            self.begin()

    def begin(self) -> None:
        """Begin with the best candidates, and with those that are promising, while they may be better than the best in
        another order: what may be best comes first."""
        state, best = self.state, [c.config for c in self.state.result.candidates]
        chosen = {**_different(best), **_different(self.promising)}
        fresh = {key: config for key, config in chosen.items() if key not in self.ordered}
        self.ordered.update(fresh)
        configs = list(fresh.values())
        if state.main is not None:
            least = {config: state.main.bound_of(config) for config in configs}
            configs = sorted((c for c in configs if least[c] < state.threshold(1)), key=lambda c: (least[c], c))
        self.orders = [replace(config, order="list") for config in configs]
        self.begun = state.begin(self.orders, self.run)

    def end(self) -> None:
        """Take the orders, one batch each: all of the budget is theirs, since nothing else gains as much."""
        state, result, given = self.state, self.state.result, _Given(self.state.result.least_left_s)
        stopped, share, before = result.stopped, state.share, (result.close, result.too_big)
        result.stopped, state.share = "", 1.0
        try:
            for config in self.orders:
                if not state.running(tuning=True) or not state.evaluate(
                    [config], given, self.run, self.begun, tuning=True
                ):
                    break
                result.reordered += 1
        finally:
            result.close, result.too_big = before  # other orders are no configurations of their own
        result.stopped, state.share, self.orders = stopped, share, []


def tune(state: State, space: Space, run: Run, reorder: Reorder, seed: int, journal: Path | None) -> None:
    """Try what a configuration leaves open for the best ones: other orders, as for the promising, then finer
    choices."""
    from search.generators.sampled import Sampled, forget

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
            forget(journal)  # answers are in the database; a study is of one run
        name = f"finer choices of {config}"
        sampled = Sampled(
            only, problem.bounds, problem.cluster.device.memory_bytes, seed=seed, journal=journal, name=name,
            order=config.order, seen=state.seen,
        )  # fmt: skip
        finer = [replace(config, bucket=bucket, prefetch=ahead, streams=streams) for bucket, ahead, streams in domain]
        left = sum(each not in state.seen for each in finer)
        while left and state.running(tuning=True):
            batch = sampled.ask(min(BATCH, left), deadline_s=state.deadline_s())
            if sampled.expired or not batch or not state.evaluate(batch, sampled, run, tuning=True):
                break
            result.finer += len(batch)
            left -= len(batch)
    result.stopped = ended


def _unordered(config: Configuration) -> Configuration:
    """Return what configurations have in common that differ in the order of their schedule's family, or in that of the
    mesh, alone."""
    family = FAMILIES[config.schedule]
    return replace(
        config.plain, schedule=f"{config.layout} {family.splits_backward} {overlaps(config)}", outer=OUTERS[0]
    )


def fix_of(config: Configuration) -> dict[str, tuple[str, ...]]:
    """Return what ``--fix`` would say to leave only the finer choices of a configuration open."""
    words = {True: "on", False: "off"}
    coarse = ("pp", "tp", "dp", "ep", "cp", "outer", "schedule", "virtual_stages", "zero", "micro_batch",
              "num_microbatches", "recompute", "cuts")  # fmt: skip
    fixed: dict[str, tuple[str, ...]] = {name: (str(getattr(config, name)),) for name in coarse}
    return fixed | {"sequence_parallel": (words[config.sequence_parallel],)}
