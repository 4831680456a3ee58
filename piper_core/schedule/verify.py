"""Prove that a plan runs: no deadlock, right messages, right data, every buffer in time. Nothing is simulated."""

from __future__ import annotations

from collections import defaultdict
from itertools import product

import numpy as np

from piper_core.ir.dag import among
from piper_core.ir.macro import cycle, topological
from piper_core.schedule.plan import Channel, Communicator, Plan, StreamKind
from piper_core.schedule.verify_complete import complete
from piper_core.schedule.verify_order import dependencies
from piper_core.schedule.verify_table import BI, COMPUTE, FREE, GATHERS, RECVS, SENDS, B, F, PlanTable, R


def verify(plan: Plan) -> None:
    """Check a plan under rendezvous rules, without assuming any buffering.

    A message completes when both ends are at the head of their streams, a collective when all its rows are; an
    action holds its own stream and no other. Proved: every (stage, microbatch) has F once and exactly one of B or
    BI and BW, and R where it is recomputed; every gradient is reduced and every stage updated once; the k-th send of
    each channel meets the k-th receive that wants it; members of a communicator agree in order; no cycle of waiting
    exists; what an action reads has happened before it in every execution; gathered buckets are freed after their
    last use and not used later.

    Raises:
        PlanError: with a stable ``reason``, a one-line text and at most ten lines of the grid.
    """
    table = PlanTable(plan)
    complete(table)
    partner = _pair(table)
    order = _deadlock(table, partner)
    _buffers(table)
    dependencies(table, partner, order)


def _pair(table: PlanTable) -> list[int]:
    """Return, for each action, the first of those that it meets (itself when alone).

    Pairs are found as the runtime finds them: by position on the channel or communicator, not by name.
    """
    plan = table.plan
    queues: list[dict[tuple[int, bool], list[int]]] = [{} for _ in plan.lines]
    owner: dict[tuple[int, int, bool], int] = {}
    for i in np.flatnonzero((plan.line >= 0) | among(plan.kind, (*SENDS, *RECVS))).tolist():
        line, sending = table.line[i], table.kind[i] in SENDS
        message = sending or table.kind[i] in RECVS
        if line < 0:
            if message:
                raise table.error("mispaired", f"{table.name(i)} is on no channel", [i])
            continue
        if isinstance(plan.lines[line], Channel) != message:
            raise table.error("mispaired", f"{table.name(i)} is on a line of another kind", [i])
        if owner.setdefault((line, table.row[i], sending), table.stream[i]) != table.stream[i]:
            raise table.error("mispaired", f"{table.name(i)} uses a channel that another stream of its row uses", [i])
        queues[line].setdefault((table.row[i], sending), []).append(i)
    partner = list(range(len(plan)))
    for line, queue in zip(plan.lines, queues, strict=True):
        if isinstance(line, Channel):
            ends = {(line.source, True), (line.destination, False)}
        else:
            ends = {(row, False) for row in line.rows}
        stray = [q[0] for end, q in queue.items() if end not in ends]
        if stray:
            raise table.error("mispaired", f"{table.name(stray[0])} is at the wrong end of its channel", stray[:1])
        if isinstance(line, Channel):
            _messages(
                table, line, queue.get((line.source, True), []), queue.get((line.destination, False), []), partner
            )
        else:
            _collectives(table, line, [queue.get((row, False), []) for row in line.rows], partner)
    return partner


def _messages(table: PlanTable, line: Channel, sends: list[int], recvs: list[int], partner: list[int]) -> None:
    for a, b in zip(sends, recvs, strict=False):
        forward = SENDS[table.kind[a]]
        source, target = (table.stage[a], table.stage[b]) if forward else (table.stage[b], table.stage[a])
        if (
            forward != RECVS[table.kind[b]]
            or table.microbatch[a] != table.microbatch[b]
            or not 0 <= target < table.plan.stages
            or source not in table.plan.inputs[target]
        ):
            what = (f"row {line.destination} expects {table.name(b)} but the next message from row {line.source} is "
                    f"{table.name(a)}")  # fmt: skip
            raise table.error("mispaired", what, [b, a])
        partner[b] = a
    if len(sends) != len(recvs):
        lone, far = (
            (recvs[len(sends)], line.source) if len(sends) < len(recvs) else (sends[len(recvs)], line.destination)
        )
        what = f"{table.name(lone)} on row {table.row[lone]} has no partner on row {far}"
        raise table.error("mispaired", what, [lone])


