"""A clock that says what it was told to, and a rank that fails as it was told to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import repeat

from profiler.measure.clock import Timing


class FakeClock:
    """Every call takes the next of ``seconds``; every ``interrupt``-th timing is interrupted; ``ends`` after so many
    timings with Ctrl-C."""

    def __init__(self, seconds: Iterator[float] | None = None, *, interrupt: int = 0, ends: int = 0) -> None:
        self.each, self.interrupt, self.ends, self.timings = seconds or repeat(1e-3), interrupt, ends, 0
        self.asked: list[int] = []

    def time(self, call: Callable[[], object], times: int) -> Timing:
        self.timings += 1
        self.asked.append(times)
        if self.ends and self.timings > self.ends:
            raise KeyboardInterrupt
        call()
        took = next(self.each) * times
        cut = bool(self.interrupt) and self.timings % self.interrupt == 0
        return Timing(took * (50 if cut else 1), took, cut)


def raise_on(rank: int, bad: int, error: Exception | None) -> int:
    """Raise on one rank, or die there where there is nothing to raise."""
    if rank == bad:
        if error is None:
            os._exit(3)
        raise error
    return rank
