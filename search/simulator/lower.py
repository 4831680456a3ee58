"""From a plan to integer arrays: transactions, and which of them each follows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from piper_core.errors import PlanError
from piper_core.ir.action import ActionKind
from piper_core.ir.dag import Dag, Floats, Ints, Mask
from piper_core.names import Axis, Collective, NodeKind
from piper_core.schedule.plan import CODE, KINDS, Plan, StreamKind
from search.simulator.loops import pick


class CommKind(StrEnum):
    """What communication is for, in reports of where time goes."""

    PIPELINE = "pipeline"
    GATHER = "gather"
    REDUCE = "reduce"
    TENSOR = "tensor"
    EXPERT = "expert"
    CONTEXT = "context"
    TIE = "tie"
    NORM = "norm"


COMM_KINDS = tuple(CommKind)
_AT = {kind: i for i, kind in enumerate(COMM_KINDS)}
_OF_AXIS = {
    Axis.TENSOR: CommKind.TENSOR, Axis.SEQUENCE: CommKind.TENSOR, Axis.EXPERT: CommKind.EXPERT,
    Axis.CONTEXT: CommKind.CONTEXT, Axis.DATA: CommKind.REDUCE, Axis.TIE: CommKind.TIE, Axis.NORM: CommKind.NORM,
}  # fmt: skip
AXIS_KIND = np.asarray([_AT[_OF_AXIS[axis]] if axis in _OF_AXIS else -1 for axis in Axis], np.int32)
"""Index into ``COMM_KINDS`` by :class:`Axis` (gathers of parameters are told apart by their collective)."""
_VERBS = (
    ("SEND", CommKind.PIPELINE), ("RECV", CommKind.PIPELINE), ("ALL_GATHER", CommKind.GATHER),
    ("REDUCE_SCATTER", CommKind.REDUCE), ("ALL_REDUCE", CommKind.REDUCE), ("ALL_TO_ALL", CommKind.EXPERT),
    ("COMM", CommKind.TENSOR), ("NORM", CommKind.NORM),
)  # fmt: skip
ACTION_KIND = np.asarray(
    [next((_AT[comm] for verb, comm in _VERBS if kind.value.startswith(verb)), -1) for kind in KINDS], np.int32
)
"""Index into ``COMM_KINDS`` by action kind (index into ``KINDS``); -1 for compute."""
_GATHERS = np.asarray([kind.value.startswith("ALL_GATHER") for kind in KINDS])


@dataclass(frozen=True, slots=True)
class ActionSeconds:
    """How long each action lasts, and what its seconds are.

    ``total`` (A,); ``comm`` (A,) index into ``COMM_KINDS``, -1 for actions of the compute stream; ``inner``
    (rows, kinds) seconds a step of collectives inside compute actions; ``update`` (rows,) of optimiser updates.
    """

    total: Floats
    comm: Ints
    inner: Floats
    update: Floats


@dataclass(frozen=True, slots=True)
class Lowered:
    """A plan as arrays. A transaction is one action, or all the actions that meet in one message or collective.

    Transactions are numbered in an order in which each follows those that it waits for. ``of`` (A,) is the
    transaction of each action; ``targets[first[t]:first[t + 1]]`` those that wait for t within a step,
    ``later[later_first[t]:...]`` those that wait for it in the next step; ``members[member_first[t]:...]`` its rows,
    ``member_of[member_first[t]:...]`` its actions. ``row`` (A,) is the row of each action, ``heads`` (A,) whether it is
    the first of its stream, ``computes`` (A,) whether that is a compute stream.
    """

    plan: Plan
    of: Ints
    first: Ints
    targets: Ints
    later_first: Ints
    later: Ints
    member_first: Ints
    members: Ints
    member_of: Ints
    row: Ints
    heads: Mask
    computes: Mask

    def __len__(self) -> int:
        return len(self.first) - 1


def row_of(plan: Plan) -> Ints:
    """Return the row of each action, shape (A,)."""
    row: Ints = np.asarray([stream.row for stream in plan.streams], np.int32)
    return np.take(row, plan.stream_of())


def on_compute(plan: Plan) -> Mask:
    """Return whether each action is on a compute stream, shape (A,)."""
    computes: Mask = np.asarray([stream.kind is StreamKind.COMPUTE for stream in plan.streams], np.bool_)
    return np.take(computes, plan.stream_of())


def sums(index: Ints, weights: Floats, size: int) -> Floats:
    """Return the sum of weights at each index below ``size``."""
    return np.bincount(index, weights=weights, minlength=size).astype(np.float64)


def action_seconds(dag: Dag, plan: Plan, node_seconds: Floats) -> ActionSeconds:
    """Add up the seconds of each action's nodes; both ends of a message carry its whole duration.

    Args:
        node_seconds: seconds of each node of the DAG that the plan was lowered from, shape (n,).
    """
    unit, nodes = plan.unit, dag.nodes
    held = unit >= 0
    seconds = plain_seconds(plan, sums(unit[held], node_seconds[held], len(plan)))
    talks = np.flatnonzero(held & (nodes.kind == NodeKind.COLLECTIVE))
    gather = (nodes.axis[talks] == Axis.DATA) & (nodes.collective[talks] == Collective.ALL_GATHER)
    kind = np.where(gather, _AT[CommKind.GATHER], AXIS_KIND[nodes.axis[talks]])
    at = unit[talks]
    inside = on_compute(plan)[at]
    seconds.comm[at[~inside]] = kind[~inside]
    rows, kinds = seconds.inner.shape
    cell = row_of(plan)[at[inside]] * kinds + kind[inside]
    return replace(seconds, inner=sums(cell, node_seconds[talks[inside]], rows * kinds).reshape(rows, kinds))


def plain_seconds(plan: Plan, total: Floats) -> ActionSeconds:
    """Return durations of which nothing is known but how long each action lasts."""
    comm = np.where(on_compute(plan), -1, ACTION_KIND[plan.kind]).astype(np.int32)
    update = plan.kind == CODE[ActionKind.UPDATE]
    rows = len(plan.rows)
    inner = np.zeros((rows, len(COMM_KINDS)))
    return ActionSeconds(total, comm, inner, sums(row_of(plan)[update], total[update], rows))


def lower_plan(plan: Plan) -> Lowered:
    """Merge what meets on a channel or communicator, first come first served, and order the transactions.

    Raises:
        PlanError: ``deadlock``; a verified plan has none.
    """
    count = len(plan)
    row = row_of(plan)
    of = _meet(plan, row)
    size = int(of.max(initial=-1)) + 1
    heading = np.zeros(count + 1, np.bool_)
    heading[plan.start] = True
    following = np.flatnonzero(~heading[:count])
    waiting = np.repeat(np.arange(count), np.diff(plan.wait_start))
    src = np.concatenate([of[following - 1], of[plan.waits]])
    dst = np.concatenate([of[following], of[waiting]])
    first, targets = by_source(src, dst, size)
    order = _order(first, targets)
    rank = np.empty(size, np.int32)
    rank[order] = np.arange(size, dtype=np.int32)
    full = np.flatnonzero(np.diff(plan.start))
    heads, tails = plan.start[full], plan.start[full + 1] - 1
    gathers, updates = _head_gathers(plan, row)
    of = rank[of]
    before, later = of[np.concatenate([tails, updates])], of[np.concatenate([heads, gathers])]
    member_first, member_of = by_source(of, np.arange(count), size)
    first, targets = _renumbered(first, targets, order, rank)
    return Lowered(
        plan, of, first, targets, *by_source(before, later, size), member_first, row[member_of].astype(np.int32),
        member_of, row, heading[:count], on_compute(plan),
    )  # fmt: skip


def _meet(plan: Plan, row: Ints) -> Ints:
    """Return the transaction of each action: the k-th action of each end of a line meets the k-th of the others."""
    of = np.cumsum(plan.line < 0, dtype=np.int32) - 1
    at = np.flatnonzero(plan.line >= 0)
    if not len(at):
        return of
    line, ends = plan.line[at], plan.line[at].astype(np.int64) * len(plan.rows) + row[at]
    by = stable(ends, int(ends.max()) + 1)
    starts = np.flatnonzero(np.diff(ends[by], prepend=-1))
    turn = np.empty(len(at), np.int32)
    turn[by] = np.arange(len(at)) - np.repeat(starts, np.diff(starts, append=len(at)))
    turns = np.zeros(int(line.max()) + 2, np.int32)
    np.maximum.at(turns, line + 1, turn + 1)
    of[at] = int(of[-1]) + 1 + np.cumsum(turns)[line] + turn
    return of


def _head_gathers(plan: Plan, row: Ints) -> tuple[Ints, Ints]:
    """Return the first gather of each bucket on each row, and the update that it follows in the next step."""
    gather = np.flatnonzero(_GATHERS[plan.kind])
    first = np.full(len(plan.rows) * (len(plan.buckets) + 1), -1, np.int64)
    first[(row[gather].astype(np.int64) * (len(plan.buckets) + 1) + plan.bucket[gather])[::-1]] = gather[::-1]
    gather = first[first >= 0]
    update = np.flatnonzero(plan.kind == CODE[ActionKind.UPDATE])
    of = np.full((len(plan.rows), plan.stages + 1), -1, np.int64)
    of[row[update], plan.stage[update]] = update
    last = of[row[gather], plan.stage[gather]]
    return gather[last >= 0], last[last >= 0]


def stable(keys: Ints, size: int) -> Ints:
    """Return a stable order of keys below ``size``; of 16 bits they are sorted in one pass over their digits."""
    return np.argsort(keys.astype(np.uint16) if size <= 1 << 16 else keys, kind="stable")


def by_source(src: Ints, dst: Ints, size: int) -> tuple[Ints, Ints]:
    """Return edges by source below ``size``: where the targets of each begin, shape (size + 1,), and all targets."""
    first = np.zeros(size + 1, np.int32)
    np.cumsum(np.bincount(src, minlength=size), out=first[1:])
    return first, dst[stable(src, size)].astype(np.int32)


def _renumbered(first: Ints, targets: Ints, order: Ints, rank: Ints) -> tuple[Ints, Ints]:
    """Return edges by source once each transaction is numbered by its ``rank``, its place in ``order``."""
    counts = np.diff(first)[order]
    begin = np.zeros_like(first)
    np.cumsum(counts, out=begin[1:])
    at = np.arange(len(targets)) + np.repeat(first[:-1][order] - begin[:-1], counts)
    return begin, rank[targets[at]]


def _order(first: Ints, targets: Ints) -> Ints:
    """Return the transactions in an order in which all edges point forward.

    Raises:
        PlanError: ``deadlock``.
    """
    size = len(first) - 1
    degree, order = np.bincount(targets, minlength=size).astype(np.int32), np.zeros(size, np.int32)
    loops = pick(0)
    if loops.compiled:
        count = loops.sort(first, targets, degree, order)
    else:
        listed = order.tolist()
        count = loops.sort(first.tolist(), targets.tolist(), degree.tolist(), listed)
        order = np.asarray(listed, np.int32)
    if count < size:
        raise PlanError("deadlock", "the plan cannot be simulated, because some of its actions wait for each other")
    return order
