"""Score configurations on all cores."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from math import inf
from multiprocessing import get_context
from typing import Any, Protocol, TypeAlias, TypeVar

from piper_core.errors import DirectiveError, InfeasibleError, PlanError, RunError
from piper_core.schedule import list_improve
from piper_core.schedule.grid import Grid
from search.candidate import Outcome
from search.problem import Problem
from search.simulator import loops
from search.space import Configuration

PR_SET_PDEATHSIG = 1
"""``prctl`` option of Linux: the signal to get when the parent dies."""
_PROBLEM: Problem | None = None
Begun = TypeVar("Begun")
Orders: TypeAlias = MutableMapping[Configuration, Grid]
Outcomes: TypeAlias = Iterator[Outcome | None]


def _evaluate(config: Configuration, proved: bool, grid: Grid | None) -> tuple[Outcome, Grid | None]:
    """Score in a worker."""
    assert _PROBLEM is not None
    return score(_PROBLEM, config, proved, grid)


def score(problem: Problem, config: Configuration, proved: bool, grid: Grid | None) -> tuple[Outcome, Grid | None]:
    """Evaluate, ``proved`` by apply and the verifier; a configuration that does not apply or run comes back as its
    reason. Takes the order of the list scheduler where it is known, and returns it, since nobody need find it again."""
    orders = problem.bounds.orders
    if grid is not None:
        orders[config.plain] = grid
    outcome: Outcome
    try:
        outcome = problem.confirmed(config) if proved else problem.score(config)
    except (DirectiveError, PlanError, InfeasibleError) as error:
        outcome = f"rejected: {error}"
    return outcome, known_order(config, orders)


def known_order(config: Configuration, orders: Orders) -> Grid | None:
    """Return the list scheduler's order of a configuration, where it is asked for and known."""
    return orders.get(config.plain) if config.order == "list" else None


def in_order(
    batch: Sequence[Configuration], begun: Sequence[Begun],
    wait: Callable[[Begun, float | None], tuple[Outcome, Grid | None]], deadline_s: Callable[[], float], orders: Orders,
) -> Outcomes:  # fmt: skip
    """Yield the outcomes of what was begun elsewhere in the order of the batch, None for what is not there at the
    deadline, when ``wait`` raises TimeoutError; learn the orders that come with them."""
    for config, each in zip(batch, begun, strict=True):
        seconds = deadline_s() - time.perf_counter()
        try:
            outcome, grid = wait(each, None if seconds == inf else max(0.0, seconds))
        except TimeoutError:
            yield None
        else:
            if grid is not None:
                orders[config.plain] = grid
            yield outcome


def _load_loops() -> None:
    """Load compiled loops in a worker that has nothing else to do yet."""
    list_improve.LOOPS.load()
    loops.load()


def _start_worker() -> None:
    """Leave Ctrl-C to the main process, and end with it however it ends (on Linux, where the kernel sees to that)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def _interrupted_later() -> Iterator[None]:
    """Put a Ctrl-C off to the end: the first of a batch forks, and Python loses what is raised right after a fork."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or handler is None:
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)


class Run(Protocol):
    """Scores a batch until a deadline, ``proved`` or not; other processes begin at once."""

    def __call__(
        self, batch: Sequence[Configuration], deadline_s: Callable[[], float], *, proved: bool = False
    ) -> Outcomes: ...


@contextmanager
def evaluator(problem: Problem, workers: int | None, *, many: bool = False) -> Iterator[Run]:
    """Yield a function that scores a batch in order, on ``workers`` forked processes (in this one where that is 1).
    Where there is much to score (``many``), these load compiled loops at once.

    Once the clock passes the deadline, which may change on the way, what is left of the batch comes back as None. An
    evaluation in this process is not cut short.

    Raises:
        RunError: a process died.
    """
    global _PROBLEM
    _PROBLEM = problem
    count = workers or len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else workers or 1

    def here(batch: Sequence[Configuration], deadline_s: Callable[[], float], *, proved: bool = False) -> Outcomes:
        for config in batch:
            yield score(problem, config, proved, None)[0] if deadline_s() > time.perf_counter() else None

    if count <= 1:
        yield here
        return
    pool = ProcessPoolExecutor(count, mp_context=get_context("fork"), initializer=_start_worker)
    running: list[Future[Any]] = []
    orders = problem.bounds.orders
    if many:
        with _interrupted_later():
            running += [pool.submit(_load_loops) for _ in range(count)]

    def apart(batch: Sequence[Configuration], deadline_s: Callable[[], float], *, proved: bool = False) -> Outcomes:
        if proved and not all(future.done() for future in running):
            return here(batch, deadline_s, proved=proved)  # workers are still at what a deadline cut short
        with _interrupted_later():
            begun = [pool.submit(_evaluate, config, proved, known_order(config, orders)) for config in batch]
        running[:] = [future for future in running if not future.done()] + begun

        return in_order(batch, begun, lambda future, seconds: future.result(seconds), deadline_s, orders)

    try:
        yield apart
    except BrokenProcessPool:
        raise RunError("a process that evaluates was killed, perhaps for want of memory; what was evaluated is kept: "
                          "go on with --resume, and with fewer --workers") from None  # fmt: skip
    finally:
        finished = all(future.done() for future in running)
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=finished, cancel_futures=True)
        if not finished:  # nobody waits for what is still being evaluated
            for process in processes:
                process.terminate()
