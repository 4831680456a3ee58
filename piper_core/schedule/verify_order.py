"""Data dependencies of a plan: what each action reads has happened before it, by waits, order and meetings alone."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from piper_core.ir.dag import Ints, Mask, among
from piper_core.schedule.plan import Plan
from piper_core.schedule.verify_reads import Reads
from piper_core.schedule.verify_table import INNER, PlanTable


def dependencies(table: PlanTable, partner: list[int], order: list[int]) -> None:
    """Check that every action's reads happen before it.

    First by what its stream waited for, and by what other reads imply; where that does not show it, by everything that
    must have happened before, on any row. ``partner`` is the first of the actions that each meets, ``order`` a
    topological order of those.

    Raises:
        PlanError: ``data_dependency``; ``duplicate`` where a message comes twice.
    """
    reads = Reads(table, partner)
    reader, read = reads.pairs()
    unknown = np.flatnonzero(~_waited_for(table.plan, reader, read))
    unknown = unknown[np.argsort(reader[unknown], kind="stable")]
    reader, read = reader[unknown], read[unknown]
    if reads.implied(reader, read).all():
        return
    column = {t: k for k, t in enumerate(sorted({table.stream[p] for p in read.tolist()}))}
    before = happened_before(table, partner, order, column)
    for i, p in zip(reader.tolist(), read.tolist(), strict=True):
        if before[i, column[table.stream[p]]] < p:
            what = f"{table.name(i)} on row {table.row[i]} does not wait for {table.name(p)}"
            raise table.error("data_dependency", what, [i, p])


def _waited_for(plan: Plan, reader: Ints, read: Ints) -> Mask:
    """Return which reads are of earlier actions of the same stream, or of what that has waited for until then: itself,
    or through a collective inside an opened macro."""
    stream, total, streams = plan.stream_of().astype(np.int64), len(plan), len(plan.streams)
    count = np.diff(plan.wait_start)
    after, waited = np.repeat(np.arange(total), count), plan.waits
    through = np.flatnonzero(among(plan.kind[waited], tuple(INNER)))
    more = count[waited[through]]
    first = plan.wait_start[waited[through]] - (np.cumsum(more) - more)
    after = np.concatenate([after, np.repeat(after[through], more)])
    waited = np.concatenate([waited, plan.waits[np.repeat(first, more) + np.arange(len(after) - len(waited))]])

    def key(later: Ints, earlier: Ints, place: Ints) -> NDArray[np.int64]:
        """Return a number that sorts by the two streams, then by place."""
        pair: NDArray[np.int64] = stream[later] * streams + stream[earlier]
        return pair * total + place

    order = np.argsort(key(after, waited, after))
    after, waited = after[order], waited[order]
    furthest = np.append(np.maximum.accumulate(key(after, waited, waited)), -1)  # so far, of one stream by another
    found: Mask = (stream[reader] == stream[read]) & (read < reader)
    apart = np.flatnonzero(~found)
    reader, read = reader[apart], read[apart]
    at = np.searchsorted(key(after, waited, after), key(reader, read, reader), side="right") - 1
    found[apart] = furthest[at] >= key(reader, read, read)
    return found


def happened_before(
    table: PlanTable, partner: list[int], order: list[int], column: dict[int, int]
) -> NDArray[np.int32]:
    """Return, for each action and some streams, the last action of that stream that must have ended before it starts.

    Shape (actions, streams), -1 for none; ``column`` says which of them is where. Actions that meet end together, but
    each starts by itself.
    """
    n, streams = len(table.plan), table.stream
    waits = [table.plan.waits[a:b].tolist() for a, b in pairwise(table.plan.wait_start.tolist())]
    meets: list[list[int]] = [[] for _ in range(n)]
    for i, p in enumerate(partner):
        meets[p].append(i)
    before = np.full((n, len(column)), -1, np.int32)
    ended = np.full((n, len(column)), -1, np.int32)
    for group in order:
        for i in meets[group]:
            into = [*waits[i], i - 1] if i > table.start[streams[i]] else waits[i]
            for a in into:
                np.maximum(before[i], ended[partner[a]], out=before[i])
            np.maximum(ended[group], before[i], out=ended[group])
        for i in meets[group]:
            if streams[i] in column:
                ended[group, column[streams[i]]] = i
    return before
