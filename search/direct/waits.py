"""The least that actions must wait for: what ``schedule.waits`` finds, with two sorts."""

from __future__ import annotations

import numpy as np

from piper_core.ir.dag import Ints


def least(src: Ints, dst: Ints, stream: Ints) -> tuple[Ints, Ints]:
    """Return (wait_start, waits): of what an action waits for on one stream only the furthest, and only where no
    earlier action of its own stream has waited for as much. Indices are of actions, in the order of their streams."""
    total = len(stream)
    crossing = stream[src] != stream[dst]
    src, dst = src[crossing], dst[crossing]
    pair = stream[dst].astype(np.int64) * (int(stream.max(initial=0)) + 1) + stream[src]
    keys = np.sort((pair * total + dst) * total + src)  # by pair of streams, then who waits, then for whom
    keys = keys[np.diff(keys, prepend=-1) > 0]
    rest, source = np.divmod(keys, total)
    pair, target = np.divmod(rest, total)
    group = np.cumsum(np.diff(pair, prepend=-1) > 0)
    known = np.maximum.accumulate(source + group * total)
    fresh = np.diff(known, prepend=-1) > 0  # something that no earlier wait of this stream has seen
    furthest = np.append(np.diff(rest) > 0, True)[: len(rest)]
    waits = np.sort((target * total + source)[furthest & fresh])
    target, source = np.divmod(waits, total)
    wait_start = np.zeros(total + 1, np.int32)
    wait_start[1:] = np.cumsum(np.bincount(target, minlength=total))
    return wait_start, source.astype(np.int32)
