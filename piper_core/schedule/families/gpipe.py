"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from piper_core.schedule.families.base import Family, Rows, backwards, forwards
from piper_core.schedule.grid import Layout


class GPipe(Family):
    """Hold all m microbatches; bubble (p - 1) / (m + p - 1). Source: arXiv 1811.06965, section 2."""

    name = "gpipe"
    layout = Layout.LOOP
    splits_backward = False

    def rows(self, p: int, m: int, v: int) -> Rows:
        return [[*forwards(r, m)[:m], *backwards(r, m)[:m]] for r in range(p)]


FAMILY = GPipe()
