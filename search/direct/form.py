"""The form of a step's plan under an order: the same actions, streams and waits as ``schedule.lower`` finds in its DAG.

Steps that differ in what things take and hold alone have one form: other devices, microbatches or ways of sharing
work, with the same pieces, buckets and collectives. Making it takes most of the time, so it is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from piper_core.ir.dag import Floats, Ints
from piper_core.names import Sync
from piper_core.schedule.plan import BucketUse, Plan, Reduction, Stream, StreamKind
from piper_core.schedule.waits import least
from search.direct.draft import NONE, Draft, Uses
from search.direct.messages import Messages, add_messages
from search.direct.order import Order, runs_of
from search.direct.shape import Step
from search.direct.sliced import Sliced
from search.direct.sync import Synced, add_syncs, close_step
from search.simulator.lower import Lowered, lower_plan

LOOK_AHEAD = 1
_NO_USE = BucketUse(0, False, Reduction.NONE, (), (), (), ())


@dataclass(frozen=True, slots=True)
class Frame:
    """What a form is made of: a step and an order. Two are equal where their forms are, those of other orders apart.

    A frame keeps its order, whose identity is part of ``key``, alive.
    """

    key: tuple[object, ...] = field(init=False)
    step: Step = field(compare=False, repr=False)
    order: Order = field(compare=False, repr=False)
    sync: Sync

    def __post_init__(self) -> None:
        step = self.step
        inside = step.inside if self.order.grouped or step.config.zero == 3 else None
        object.__setattr__(self, "key", (step.form, inside, id(self.order)))


@dataclass(frozen=True, slots=True)
class Form:
    """A plan as the simulator reads it, without what no simulation reads (labels, parts, lines, uses of buckets); its
    ``rows`` are those of the step that it was made of.

    By action, shape (A,): ``price``, where a tariff says what it lasts, and ``comm`` (see ``ActionSeconds``). By unit:
    ``rank`` is its action. ``runs`` (phases, rows, stages) counts macro actions that are not opened. Of pieces that
    compute, shape (n,): ``piece`` of the table, and ``instant``, when they start (see ``direct.memory``).
    """

    sliced: Sliced
    lowered: Lowered
    price: Ints
    comm: Ints
    rank: Ints
    messages: Messages
    gathers: Uses
    reductions: Uses
    runs: Ints
    piece: Ints
    instant: Ints

    def __len__(self) -> int:
        return len(self.price)


def form_of(frame: Frame, sliced: Sliced) -> Form:
    """Return the form of a step under an order, in pieces.

    Raises:
        PlanError: the plan would not run.
    """
    step, order = frame.step, frame.order
    draft = Draft(step, order, sliced)
    messages = add_messages(draft)
    synced = add_syncs(draft)
    close_step(draft, synced, frame.sync)
    columns, place = draft.columns.finish()
    stream, streams = _streams(draft, columns["row"], columns["queue"])
    by = _sorted(stream, place, len(step.buckets))
    rank = np.empty(len(by), np.int64)
    rank[by] = np.arange(len(by))
    stream = stream[by]
    counts = np.bincount(stream, minlength=len(streams))
    start = np.zeros(len(streams) + 1, np.int32)
    start[1:] = np.cumsum(counts)
    edges: list[tuple[Ints, Ints]] = [(rank[src], rank[dst]) for src, dst in draft.edges]
    edges += [_receives(messages, stream, rank), _prefetches(synced, step.config.prefetch, stream, start, rank)]
    wait_start, waits = least(
        np.concatenate([src for src, _ in edges]), np.concatenate([dst for _, dst in edges]), stream
    )
    price, kind, stage, microbatch, bucket, line, comm = (
        columns[name][by] for name in ("price", "kind", "stage", "microbatch", "bucket", "line", "comm")
    )
    plan = Plan(
        rows=step.rows, microbatches=order.find.shape[2], inputs=((),) * step.stages.count, streams=streams,
        lines=(), labels=(), buckets=(_NO_USE,) * len(step.buckets), start=start, kind=kind, stage=stage,
        microbatch=microbatch, bucket=bucket, label=np.full(len(by), -1, np.int32), line=line, wait_start=wait_start,
        waits=waits, sync=frame.sync,
    )  # fmt: skip
    computes = np.flatnonzero(columns["queue"][: len(draft.macros.macro)] < 0)
    return Form(
        sliced, lower_plan(plan), price, comm, rank, messages, synced.gathers, synced.reductions,
        _whole_runs(sliced, step, order), draft.macros.piece[computes], 3 * rank[computes] + columns["row"][computes],
    )  # fmt: skip


def _sorted(stream: Ints, place: Floats, buckets: int) -> Ints:
    """Return units by stream, then place; as one number where it can tell the places of buckets apart."""
    width = 2.0 ** np.ceil(np.log2(place.max() + 2.0))
    if (float(stream.max()) + 1) * width * 16 * (buckets + 1) > 2.0**52:
        return np.lexsort((place, stream))
    return np.argsort(stream * width + place)


def _streams(draft: Draft, row: Ints, queue: Ints) -> tuple[Ints, tuple[Stream, ...]]:
    """Return the stream of each unit, and the streams: one compute stream a row first."""
    rows, names, width = draft.rows, (*draft.step.streams, "norm"), draft.width
    size = 3 * len(names) * width
    others = np.flatnonzero(queue >= 0)
    key = row[others].astype(np.int64) * size + queue[others]
    used = np.zeros(rows * size, np.bool_)
    used[key] = True
    number = np.cumsum(used) + rows - 1
    stream = row.astype(np.int64)
    stream[others] = number[key]
    table = [Stream(r, StreamKind.COMPUTE, "compute") for r in range(rows)]
    for value in np.flatnonzero(used).tolist():
        r, rest = divmod(value, size)
        kind, rest = divmod(rest, len(names) * width)
        name, tail = divmod(rest, width)
        if kind == StreamKind.COMPUTE:  # the first third of a row's queues, which is not for messages
            table.append(Stream(r, StreamKind.COLLECTIVE, names[name]))
        else:
            peer, back = divmod(tail, 2)
            end = "send>" if kind == StreamKind.SEND else "recv<"
            table.append(Stream(r, StreamKind(kind), f"{end}{peer}.{'FB'[back]}"))
    return stream, tuple(table)


def _receives(messages: Messages, stream: Ints, rank: Ints) -> tuple[Ints, Ints]:
    """A receive is posted when the consumer ``LOOK_AHEAD`` + 1 before its own has ended."""
    recv, consumer = rank[messages.recv], rank[messages.consumer]
    by = np.argsort(recv)
    gap = LOOK_AHEAD + 1
    later, earlier = by[gap:], by[:-gap]
    same = stream[recv[later]] == stream[recv[earlier]]
    return consumer[earlier[same]], recv[later[same]]


def _prefetches(synced: Synced, ahead: int, stream: Ints, start: Ints, rank: Ints) -> tuple[Ints, Ints]:
    """A gather starts when compute is about to use the one ``ahead`` before it."""
    if not len(synced.gathers.unit):
        return NONE, NONE
    gather, user = rank[synced.gathers.unit], rank[synced.first]
    by = np.argsort(gather)
    later, earlier = gather[by[ahead:]], gather[by[:-ahead]]
    target = user[by[:-ahead]]
    ok = (stream[later] == stream[earlier]) & (target - 1 >= start[stream[target]])
    return target[ok] - 1, later[ok]


def _whole_runs(sliced: Sliced, step: Step, order: Order) -> Ints:
    """Return how many macro actions that are not opened there are of each (phase, row, stage)."""
    if not sliced.overlapped.any():
        return order.runs
    whole = np.flatnonzero(~sliced.overlapped)
    return runs_of(order.phase[whole], order.row[whole], order.stage[whole], len(step.rows), step.stages.count)
