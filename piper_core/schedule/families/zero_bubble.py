"""The common part of ZB-H1 and ZB-H2: one stage a row, BW as filler."""

from __future__ import annotations

from piper_core.ir.action import Slot
from piper_core.schedule.families.base import forwards, input_backwards, weight_backwards


def zero_bubble_row(r: int, m: int, warmup: int, limit: int) -> list[Slot]:
    """Order row r: ``warmup`` forwards, then BI and F in turn, BW as late as ``limit`` activations allow.

    Source: arXiv 2401.10241, section 2 (handcrafted schedules).
    """
    f, bi, bw = forwards(r, m), input_backwards(r, m), weight_backwards(r, m)
    n_f = min(m, warmup)
    n_bw = 0
    row = list(f[:n_f])
    for i in range(m):
        row.append(bi[i])
        if n_f == m or n_f - n_bw == limit:
            row.append(bw[n_bw])
            n_bw += 1
        if n_f < m:
            row.append(f[n_f])
            n_f += 1
    row += bw[n_bw:m]
    return row
