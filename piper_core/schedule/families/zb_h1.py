"""ZB-H1: 1F1B with the backward for weights moved into the bubble, at the memory of 1F1B."""

from __future__ import annotations

from piper_core.schedule.families.base import Family, Rows
from piper_core.schedule.families.zero_bubble import zero_bubble_row
from piper_core.schedule.grid import Layout


class ZBH1(Family):
    """Hold at most p microbatches a row; a third of the bubble of 1F1B.

    Source: arXiv 2401.10241, section 2.1.
    """

    name = "zb_h1"
    layout = Layout.LOOP
    splits_backward = True

    def rows(self, p: int, m: int, v: int) -> Rows:
        return [zero_bubble_row(r, m, p - r, p) for r in range(p)]


FAMILY = ZBH1()
