"""DualPipeV: DualPipe folded onto a V of two stages a row, each on one row only."""

from __future__ import annotations

from piper_core.schedule.families.base import Family, Rows, at_least
from piper_core.schedule.families.eight_steps import eight_steps
from piper_core.schedule.grid import Layout


class DualPipeV(Family):
    """Pair F and B of different microbatches in overlap groups; hold at most 2p + 1 stage activations a row.

    Source: the published DualPipeV schedule (github.com/deepseek-ai/DualPipe), the "cut in half" of DualPipe.
    """

    name = "dualpipev"
    layout = Layout.V
    splits_backward = True

    def microbatches(self, p: int, v: int) -> range:
        return at_least(2 * p)

    def rows(self, p: int, m: int, v: int) -> Rows:
        return [eight_steps(p, r, m, (r, 0), (2 * p - 1 - r, 0)) for r in range(p)]


FAMILY = DualPipeV()
