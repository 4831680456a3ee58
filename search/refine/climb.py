"""Climb: take each move that makes a strategy better, until none does or the time is over."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle

from piper_core.errors import DirectiveError, InfeasibleError, PlanError
from piper_core.ir.dag import Dag
from piper_core.program.strategy import Strategy
from piper_core.schedule.compile import Compiled, compile_program
from profiler.spec import Cluster
from search.candidate import Score
from search.price import price
from search.refine.lock import Locks
from search.refine.moves import Move, field_moves, order_moves

GIB = 2**30
ENOUGH = 1e-6
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
) -> Climb:  # fmt: skip
    """Refine a strategy for ``budget_s`` seconds; the first move that gains is taken, fields before orders.

    What does not fit is made smaller first, then quicker. Ctrl-C ends it with the best so far; so does a number of
    strategies priced, ``most``, where one is given: unlike seconds it does not depend on the machine.
    """
    run = _Run(Climb(strategy, price(strategy, compiled, cluster).score), compiled, base, cluster, locks, most)
    end, rng, idle = time.perf_counter() + budget_s, random.Random(seed), 0
    kinds: tuple[Callable[[], Iterator[Move]], ...] = (
        lambda: field_moves(run.found.strategy, run.compiled, base),
        lambda: order_moves(run.found.strategy, base, rng),
    )
    try:
        for kind in cycle(kinds):
            gained = False
            while (more := run.first_gain(kind(), end)) is True:
                gained = True
                if progress is not None:
                    progress(run.found)
            idle = 0 if gained else idle + 1
            if more is None or idle == len(kinds):
                run.found.stopped = "budget" if more is None else "nothing"
                break
    except KeyboardInterrupt:
        run.found.stopped = "interrupted"
    return run.found


class _Run:
    """One refinement in progress."""

    def __init__(
        self, found: Climb, compiled: Compiled, base: Dag, cluster: Cluster, locks: Locks, most: int | None
    ) -> None:
        self.found, self.compiled, self.base = found, compiled, base
        self.cluster, self.locks, self.most = cluster, locks, most
        self.seen = {_identity(found.strategy)}

    def first_gain(self, moves: Iterator[Move], end: float) -> bool | None:
        """Take the first move that gains; return whether there was one, None where the time is over before."""
        best = _key(self.found.score)
        for move in moves:
            if time.perf_counter() > end or self.found.tried == self.most:
                return None
            identity = _identity(move.strategy)
            if identity in self.seen:
                continue
            self.seen.add(identity)
            if not self.locks.keeps(move.strategy):
                self.found.locked += 1
                continue
            made = _tried(move.strategy, self.base, self.cluster, self.locks, self.found)
            if made is None or not _better(_key(made[1]), best):
                continue
            self.compiled, score = made
            self.found.strategy, self.found.score = move.strategy, score
            self.found.done.append(f"{move.words}: {score.step_time_s:.6g} s, {score.worst_row_bytes / GIB:.2f} GiB")
            return True
        return False


def _tried(
    strategy: Strategy, base: Dag, cluster: Cluster, locks: Locks, found: Climb
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
    return compiled, price(strategy, compiled, cluster).score


def _key(score: Score) -> tuple[float, float]:
    """Rank a score: the memory that it takes unless it surely fits, then its step time."""
    return 0.0 if score.fits == "yes" else score.worst_row_bytes, score.step_time_s


def _better(key: tuple[float, float], best: tuple[float, float]) -> bool:
    if abs(key[0] - best[0]) > ENOUGH * max(best[0], 1.0):
        return key[0] < best[0]
    return key[1] < best[1] * (1 - ENOUGH)


def _identity(strategy: Strategy) -> tuple[object, ...]:
    return strategy.header.micro_batch, strategy.program.directives
