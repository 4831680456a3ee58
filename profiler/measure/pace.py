"""How fast a core is now: the seconds of a fixed piece of work, timed beside everything else.

Cores of a shared host run up to a third slower or faster for seconds and minutes, and whatever they compute does so
alike: over seconds the times of a model's chunks and of this work went together to 3 to 6 %, where each alone varied by
15 to 18 %. Times that are brought to one pace can be compared, though they were taken at different times.
"""

from __future__ import annotations

from statistics import median
from time import perf_counter

import torch

PRODUCTS, SUMS = 4, 48
"""Matrix products of 128 x 256 x 256 and sums of 128 x 256 elements, about half of the time each: what a chunk of a
small model does."""
FIRST = 25
"""Readings that the first base is the median of."""


class Pace:
    """Readings of a core's pace; ``base_s`` is what times are brought to (0: what the first readings say)."""

    def __init__(self, base_s: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(0)
        self._rows = torch.randn(128, 256, generator=generator)
        self._weight = torch.randn(256, 256, generator=generator)
        self.seen: list[float] = []
        self.read()  # makes what is made once
        self.base_s = base_s or median(self.read() for _ in range(FIRST))
        self.seen.clear()

    def read(self) -> float:
        """Return the seconds that the fixed work takes now."""
        start = perf_counter()
        rows = self._rows
        for _ in range(PRODUCTS):
            torch.mm(rows, self._weight)
        for _ in range(SUMS):
            rows = rows + 1.0
        self.seen.append(perf_counter() - start)
        return self.seen[-1]

    def factor(self, readings: list[float]) -> float:
        """Return what times are to be multiplied by that were taken between these readings."""
        return self.base_s / median(readings)
