"""V-Half: half the activations of 1F1B on a V of two stages a row, with less bubble than V-Min."""

from __future__ import annotations

from piper_core.schedule.families.base import Family, Rows
from piper_core.schedule.families.stable_pattern import squeeze
from piper_core.schedule.grid import Layout


class VHalf(Family):
    """Hold at most (p + 2) // 2 microbatches a row; bubble in the span about p / 2m.

    Passes down the V (F of the first stages, BI of the last ones) move on by one row in two units of time,
    passes up in one. For even p the backward starts three units later, lest two actions of a row fall into
    one unit. Source: arXiv 2405.15362, section 3 (V-Half).
    """

    name = "v_half"
    layout = Layout.V
    splits_backward = True

    def rows(self, p: int, m: int, v: int) -> Rows:
        late = 3 if p % 2 == 0 else 0
        block = [(2 * r, 3 * p - 2 - r, 3 * p + late - 1 + 2 * r, 6 * p + late - 2 - r) for r in range(p)]
        return squeeze(p, m, block, 2 * ((p + 2) // 2))


FAMILY = VHalf()
