"""V-Min: the least activations that a V of two stages a row can hold."""

from __future__ import annotations

from piper_core.schedule.families.base import Family, Rows
from piper_core.schedule.families.stable_pattern import squeeze
from piper_core.schedule.grid import Layout


class VMin(Family):
    """Hold at most (p + 4) // 3 microbatches a row; bubble in the span about 2p / 3m.

    Each pass moves on by one row a unit of time. Where 3 divides p, the backward starts two units later, lest
    two actions of a row fall into one unit. Source: arXiv 2405.15362, section 3 (V-Min).
    """

    name = "v_min"
    layout = Layout.V
    splits_backward = True

    def rows(self, p: int, m: int, v: int) -> Rows:
        late = 2 if p % 3 == 0 else 0
        block = [(r, 2 * p - 1 - r, 2 * p + late + r, 4 * p + late - 1 - r) for r in range(p)]
        return squeeze(p, m, block, 2 * ((p + 4) // 3))


FAMILY = VMin()
