"""1F1B: one forward, one backward, once the pipeline is full."""

from __future__ import annotations

from piper_core.ir.action import Slot
from piper_core.schedule.families.base import Family, Rows, backwards, forwards
from piper_core.schedule.grid import Layout


class OneFOneB(Family):
    """Hold min(m, p - r) microbatches on row r; bubble as GPipe. Source: arXiv 2104.04473, section 2.2.1."""

    name = "1f1b"
    layout = Layout.LOOP
    splits_backward = False

    def rows(self, p: int, m: int, v: int) -> Rows:
        rows: list[list[Slot]] = []
        for r in range(p):
            f, b = forwards(r, m), backwards(r, m)
            warmup = min(m, p - r - 1)
            row = list(f[:warmup])
            for i in range(m - warmup):
                row += (f[warmup + i], b[i])
            row += b[m - warmup : m]
            rows.append(row)
        return rows


FAMILY = OneFOneB()
