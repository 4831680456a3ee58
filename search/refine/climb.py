"""Climb: take each move that makes a strategy better, until none does or the time is over."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, cycle
from typing import TypeAlias

from piper_core.errors import DirectiveError, InfeasibleError, PlanError
from piper_core.ir.dag import Dag
from piper_core.program.strategy import Strategy
from piper_core.schedule.compile import Compiled, compile_program
from profiler.spec import Cluster
from search.candidate import Score
from search.price import price
from search.refine.degrees import degree_moves
from search.refine.lock import Locks
from search.refine.moves import Move, coarse_moves, fine_moves, order_moves

ScoreOf: TypeAlias = Callable[[Strategy, Compiled], Score]
"""Prices a strategy that is compiled."""
GIB = 2**30
ENOUGH = 1e-4
"""Least relative gain that counts."""


@dataclass(slots=True)
class Climb:
    """A refinement: the best so far, what was done to get there, and how much was tried.

    ``stopped`` is ``budget``, ``interrupted``, or ``nothing`` where no move that is left makes it better.
    """

    strategy: Strategy
    score: Score
    done: list[str] = field(default_factory=list)
    tried: int = 0
    illegal: int = 0
    locked: int = 0
    stopped: str = "nothing"


def climb(
    strategy: Strategy, compiled: Compiled, base: Dag, cluster: Cluster, locks: Locks, *, budget_s: float,
    most: int | None = None, seed: int = 0, progress: Callable[[Climb], None] | None = None,
    score_of: ScoreOf | None = None,
) -> Climb:  # fmt: skip
    """Refine a strategy for ``budget_s`` seconds; of degrees, schedules and the like the best move is taken, of
    cuts, buckets and orders the first that gains.

    What does not fit is made smaller first, then quicker. Ctrl-C ends it with the best so far; so does a number of
    strategies priced, ``most``, where one is given: unlike seconds it does not depend on the machine. ``score_of``
    prices (by default with the cluster's record); ``compiled`` and ``base`` are then in its dtype.
    """
    asked = score_of or (lambda strategy, compiled: price(strategy, compiled, cluster).score)
    run = _Run(Climb(strategy, asked(strategy, compiled)), compiled, base, asked, locks, most)
    run.end, rng, idle = time.perf_counter() + budget_s, random.Random(seed), 0
    kinds: tuple[Callable[[], bool], ...] = (
        lambda: run.best_gain(chain(coarse_moves(*run.current), degree_moves(*run.current[:2]))),
        lambda: run.first_gain(fine_moves(*run.current)),
        lambda: run.first_gain(order_moves(run.found.strategy, base, rng)),
    )
    try:
        for kind in cycle(kinds):
            gained = False
            while kind() and not run.over:
                gained = True
                if progress is not None:
                    progress(run.found)
            idle = 0 if gained else idle + 1
            if run.over or idle == len(kinds):
                run.found.stopped = "budget" if run.over else "nothing"
                break
    except KeyboardInterrupt:
        run.found.stopped = "interrupted"
    return run.found


class _Run:
    """One refinement in progress."""

    def __init__(
        self, found: Climb, compiled: Compiled, base: Dag, score_of: ScoreOf, locks: Locks, most: int | None
    ) -> None:
        self.found, self.compiled, self.base = found, compiled, base
        self.score_of, self.locks, self.most = score_of, locks, most
        self.seen = {_identity(found.strategy)}
        self.end = 0.0

    @property
    def current(self) -> tuple[Strategy, Compiled, Dag]:
        return self.found.strategy, self.compiled, self.base

    @property
    def over(self) -> bool:
        """Whether the time, or the number of strategies to price, is used up."""
        return time.perf_counter() > self.end or self.found.tried == self.most

    def first_gain(self, moves: Iterator[Move]) -> bool:
        """Take the first move that gains; return whether there was one."""
        return next((self._take(*gain) for gain in self._gains(moves)), False)

    def best_gain(self, moves: Iterator[Move]) -> bool:
        """Take the move that gains most, as far as the time goes; return whether there was one."""
        best: tuple[Move, Compiled, Score] | None = None
        try:
            for gain in self._gains(moves):
                if best is None or _better(_key(gain[2]), _key(best[2])):
                    best = gain
        finally:  # an interrupt takes the best so far
            if best is not None:
                self._take(*best)
        return best is not None

    def _gains(self, moves: Iterator[Move]) -> Iterator[tuple[Move, Compiled, Score]]:
        """Yield the moves that are better than what is there, compiled and priced."""
        now = _key(self.found.score)
        for move in moves:
            if self.over:
                return
            identity = _identity(move.strategy)
            if identity in self.seen:
                continue
            self.seen.add(identity)
            if not self.locks.keeps(move.strategy):
                self.found.locked += 1
                continue
            made = _tried(move.strategy, self.base, self.score_of, self.locks, self.found)
            if made is not None and _better(_key(made[1]), now):
                yield move, *made

    def _take(self, move: Move, compiled: Compiled, score: Score) -> bool:
        self.compiled, self.found.strategy, self.found.score = compiled, move.strategy, score
        self.found.done.append(f"{move.words}: {score.step_time_s:.6g} s, {score.worst_row_bytes / GIB:.2f} GiB")
        return True


def _tried(
    strategy: Strategy, base: Dag, score_of: ScoreOf, locks: Locks, found: Climb
) -> tuple[Compiled, Score] | None:
    """Compile, prove and price a strategy; None where it does not run, or changes what is locked."""
    try:
        compiled = compile_program(strategy.program, base, strategy.header.world)
    except (DirectiveError, PlanError, InfeasibleError):
        found.illegal += 1
        return None
    if not locks.keeps_compiled(compiled):
        found.locked += 1
        return None
    found.tried += 1
    return compiled, score_of(strategy, compiled)


def _key(score: Score) -> tuple[float, float]:
    """Rank a score: the memory that it takes unless it surely fits, then its step time."""
    return 0.0 if score.fits == "yes" else score.worst_row_bytes, score.step_time_s


def _better(key: tuple[float, float], best: tuple[float, float]) -> bool:
    if abs(key[0] - best[0]) > ENOUGH * max(best[0], 1.0):
        return key[0] < best[0]
    return key[1] < best[1] * (1 - ENOUGH)


def _identity(strategy: Strategy) -> tuple[object, ...]:
    return strategy.header.micro_batch, strategy.program.directives
