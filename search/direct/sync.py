"""Collectives that buckets of parameters need: reductions, gathers with their FREEs, ties, and the norm."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from piper_core.ir.action import ActionKind
from piper_core.ir.dag import Ints
from piper_core.names import Phase, Sync
from piper_core.schedule.plan import CODE
from search.direct.draft import NO_USES, NONE, Draft, Uses
from search.direct.tariff import NOTHING
from search.generators.recipe import SHARED
from search.simulator.lower import COMM_KINDS, CommKind

REDUCE, GATHER, TIE, NORM = (COMM_KINDS.index(kind) for kind in
                             (CommKind.REDUCE, CommKind.GATHER, CommKind.TIE, CommKind.NORM))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reduced:
    """The last reduction of each bucket on each row that holds it, shape (n,): unit, bucket, row."""

    unit: Ints
    bucket: Ints
    row: Ints


@dataclass(frozen=True, slots=True)
class Synced:
    """What synchronises buckets: reductions of single microbatches, gathers for single uses and the ``first`` piece
    that takes what each brings, the last ``reduced`` of all; ``lines`` counts the communicators."""

    reductions: Uses
    gathers: Uses
    first: Ints
    reduced: Reduced
    lines: int


class _Syncs:
    """The buckets that more than one rank holds, and where their collectives run."""

    def __init__(self, draft: Draft) -> None:
        self.draft, self.step, self.order = draft, draft.step, draft.order
        self.zero, self.buckets = draft.step.config.zero, draft.step.buckets
        self.bucket = np.flatnonzero(draft.step.shared)
        self.part = np.arange(len(self.buckets)) / (2.0 * len(self.buckets) + 2.0)
        names = ("reduce", "gather") if draft.step.config.streams == "own" else (SHARED, SHARED)
        keys = [self._keys(name) for name in names[: 2 if self.zero else 1]]
        lines: dict[tuple[object, ...], int] = {}  # communicators in the order in which buckets first ask for them
        for each in zip(*keys, strict=True):
            for key in each:
                lines.setdefault(key, draft.order.hops.channels + len(lines))
        self.lines = [np.asarray([lines[key] for key in some], np.int64) for some in keys]
        self.queues = [draft.step.streams.index(name) * draft.width for name in names] if len(self.bucket) else [0, 0]
        self.count = len(lines)

    def _keys(self, name: str) -> list[tuple[object, ...]]:
        stage, expert = (column[self.bucket].tolist() for column in (self.buckets.stage, self.buckets.expert))
        rows = [tuple(sorted(rows)) for rows in self.step.rows_of]
        return [(rows[s], e, name) for s, e in zip(stage, expert, strict=True)]

    def holders(self) -> tuple[Ints, Ints]:
        """Return (which bucket, holder) for each row that holds one, bucket by bucket."""
        table = [self.order.holder[list(rows), s].tolist() for s, rows in enumerate(self.step.rows_of)]
        held = [table[s] for s in self.buckets.stage[self.bucket].tolist()]
        which = np.repeat(np.arange(len(held)), [len(some) for some in held])
        return which, np.asarray([h for some in held for h in some], np.int64)

    def reduce(self) -> tuple[Uses, Reduced]:
        """Add a reduction a step, or a microbatch under ZeRO-2/3."""
        draft, order, stage = self.draft, self.order, self.buckets.stage
        microbatch: Ints | int = -1
        which: Ints
        macro: Ints
        if self.zero >= 2:
            table = order.weight[stage[self.bucket]]
            which, macro = np.repeat(np.arange(len(table)), table.shape[1]), table.ravel()
            microbatch = order.microbatch[macro]
        else:
            which, holder = self.holders()
            macro = order.last[holder]
        bucket, row = self.bucket[which], order.row[macro]
        latest = draft.user(macro, bucket, "last")
        place = draft.macros.place[latest]
        if self.zero < 2:  # several rows meet at one place
            common = np.full(len(self.buckets), -np.inf)
            np.maximum.at(common, bucket, place)
            place = common[bucket]
        unit = draft.columns.add(
            len(macro), place + 0.5 + self.part[bucket], price=draft.prices.reduce + bucket,
            kind=CODE[ActionKind.REDUCE_SCATTER if self.zero else ActionKind.ALL_REDUCE], stage=stage[bucket],
            microbatch=microbatch, bucket=bucket, row=row, queue=self.queues[0], line=self.lines[0][which], comm=REDUCE,
        )  # fmt: skip
        draft.link(latest, unit)
        if self.zero < 2:
            return NO_USES, Reduced(unit, bucket, row)
        last = macro == order.last_of[stage[bucket]]
        uses = Uses(unit, draft.user(macro, bucket, "began"), bucket)
        return uses, Reduced(unit[last], bucket[last], row[last])

    def gather_once(self) -> None:
        """Add a gather at the head of the step (ZeRO-1/2)."""
        draft, order = self.draft, self.order
        which, holder = self.holders()
        macro, bucket = order.first[holder], self.bucket[which]
        user = draft.user(macro, bucket, "first")
        common = np.full(len(self.buckets), np.inf)
        np.minimum.at(common, bucket, draft.macros.place[user])
        unit = draft.columns.add(
            len(macro), common[bucket] + self.part[bucket], price=draft.prices.gather + bucket,
            kind=CODE[ActionKind.ALL_GATHER], stage=self.buckets.stage[bucket], bucket=bucket, row=order.row[macro],
            queue=self.queues[1], line=self.lines[1][which], comm=GATHER,
        )  # fmt: skip
        draft.link(unit, user)

    def gather_each(self) -> tuple[Uses, Ints]:
        """Add a gather for each forward and backward (ZeRO-3), and its FREE right after the last user."""
        draft, order, stage = self.draft, self.order, self.buckets.stage
        tables = [find[stage[self.bucket]] for find in (order.find[Phase.F], order.back)]
        which = np.tile(np.repeat(np.arange(len(self.bucket)), tables[0].shape[1]), 2)
        macro, bucket = np.concatenate([table.ravel() for table in tables]), self.bucket[which]
        common: dict[str, Ints | int] = {
            "stage": stage[bucket], "microbatch": order.microbatch[macro], "bucket": bucket, "row": order.row[macro],
        }  # fmt: skip
        verbs = CODE[ActionKind.ALL_GATHER_F], CODE[ActionKind.ALL_GATHER_B]
        first, last = draft.user(macro, bucket, "first"), draft.user(macro, bucket, "last")
        unit = draft.columns.add(
            len(macro), draft.macros.place[first] + self.part[bucket], price=draft.prices.gather + bucket,
            kind=np.where(order.phase[macro] == Phase.F, *verbs), queue=self.queues[1], line=self.lines[1][which],
            comm=GATHER, **common,
        )  # fmt: skip
        draft.link(unit, first)
        free = draft.columns.add(
            len(macro), draft.macros.place[last] + 0.25 + self.part[bucket] / 4, price=NOTHING,
            kind=CODE[ActionKind.FREE], **common,
        )  # fmt: skip
        return Uses(unit, free, bucket), first


def add_syncs(draft: Draft) -> Synced:
    """Add reductions and gathers of buckets, as ``passes.gradient_sync`` and ``schedule.lower`` do."""
    syncs = _Syncs(draft)
    if not len(syncs.bucket):
        return Synced(NO_USES, NO_USES, NONE, Reduced(NONE, NONE, NONE), syncs.count)
    reductions, reduced = syncs.reduce()
    gathers, first = NO_USES, np.asarray(NONE)
    if syncs.zero == 3:
        gathers, first = syncs.gather_each()
    elif syncs.zero:
        syncs.gather_once()
    draft.link(reduced.unit, draft.updates[draft.order.holder[reduced.row, draft.step.buckets.stage[reduced.bucket]]])
    return Synced(reductions, gathers, first, reduced, syncs.count)


def close_step(draft: Draft, synced: Synced, sync: Sync) -> None:
    """Add tie reductions and the norm, and what updates wait for, as ``passes.update`` does."""
    step, order, reduced = draft.step, draft.order, synced.reduced
    lines = order.hops.channels + synced.lines
    names: dict[str, int] = {}
    ties = [(tie, names.setdefault(tie.name, len(names))) for tie in step.ties]
    norm: Ints = NONE
    if sync is not Sync.NONE:
        norm = draft.columns.add(
            draft.rows, 0.0, price=draft.prices.norm, kind=CODE[ActionKind.NORM], stage=0, row=np.arange(draft.rows),
            queue=len(step.streams) * draft.width, line=lines + len(names), comm=NORM,
        )  # fmt: skip
        draft.link(draft.unit(order.end, "final"), norm)
        draft.link(reduced.unit, norm[reduced.row])
        if sync is Sync.GLOBAL_NORM:
            draft.link(norm[order.holder_row], draft.updates)
    for number, (tie, line) in enumerate(ties):
        row = step.rows_of[tie.stage][0]
        holder = order.holder[row : row + 1, tie.stage]
        unit = draft.columns.add(
            1, draft.end + step.stages.count, price=draft.prices.tie + number, kind=CODE[ActionKind.ALL_REDUCE],
            stage=tie.stage, bucket=tie.bucket, row=row, queue=0, line=lines + line, comm=TIE,
        )  # fmt: skip
        own = reduced.unit[reduced.bucket == tie.bucket]
        if tie.late:  # after the reductions of single microbatches
            draft.link(own, np.repeat(unit, len(own)))
        else:  # before its bucket's own
            draft.link(draft.user(order.last[holder], np.asarray([tie.bucket]), "last"), unit)
            draft.link(np.repeat(unit, len(own)), own)
        draft.link(unit, draft.updates[holder])
        if len(norm):
            draft.link(unit, norm[row : row + 1])
