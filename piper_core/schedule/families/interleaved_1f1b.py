"""Interleaved 1F1B: 1F1B over v stages a row, microbatches in rounds of p."""

from __future__ import annotations

from itertools import pairwise

from piper_core.ir.action import Slot
from piper_core.schedule.families.base import Family, Rows, at_least, backwards, forwards
from piper_core.schedule.grid import Layout


class Interleaved1F1B(Family):
    """Divide the bubble of 1F1B by v: (p - 1) / (v m + p - 1) for every m >= p.

    A round of microbatches passes through all the row's stages before the next round begins; row r runs
    (v - 1) * (longest round) + 2 (p - 1 - r) forwards ahead. Source: arXiv 2104.04473, section 2.2.2, which
    asks that p divide m and makes rounds of p. For other m, the m // p rounds (at least one) are as even as
    can be. The lead is the same in every round: one that followed the length of each would let rows wait for
    each other where a longer round follows a shorter.
    """

    name = "interleaved_1f1b"
    layout = Layout.LOOP
    splits_backward = False

    def virtual_stages(self, p: int) -> range:
        return at_least(2)

    def rows(self, p: int, m: int, v: int) -> Rows:
        n_rounds = max(1, m // p)
        bounds = [m * i // n_rounds for i in range(n_rounds + 1)]
        rounds = list(pairwise(bounds))
        longest = max(stop - start for start, stop in rounds)
        rows: list[list[Slot]] = []
        for r in range(p):
            f: list[Slot] = []
            b: list[Slot] = []
            for start, stop in rounds:
                for chunk in range(v):
                    f += forwards(chunk * p + r, m)[start:stop]
                for chunk in reversed(range(v)):
                    b += backwards(chunk * p + r, m)[start:stop]
            warmup = min(len(f), (v - 1) * longest + 2 * (p - 1 - r))
            row = f[:warmup]
            for i in range(len(f) - warmup):
                row += (f[warmup + i], b[i])
            row += b[len(f) - warmup :]
            rows.append(row)
        return rows


FAMILY = Interleaved1F1B()
