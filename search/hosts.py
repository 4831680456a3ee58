"""What communication takes of the thread that computes, where compute and communication share their hosts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from piper_core.schedule.plan import Plan
from search.simulator.lower import ActionSeconds, on_compute, sums


def with_hosts(plan: Plan, seconds: ActionSeconds, host_s: float) -> ActionSeconds:
    """Return seconds in which compute also starts and finishes the communication around it: half of ``host_s`` for each
    action of communication that waits for it, and half for each that it waits for."""
    if not host_s:
        return seconds
    total = seconds.total.copy()
    computes = on_compute(plan)
    waiting = np.repeat(np.arange(len(plan)), np.diff(plan.wait_start))
    for compute, other in ((plan.waits, waiting), (waiting, plan.waits)):
        crossing = computes[compute] & ~computes[other]
        total += sums(compute[crossing], np.full(int(crossing.sum()), host_s / 2), len(plan))
    return replace(seconds, total=total)
