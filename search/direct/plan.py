"""The plan of a step under an order: the same actions, streams and waits as ``schedule.lower`` finds in its DAG.

Units are numbered as they are made: pieces of compute row by row, then updates, communication, FREEs. ``place`` orders
them on their streams, as ``schedule.streams`` has it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from piper_core.ir.action import ActionKind
from piper_core.ir.dag import Floats, Ints
from piper_core.names import Collective, Phase, Sync
from piper_core.schedule.plan import CODE, BucketUse, Plan, Reduction, Stream, StreamKind
from search.direct.groups import everyone
from search.direct.order import Order
from search.direct.prices import Prices
from search.direct.shape import Step
from search.direct.units import VARIANTS, Columns, Macros, Messages, Table, Uses, macros_of, table_of
from search.direct.waits import least
from search.generators.recipe import SHARED
from search.simulator.lower import COMM_KINDS, ActionSeconds, CommKind

LOOK_AHEAD = 1
_AT = {kind: i for i, kind in enumerate(COMM_KINDS)}
_NONE = np.zeros(0, np.int64)
_NO_USE = BucketUse(0, False, Reduction.NONE, (), (), (), ())


@dataclass(frozen=True, slots=True)
class Built:
    """A plan without what no simulation reads (labels, parts, lines, uses of buckets), the seconds of its actions, and
    what memory needs: ``rank`` is the action of each unit."""

    step: Step
    order: Order
    table: Table
    macros: Macros
    plan: Plan
    seconds: ActionSeconds
    rank: Ints
    messages: Messages
    gathers: Uses
    reductions: Uses


class _Builder:
    """One plan being built."""

    def __init__(self, step: Step, order: Order, prices: Prices, sync: Sync) -> None:
        self.step, self.order, self.prices, self.sync = step, order, prices, sync
        self.table = table_of(step)
        self.macros = macros_of(step, order, self.table)
        self.columns, self.edges = Columns(), list[tuple[Ints, Ints]]()
        self.rows, self.names = len(step.rows), step.streams
        self.shared = np.flatnonzero(step.shared)
        self.part = np.arange(len(step.buckets)) / (2.0 * len(step.buckets) + 2.0)
        self.lines: dict[tuple[object, ...], int] = {}
        self.channels = 0
        self.reduce_name, self.gather_name = ("reduce", "gather") if step.config.streams == "own" else (SHARED, SHARED)
        self.first_user = self.reduce_bucket = self.reduce_row = _NONE

    def build(self) -> Built:
        self.compute()
        updates = self.updates()
        messages = self.messages()
        reductions, reduced = self.reduce()
        gathers = self.gather()
        self.close(updates, reduced)
        return self.finish(messages, gathers, reductions)

    def unit(self, macro: Ints, what: str) -> Ints:
        """Return the unit of one piece of each macro: that of its stage which a column of the table names."""
        local = getattr(self.table, what)[self.order.phase[macro], self.macros.variant[macro], self.order.stage[macro]]
        return np.asarray(self.macros.base[macro] + local)

    def user(self, macro: Ints, bucket: Ints, what: str) -> Ints:
        """Return the unit of the piece of each macro that uses a bucket ``first`` or ``last``."""
        local = getattr(self.table, what)[self.order.phase[macro], self.macros.variant[macro], bucket]
        return np.asarray(self.macros.base[macro] + local)

    def link(self, src: Ints, dst: Ints) -> None:
        self.edges.append((np.asarray(src), np.asarray(dst)))

    # compute -------------------------------------------------------------------------------------------------------

    def compute(self) -> None:
        order, macros = self.order, self.macros
        at, piece, table = macros.macro, macros.piece, self.table
        self.columns.add(
            len(at), kind=table.code[piece], stage=order.stage[at], microbatch=order.microbatch[at],
            row=order.row[at], queue=table.queue[piece], comm=table.comm[piece], place=macros.place,
            seconds=table.column("seconds")[piece],
        )  # fmt: skip
        self.furthest = float(macros.place.max()) + 2

        if self.step.overlapped.any():
            self.opened()

    def opened(self) -> None:
        """Link the pieces of opened macro actions, and what forwards and their last pieces keep for them."""
        order, base, table = self.order, self.macros.base, self.table
        members = np.flatnonzero(self.step.overlapped)
        key = (order.phase[members] * VARIANTS + self.macros.variant[members]) * len(self.step.rows_of) + order.stage[
            members
        ]
        by = np.argsort(key, kind="stable")
        starts = np.flatnonzero(np.diff(key[by], prepend=-1))
        for mine in np.split(members[by], starts[1:]):
            phase, stage = Phase(int(order.phase[mine[0]])), int(order.stage[mine[0]])
            found = table.sets[phase][int(self.macros.variant[mine[0]])].opened[stage]
            assert found is not None
            for u, v in found.edges:
                self.link(base[mine] + u, base[mine] + v)
            if not (found.saved or found.kept):
                continue
            forward = order.find[Phase.F, stage, order.microbatch[mine]]
            low, high = self.step.stages.ends[stage], self.step.stages.ends[stage + 1]
            for chunk, piece in (*((low + c, p) for c, p in found.saved), *((high - 1, p) for p in found.kept)):
                self.link(base[forward] + table.forward[self.macros.variant[forward], chunk], base[mine] + piece)

    def updates(self) -> Ints:
        stage = self.order.holder_stage
        return self.columns.add(
            len(stage), kind=CODE[ActionKind.UPDATE], stage=stage, row=self.order.holder_row,
            place=self.furthest + stage, seconds=self.step.update[stage],
        )  # fmt: skip

    # messages ------------------------------------------------------------------------------------------------------

    def messages(self) -> Messages:
        """Add a send and a receive wherever data goes from row to row."""
        order, macros, rows = self.order, self.macros, self.rows
        ends = [
            (find[a].ravel(), find[b].ravel(), forward)
            for find, forward, a, b in (
                (order.find[Phase.F], True, slice(None, -1), slice(1, None)),
                (order.back, False, slice(1, None), slice(None, -1)),
            )
        ]
        source = np.concatenate([each[0] for each in ends])
        target = np.concatenate([each[1] for each in ends])
        forward = np.repeat([True, False], len(ends[0][0]))
        apart = order.row[source] != order.row[target]
        self.link(self.unit(source[~apart], "leave"), self.unit(target[~apart], "enter"))
        source, target, forward = source[apart], target[apart], forward[apart]
        producer, consumer = self.unit(source, "leave"), self.unit(target, "enter")
        a, b = order.row[source], order.row[target]
        boundary = np.where(forward, order.stage[source], order.stage[target])
        key = (boundary.astype(np.int64) * rows + a) * rows + b
        some, first, inverse = np.unique(key, return_index=True, return_inverse=True)
        bytes_ = self.step.message_bytes[boundary]
        mesh, ranks = self.step.mesh, self.step.rows
        price = [self.prices.send(float(bytes_[i]), mesh, ranks, int(a[i]), int(b[i])) for i in first.tolist()]
        seconds = np.asarray(price)[inverse] if len(some) else np.zeros(0)
        back = np.where(forward, 0, 1)
        mark = np.zeros(rows * rows * 2 + 1, np.int32)
        channel = (a.astype(np.int64) * rows + b) * 2 + back
        mark[channel] = 1
        line = (np.cumsum(mark) - 1)[channel]
        self.channels = int(mark.sum())
        place, n = macros.place[consumer], len(source)

        def queue(peer: Ints, kind: StreamKind) -> Ints:
            return (int(kind) * (len(self.names) + 1)) * (2 * rows + 2) + peer * 2 + back

        common = {"microbatch": order.microbatch[source], "line": line, "comm": _AT[CommKind.PIPELINE],
                  "place": place, "seconds": seconds}  # fmt: skip
        verbs = [np.where(forward, CODE[ActionKind(f"{v}_F")], CODE[ActionKind(f"{v}_B")]) for v in ("SEND", "RECV")]
        send = self.columns.add(
            n, kind=verbs[0], stage=order.stage[source], row=a, queue=queue(b, StreamKind.SEND), **common
        )
        recv = self.columns.add(
            n, kind=verbs[1], stage=order.stage[target], row=b, queue=queue(a, StreamKind.RECV), **common
        )
        self.link(producer, send)
        self.link(recv, consumer)
        return Messages(send, recv, producer, consumer, bytes_, forward)

    # buckets -------------------------------------------------------------------------------------------------------

    def queue(self, name: str) -> int:
        return self.names.index(name) * (2 * self.rows + 2)

    def lines_of(self, name: str) -> Ints:
        """Return the communicator of each synchronised bucket on a queue."""
        return np.asarray([self.lines[key] for key in self._line_keys(name)], np.int64)

    def _line_keys(self, name: str) -> list[tuple[object, ...]]:
        buckets, rows_of = self.step.buckets, self.step.rows_of
        pairs = zip(buckets.stage[self.shared].tolist(), buckets.expert[self.shared].tolist(), strict=True)
        return [(tuple(sorted(rows_of[stage])), expert, name) for stage, expert in pairs]

    def number_lines(self) -> None:
        """Number the communicators in the order in which buckets first ask for them."""
        config = self.step.config
        if not len(self.shared):
            return
        keys = [self._line_keys(self.reduce_name)] + ([self._line_keys(self.gather_name)] if config.zero else [])
        for each in zip(*keys, strict=True):
            for key in each:
                self.lines.setdefault(key, self.channels + len(self.lines))

    def reduce(self) -> tuple[Uses, Ints]:
        """Add the reductions; return those of single microbatches, and the last one of each bucket on each row."""
        self.number_lines()
        step, order, macros, buckets, shared = self.step, self.order, self.macros, self.step.buckets, self.shared
        empty = Uses(_NONE, _NONE, np.zeros(0))
        if not len(shared):
            return empty, _NONE
        zero, stage = step.config.zero, buckets.stage
        line = self.lines_of(self.reduce_name)
        kind = CODE[ActionKind.REDUCE_SCATTER if zero else ActionKind.ALL_REDUCE]
        if zero >= 2:
            macro = order.weight[stage[shared]]  # (buckets, microbatches)
            which = np.repeat(np.arange(len(shared)), macro.shape[1])
            macro, bucket = macro.ravel(), shared[which]
            microbatch = order.microbatch[macro]
        else:
            which, holder = self._holders()
            macro, bucket, microbatch = order.last[holder], shared[which], np.full(len(holder), -1)
        latest = self.user(macro, bucket, "last")
        place = macros.place[latest]
        if zero < 2:  # several rows meet at one place
            common = np.full(len(buckets), -np.inf)
            np.maximum.at(common, bucket, place)
            place = common[bucket]
        unit = self.columns.add(
            len(macro), kind=kind, stage=stage[bucket], microbatch=microbatch, bucket=bucket, row=order.row[macro],
            queue=self.queue(self.reduce_name), line=line[which], comm=_AT[CommKind.REDUCE],
            place=place + 0.5 + self.part[bucket], seconds=step.sync.reduce[bucket],
        )  # fmt: skip
        self.link(latest, unit)
        self.reduce_bucket, self.reduce_row = bucket, order.row[macro]
        if zero < 2:
            return empty, unit
        began = self.user(macro, bucket, "began")
        last = macro == order.last_of[stage[bucket]]
        self.reduce_bucket, self.reduce_row = bucket[last], self.reduce_row[last]
        return Uses(unit, began, step.sync.reduce_bytes[bucket]), unit[last]

    def _holders(self) -> tuple[Ints, Ints]:
        """Return (which synchronised bucket, holder) for each row that holds one, bucket by bucket."""
        stage = self.step.buckets.stage[self.shared]
        table = [self.order.holder[list(rows), s].tolist() for s, rows in enumerate(self.step.rows_of)]
        held = [table[s] for s in stage.tolist()]
        which = np.repeat(np.arange(len(held)), [len(some) for some in held])
        return which, np.asarray([h for some in held for h in some], np.int64)

    def gather(self) -> Uses:
        """Add the gathers; return those for single uses, each with its FREE, right after its last user."""
        step, order, macros, buckets, shared = self.step, self.order, self.macros, self.step.buckets, self.shared
        zero = step.config.zero
        empty = Uses(_NONE, _NONE, np.zeros(0))
        if not len(shared) or not zero:
            return empty
        stage, line, queue = buckets.stage, self.lines_of(self.gather_name), self.queue(self.gather_name)
        if zero < 3:
            which, holder = self._holders()
            macro, bucket = order.first[holder], shared[which]
            user = self.user(macro, bucket, "first")
            place = macros.place[user]
            common = np.full(len(buckets), np.inf)
            np.minimum.at(common, bucket, place)
            unit = self.columns.add(
                len(macro), kind=CODE[ActionKind.ALL_GATHER], stage=stage[bucket], bucket=bucket,
                row=order.row[macro], queue=queue, line=line[which], comm=_AT[CommKind.GATHER],
                place=common[bucket] + self.part[bucket], seconds=step.sync.gather[bucket],
            )  # fmt: skip
            self.link(unit, user)
            return empty
        ahead = order.find[Phase.F][stage[shared]], order.back[stage[shared]]
        which = np.tile(np.repeat(np.arange(len(shared)), ahead[0].shape[1]), 2)
        macro, bucket = np.concatenate([each.ravel() for each in ahead]), shared[which]
        phase, user = order.phase[macro], self.user(macro, bucket, "first")
        unit = self.columns.add(
            len(macro), kind=np.where(phase == Phase.F, CODE[ActionKind.ALL_GATHER_F], CODE[ActionKind.ALL_GATHER_B]),
            stage=stage[bucket], microbatch=order.microbatch[macro], bucket=bucket, row=order.row[macro], queue=queue,
            line=line[which], comm=_AT[CommKind.GATHER], place=macros.place[user] + self.part[bucket],
            seconds=step.sync.gather[bucket],
        )  # fmt: skip
        self.link(unit, user)
        self.first_user = user
        last = self.user(macro, bucket, "last")
        free = self.columns.add(
            len(macro), kind=CODE[ActionKind.FREE], stage=stage[bucket], microbatch=order.microbatch[macro],
            bucket=bucket, row=order.row[macro],
            place=macros.place[last] + 0.25 + self.part[bucket] / 4, seconds=0.0,
        )  # fmt: skip
        return Uses(unit, free, step.sync.gather_bytes[bucket])

    # the end of the step -------------------------------------------------------------------------------------------

    def close(self, updates: Ints, reduced: Ints) -> None:
        """Add tie reductions and the norm, and what updates wait for; ``reduced`` are the last reductions."""
        order, bucket = self.order, self.reduce_bucket
        stage, row = self.step.buckets.stage[bucket], self.reduce_row
        self.link(reduced, updates[order.holder[row, stage]])
        norm = _NONE
        if self.sync is not Sync.NONE:
            rows = np.arange(self.rows)
            ranks = sum(map(len, self.step.rows))
            seconds = self.prices.collective(Collective.ALL_REDUCE, 4.0, everyone(ranks, self.prices.gpus_per_node))
            ties = len({tie.name for tie in self.step.ties})
            norm = self.columns.add(
                self.rows, kind=CODE[ActionKind.NORM], stage=0, row=rows,
                queue=len(self.names) * (2 * self.rows + 2), line=self.channels + len(self.lines) + ties,
                comm=_AT[CommKind.NORM], place=0.0, seconds=seconds,
            )  # fmt: skip
            self.link(self.unit(order.end, "final"), norm)
            self.link(reduced, norm[row])
            if self.sync is Sync.GLOBAL_NORM:
                self.link(norm[order.holder_row], updates)
        self.ties(updates, reduced, norm)

    def ties(self, updates: Ints, reduced: Ints, norm: Ints) -> None:
        """Add the all_reduce of each copy of tied parameters: before its bucket's reduction, or after the last one of
        single microbatches."""
        order, names = self.order, dict[str, int]()
        for tie in self.step.ties:
            row = self.step.rows_of[tie.stage][0]
            holder = int(order.holder[row, tie.stage])
            line = self.channels + len(self.lines) + names.setdefault(tie.name, len(names))
            unit = self.columns.add(
                1, kind=CODE[ActionKind.ALL_REDUCE], stage=tie.stage, bucket=tie.bucket, row=row,
                queue=0, line=line, comm=_AT[CommKind.TIE], place=self.furthest + self.step.stages.count,
                seconds=tie.seconds,
            )  # fmt: skip
            own = reduced[self.reduce_bucket == tie.bucket]
            if tie.late:
                self.link(own, np.repeat(unit, len(own)))
            else:
                macro = order.last[holder : holder + 1]
                self.link(self.user(macro, np.asarray([tie.bucket]), "last"), unit)
                self.link(np.repeat(unit, len(own)), own)
            self.link(unit, updates[holder : holder + 1])
            if len(norm):
                self.link(unit, norm[row : row + 1])

    # together ------------------------------------------------------------------------------------------------------

    def finish(self, messages: Messages, gathers: Uses, reductions: Uses) -> Built:
        """Put every unit on its stream, and say what it waits for."""
        columns = self.columns.finish()
        stream, streams = self.streams(columns["row"], columns["queue"])
        by = np.lexsort((columns["place"], stream))
        rank = np.empty(len(by), np.int64)
        rank[by] = np.arange(len(by))
        made = {name: columns[name][by] for name in ("kind", "stage", "microbatch", "bucket", "line")}
        stream = stream[by]
        edges = [(rank[src], rank[dst]) for src, dst in self.edges]
        edges += [self.receives(messages, stream, rank), self.prefetches(gathers, stream, rank)]
        wait_start, waits = least(*(np.concatenate(side) for side in zip(*edges, strict=True)), stream)
        start = np.zeros(len(streams) + 1, np.int32)
        start[1:] = np.cumsum(np.bincount(stream, minlength=len(streams)))
        plan = Plan(
            rows=self.step.rows, microbatches=self.step.config.num_microbatches,
            inputs=((),) * self.step.stages.count, streams=streams, lines=(), labels=(),
            buckets=(_NO_USE,) * len(self.step.buckets), start=start, label=np.full(len(by), -1, np.int32),
            wait_start=wait_start, waits=waits, sync=self.sync, **made,
        )  # fmt: skip
        found = ActionSeconds(columns["seconds"][by], columns["comm"][by], self.inner(), self.update_seconds())
        return Built(
            self.step, self.order, self.table, self.macros, plan, found, rank, messages, gathers, reductions
        )  # fmt: skip

    def streams(self, row: Ints, queue: Ints) -> tuple[Ints, tuple[Stream, ...]]:
        """Return the stream of each unit, and the streams: one compute stream a row first."""
        rows, width = self.rows, 2 * self.rows + 2
        size = 3 * (len(self.names) + 1) * width
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
            rest, tail = divmod(rest, width)
            kind, name = divmod(rest, len(self.names) + 1)
            if kind == StreamKind.COMPUTE:
                table.append(Stream(r, StreamKind.COLLECTIVE, (*self.names, "norm")[name]))
            else:
                peer, back = divmod(tail, 2)
                text = f"send>{peer}" if kind == StreamKind.SEND else f"recv<{peer}"
                table.append(Stream(r, StreamKind(kind), f"{text}.{'FB'[back]}"))
        return stream, tuple(table)

    def receives(self, messages: Messages, stream: Ints, rank: Ints) -> tuple[Ints, Ints]:
        """A receive is posted when the consumer ``LOOK_AHEAD`` + 1 before its own has ended."""
        by = np.argsort(rank[messages.recv])
        recv, consumer = rank[messages.recv][by], rank[messages.consumer][by]
        gap = LOOK_AHEAD + 1
        later, earlier, user = recv[gap:], recv[:-gap], consumer[:-gap]
        same = stream[later] == stream[earlier]
        return user[same], later[same]

    def prefetches(self, gathers: Uses, stream: Ints, rank: Ints) -> tuple[Ints, Ints]:
        """A gather starts when compute is about to use the one ``prefetch`` before it."""
        if not len(gathers.unit):
            return _NONE, _NONE
        by = np.argsort(rank[gathers.unit])
        gather, user = rank[gathers.unit][by], rank[self.first_user][by]
        ahead = self.step.config.prefetch
        later, earlier, target = gather[ahead:], gather[:-ahead], user[:-ahead]
        first = np.zeros(int(stream.max()) + 1, np.int64)
        first[1:] = np.cumsum(np.bincount(stream))[:-1]
        ok = (stream[later] == stream[earlier]) & (target - 1 >= first[stream[target]])
        return target[ok] - 1, later[ok]

    def inner(self) -> Floats:
        """Return the seconds a step of collectives inside compute actions, shape (rows, kinds)."""
        order, stages = self.order, self.step.stages.count
        found = np.zeros((self.rows, len(COMM_KINDS)))
        for phase, seconds in self.step.inner.items():
            mine = (order.phase == phase) & ~self.step.overlapped
            cell = order.row[mine].astype(np.int64) * stages + order.stage[mine]
            found += np.bincount(cell, minlength=self.rows * stages).reshape(self.rows, stages) @ seconds
        return found

    def update_seconds(self) -> Floats:
        """Return the seconds of each row's updates."""
        order = self.order
        weights = self.step.update[order.holder_stage]
        return np.bincount(order.holder_row, weights=weights, minlength=self.rows)


def build(step: Step, order: Order, prices: Prices, sync: Sync) -> Built:
    """Return the plan of a step under an order, with the seconds of its actions."""
    return _Builder(step, order, prices, sync).build()
