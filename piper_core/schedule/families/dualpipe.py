"""DualPipe: microbatches enter at both ends of the pipeline, each stage lies on two rows."""

from __future__ import annotations

from piper_core.schedule.families.base import Family, Rows, at_least
from piper_core.schedule.families.eight_steps import eight_steps
from piper_core.schedule.grid import Layout


class DualPipe(Family):
    """Pair F and B of opposite directions; defined for even p and even m >= 2p, as published.

    Microbatches 0 to m/2 - 1 enter at row 0, the others at row p - 1. Source: arXiv 2412.19437, section
    3.2.1, and github.com/deepseek-ai/DualPipe.
    """

    name = "dualpipe"
    layout = Layout.BIDIRECTIONAL
    splits_backward = True

    def degrees(self) -> range:
        return at_least(2, 2)

    def microbatches(self, p: int, v: int) -> range:
        return at_least(2 * p, 2)

    def rows(self, p: int, m: int, v: int) -> Rows:
        half = m // 2
        down = [eight_steps(p // 2, r, half, (r, 0), (p - 1 - r, half)) for r in range(p // 2)]
        up = [eight_steps(p // 2, r, half, (r, half), (p - 1 - r, 0)) for r in reversed(range(p // 2))]
        return down + up


FAMILY = DualPipe()
