"""ZB-H2: more forwards before the first backward, so that no row waits between its first and last action."""

from __future__ import annotations

from piper_core.schedule.families.base import Family, Rows
from piper_core.schedule.families.zero_bubble import zero_bubble_row
from piper_core.schedule.grid import Layout


class ZBH2(Family):
    """Hold at most 2p - 1 microbatches a row; no bubble in the span for m >= 2p - 1.

    The rows form a parallelogram, so the makespan has a bubble unless steps overlap. Source: arXiv
    2401.10241, section 2.2.
    """

    name = "zb_h2"
    layout = Layout.LOOP
    splits_backward = True

    def rows(self, p: int, m: int, v: int) -> Rows:
        return [zero_bubble_row(r, m, 2 * (p - r) - 1, 2 * p - 1) for r in range(p)]


FAMILY = ZBH2()
