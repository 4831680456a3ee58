"""ZBV: zero bubble on a V of two stages a row, at the memory of 1F1B."""

from __future__ import annotations

from piper_core.ir.action import Slot
from piper_core.schedule.families.base import Family, Rows, forwards, input_backwards, weight_backwards
from piper_core.schedule.grid import Layout


class ZBV(Family):
    """Hold at most p microbatches (2p stage activations) a row; no bubble in the span for m >= 2p - 1.

    Built for max(m, 2p - 1) microbatches, the surplus then dropped. Source: arXiv 2405.15362 (V-ZB) and
    arXiv 2401.10241, section 6.
    """

    name = "zbv"
    layout = Layout.V
    splits_backward = True

    def rows(self, p: int, m: int, v: int) -> Rows:
        rows = [_row(p, r, max(m, 2 * p - 1)) for r in range(p)]
        if m < 2 * p - 1:
            rows = [[slot for slot in row if (slot[0].microbatch or 0) < m] for row in rows]
        return rows


def _row(p: int, r: int, n: int) -> list[Slot]:
    """Order row r for n >= 2p - 1 microbatches: its stage on the way down (d) and on the way up (u)."""
    d, u = r, 2 * p - 1 - r
    f_d, bi_d, bw_d = forwards(d, n), input_backwards(d, n), weight_backwards(d, n)
    f_u, bi_u, bw_u = forwards(u, n), input_backwards(u, n), weight_backwards(u, n)
    ahead = 2 * (p - r) - 1
    row = list(f_d[:ahead])
    for i in range(r):
        row += (f_u[i], f_d[ahead + i])
    for i in range(p - r):
        row += (f_u[r + i], bi_u[i], bw_u[i])
    for i in range(n - p):
        row += f_d[ahead + r + i : min(ahead + r + i + 1, n)]
        row += (bi_d[i], bw_d[i], f_u[p + i], bi_u[p - r + i], bw_u[p - r + i])
    for i in range(r):
        row += (bi_d[n - p + i], bi_u[n - r + i])
    for i in range(p - r):
        row += (bi_d[n - p + r + i], bw_d[n - p + i])
    row += bw_u[n - r : n]
    row += bw_d[n - r : n]
    return row


FAMILY = ZBV()