def _collectives(table: PlanTable, line: Communicator, queues: list[list[int]], partner: list[int]) -> None:
    first = queues[0]
    for row, queue in zip(line.rows[1:], queues[1:], strict=True):
        for a, b in zip(first, queue, strict=False):
            same = (table.kind[a], table.microbatch[a]) == (table.kind[b], table.microbatch[b])
            if not same or (line.label not in ("tie", "norm") and table.bucket[a] != table.bucket[b]):
                what = (
                    f"rows {line.rows[0]} and {row} meet in different collectives: {table.name(a)} and {table.name(b)}"
                )
                raise table.error("collective_order", what, [a, b])
            partner[b] = a
        if len(first) != len(queue):
            longer = first if len(first) > len(queue) else queue
            lone = longer[min(len(first), len(queue))]
            rows = ", ".join(map(str, line.rows[:6]))
            what = f"{table.name(lone)} on row {table.row[lone]} lacks a member of its group (rows {rows})"
            raise table.error("collective_order", what, [lone])


def _deadlock(table: PlanTable, partner: list[int]) -> list[int]:
    """With partners merged, stream order and waits must have no cycle: then, and only then, all can run.

    Returns a topological order of the merged actions.
    """
    plan = table.plan
    n = len(plan)
    first = np.asarray(partner, np.int32)
    inner = np.ones(n, np.bool_)
    inner[plan.start[:-1][plan.start[:-1] < n]] = False
    later = np.flatnonzero(inner)
    src = np.concatenate([later - 1, plan.waits])
    dst = np.concatenate([later, np.repeat(np.arange(n), np.diff(plan.wait_start))])
    src, dst = first[src], first[dst]
    order, stuck = topological(n, src, dst)
    if not stuck:
        return order
    path = cycle(stuck, src, dst)
    members: dict[int, list[int]] = defaultdict(list)
    for i, p in enumerate(partner):
        members[p].append(i)
    rows = sorted({table.row[i] for t in path for i in members[t]})
    shown = [i for t in path for i in members[t][:1]]
    words = [f"{table.name(i)} (row {table.row[i]})" for i in shown]
    text = " then ".join(words[:6]) + (" then ..." if len(words) > 6 else f" then {words[0]}")
    if len(rows) == 1:
        who = f"row {rows[0]} waits for itself"
    elif len(rows) <= 4:
        who = f"rows {' and '.join(map(str, rows))} wait for each other"
    else:
        who = f"{len(rows)} rows wait for each other in a ring"
    raise table.error("deadlock", f"{who}: {text}", shown)


def _buffers(table: PlanTable) -> None:
    """A gathered bucket is used after its gather and before its free. A free gives back the oldest that its row has
    gathered for its microbatch: that of the forward, then that of the backward."""
    turn: dict[tuple[int, int, int], dict[bool, int]] = {}
    for i in np.flatnonzero(among(table.plan.kind, tuple(GATHERS))).tolist():
        serves = GATHERS[table.kind[i]]
        if serves is not None:
            order = turn.setdefault((table.row[i], table.bucket[i], table.microbatch[i]), {})
            order[serves] = len(order)
    if not turn and FREE not in table.kind:
        return
    users: list[dict[tuple[int, int], list[int]]] = [{} for _ in table.plan.inputs]
    for b, use in enumerate(table.plan.buckets):
        if use.each_use:
            for kinds, labels in (((F,), use.forward), ((B, BI), use.backward), ((R,), use.again)):
                for kind, label in product(kinds, labels):
                    users[use.stage].setdefault((kind, label), []).append(b)
    freed = defaultdict[tuple[int, int, int], int](int)
    for s, stream in enumerate(table.plan.streams):
        if stream.kind is StreamKind.COMPUTE:
            for i in range(table.start[s], table.start[s + 1]):
                _use(table, i, turn, users, freed)
    for (row, b, microbatch), order in turn.items():
        if freed[row, b, microbatch] != len(order):
            what = (f"row {row} gathers bucket {b} {len(order)} times for microbatch {microbatch} and frees it "
                    f"{freed[row, b, microbatch]} times")  # fmt: skip
            raise table.error("leak", what, [table.gather[row, next(iter(order)), b, microbatch]])


def _use(
    table: PlanTable,
    i: int,
    turn: dict[tuple[int, int, int], dict[bool, int]],
    users: list[dict[tuple[int, int], list[int]]],
    freed: dict[tuple[int, int, int], int],
) -> None:
    """Follow one action of a compute stream: it frees a bucket, or uses some."""
    kind, row, microbatch = table.kind[i], table.row[i], table.microbatch[i]
    if kind == FREE:
        at = row, table.bucket[i], microbatch
        freed[at] += 1
        if freed[at] > len(turn.get(at, ())):
            what = f"row {row} frees bucket {at[1]} of microbatch {microbatch} more often than it gathers it"
            raise table.error("use_after_free", what, [i])
    elif kind in COMPUTE:
        for b in users[table.stage[i]].get((kind, table.label[i]), ()):
            at = row, b, microbatch
            if turn.get(at, {}).get(kind == F, freed[at]) < freed[at]:
                what = f"{table.name(i)} on row {row} uses bucket {b} after it was freed"
                raise table.error("use_after_free", what, [i])
