"""Waits of a plan: the least that each action must wait for on the other streams of its row."""

from __future__ import annotations

import numpy as np

from piper_core.ir.dag import Ints, Mask
from piper_core.names import NodeKind
from piper_core.schedule.units import Units


def assign_waits(units: Units, stream: Ints, rank: Ints, look_ahead: int) -> tuple[Ints, Ints]:
    """Return (wait_start, waits) of a plan's actions; ``stream`` (A,) is by action, ``rank`` the action of each unit.

    Data edges, buffers of receives and of gathers; of what an action waits for on one stream only the furthest, and
    only where no earlier action of its own stream has waited for as much.
    """
    pairs = [
        (rank[units.src], rank[units.dst]),
        _receives(units, stream, rank, look_ahead),
        _gathers(units, stream, rank),
    ]
    src, dst = (np.concatenate(side) for side in zip(*pairs, strict=True))
    return least(src, dst, stream)


def _receives(units: Units, stream: Ints, rank: Ints, look_ahead: int) -> tuple[Ints, Ints]:
    """A receive is posted when the consumer ``look_ahead`` + 1 before its own has ended."""
    recv = np.flatnonzero(units.kind == NodeKind.RECV)
    recv = recv[np.argsort(rank[recv])]
    gap = look_ahead + 1
    later, earlier = recv[gap:], recv[: max(0, len(recv) - gap)]
    consumer = units.first_user(NodeKind.RECV)[earlier]
    same = (stream[rank[later]] == stream[rank[earlier]]) & (consumer >= 0)
    return rank[consumer[same]], rank[later[same]]


def _gathers(units: Units, stream: Ints, rank: Ints) -> tuple[Ints, Ints]:
    """A gather starts when compute is about to use the one ``prefetch`` before it."""
    gather = np.flatnonzero(units.gathers_each_use())
    gather = gather[np.argsort(rank[gather])]
    states = units.dag.states
    ahead = np.asarray([s.replication.prefetch if s.replication else 1 for s in states])
    k = np.arange(len(gather)) - ahead[units.dag.nodes.state[units.node[gather]]]
    earlier = gather[np.maximum(k, 0)]
    target = rank[units.first_user(NodeKind.COLLECTIVE)[earlier]]
    start = np.searchsorted(stream, stream[target])
    ok = (k >= 0) & (stream[rank[earlier]] == stream[rank[gather]]) & (target - 1 >= start)
    return target[ok] - 1, rank[gather[ok]]


def least(src: Ints, dst: Ints, stream: Ints) -> tuple[Ints, Ints]:
    """Return (wait_start, waits): of what an action waits for on one stream only the furthest, and only where no
    earlier action of its own stream has waited for as much. Indices are of actions, in the order of their streams."""
    total = len(stream)
    crossing = stream[src] != stream[dst]
    src, dst = src[crossing], dst[crossing]
    pair = stream[dst].astype(np.int64) * (int(stream.max(initial=0)) + 1) + stream[src]
    keys = np.sort((pair * total + dst) * total + src)  # by pair of streams, then who waits, then for whom
    keys = keys[_steps(keys)]
    rest, source = np.divmod(keys, total)
    pair = rest // total
    known = np.maximum.accumulate(source + pair * total)
    fresh = _steps(known)  # something that no earlier wait of this stream has seen
    furthest = np.ones(len(rest), np.bool_)
    furthest[:-1] = rest[1:] != rest[:-1]
    chosen = np.flatnonzero(furthest & fresh)
    waits = np.sort((rest[chosen] - pair[chosen] * total) * total + source[chosen])
    target, source = np.divmod(waits, total)
    wait_start = np.zeros(total + 1, np.int32)
    wait_start[1:] = np.cumsum(np.bincount(target, minlength=total))
    return wait_start, source.astype(np.int32)


def _steps(values: Ints) -> Mask:
    """Return where sorted values differ from the one before."""
    found = np.ones(len(values), np.bool_)
    np.not_equal(values[1:], values[:-1], out=found[1:])
    return found
