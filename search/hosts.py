"""How long compute stands still for communication that is not part of it: hosts that both share, and messages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from piper_core.schedule.plan import Plan, StreamKind
from search.cost.software import Software
from search.simulator.lower import COMM_KINDS, ActionSeconds, CommKind, on_compute, row_of, sums

PIPELINE = COMM_KINDS.index(CommKind.PIPELINE)


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


def with_messages(plan: Plan, seconds: ActionSeconds, software: Software) -> ActionSeconds:
    """Return seconds in which compute stands still at its messages, as ``software`` does: at each that it sends, and
    while it waits for each that it sends or receives. Counted as pipeline communication inside compute."""
    if not (software.message_hold_s or software.blocks_messages):
        return seconds
    kind = np.asarray([stream.kind for stream in plan.streams], np.int32)[plan.stream_of()]
    waiting = np.repeat(np.arange(len(plan)), np.diff(plan.wait_start))
    sends = np.flatnonzero((kind[waiting] == StreamKind.SEND) & (kind[plan.waits] == StreamKind.COMPUTE))
    lasts = seconds.total if software.blocks_messages else np.zeros(len(plan))
    held = sums(plan.waits[sends], lasts[waiting[sends]] + software.message_hold_s, len(plan))
    receives = np.flatnonzero((kind[plan.waits] == StreamKind.RECV) & (kind[waiting] == StreamKind.COMPUTE))
    held += sums(waiting[receives], lasts[plan.waits[receives]], len(plan))
    inner = seconds.inner.copy()
    inner[:, PIPELINE] += sums(row_of(plan), held, len(plan.rows))
    return replace(seconds, total=seconds.total + held, inner=inner)
