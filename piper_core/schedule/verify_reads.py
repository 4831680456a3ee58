"""Data dependencies of a plan: what each action reads has happened before it, by waits, order and meetings alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from piper_core.names import Sync
from piper_core.schedule.plan import Part, Reduction
from piper_core.schedule.verify_table import (
    BI,
    BW,
    COMPUTE,
    FREE,
    INNER,
    NORM,
    REDUCES,
    SENDS,
    UPDATE,
    B,
    F,
    PlanTable,
    R,
)


def dependencies(table: PlanTable, partner: list[int], order: list[int]) -> None:
    """Check that every action's reads happen before it.

    First by what its stream waited for; where that does not show it, by everything that must have happened before,
    on any row. ``partner`` is the first of the actions that each meets, ``order`` a topological order of those.

    Raises:
        PlanError: ``data_dependency``; ``duplicate`` where a message comes twice.
    """
    reads, unknown = Reads(table, partner), list[tuple[int, int]]()
    for s in range(len(table.plan.streams)):
        known: dict[int, int] = {}
        for i in range(table.start[s], table.start[s + 1]):
            pending = table.waits[i]
            while pending:  # what a collective inside an opened macro waited for has happened too
                deeper: list[int] = []
                for w in pending:
                    t = table.stream[w]
                    if known.get(t, -1) < w:
                        known[t] = w
                        if table.kind[w] in INNER:
                            deeper += table.waits[w]
                pending = deeper
            for p in reads.of(i):
                t = table.stream[p]
                if (p >= i) if t == s else (known.get(t, -1) < p):
                    unknown.append((i, p))
    if unknown:
        column = {t: k for k, t in enumerate(sorted({table.stream[p] for _, p in unknown}))}
        before = happened_before(table, partner, order, column)
        for i, p in unknown:
            if before[i, column[table.stream[p]]] < p:
                what = f"{table.name(i)} on row {table.row[i]} does not wait for {table.name(p)}"
                raise table.error("data_dependency", what, [i, p])


def happened_before(
    table: PlanTable, partner: list[int], order: list[int], column: dict[int, int]
) -> NDArray[np.int32]:
    """Return, for each action and some streams, the last action of that stream that must have ended before it starts.

    Shape (actions, streams), -1 for none; ``column`` says which of them is where. Actions that meet end together, but
    each starts by itself.
    """
    n, streams = len(table.plan), table.stream
    meets: list[list[int]] = [[] for _ in range(n)]
    for i, p in enumerate(partner):
        meets[p].append(i)
    before = np.full((n, len(column)), -1, np.int32)
    ended = np.full((n, len(column)), -1, np.int32)
    for group in order:
        for i in meets[group]:
            into = [*table.waits[i], i - 1] if i > table.start[streams[i]] else table.waits[i]
            for a in into:
                np.maximum(before[i], ended[partner[a]], out=before[i])
            np.maximum(ended[group], before[i], out=ended[group])
        for i in meets[group]:
            if streams[i] in column:
                ended[group, column[streams[i]]] = i
    return before


class Reads:
    """What each action reads, as actions of its own row."""

    def __init__(self, table: PlanTable, partner: list[int]) -> None:
        self.table, self.plan, self.partner = table, table.plan, partner
        stages = len(self.plan.inputs)
        self.users: list[tuple[dict[int, list[int]], ...]] = [({}, {}, {}) for _ in range(stages)]
        self.heads: list[dict[int, list[int]]] = [{} for _ in range(stages)]
        for b, use in enumerate(self.plan.buckets):
            for k, labels in enumerate((use.forward, use.backward, use.again)):
                for label in labels:
                    (self.users[use.stage][k] if use.each_use else self.heads[use.stage]).setdefault(label, []).append(
                        b
                    )
        self.backwards: dict[tuple[int, int], list[int]] = {}
        self.row_reduces: dict[int, list[int]] = {}
        self.stage_reduces: dict[tuple[int, int], list[int]] = {}
        for (row, b, _), i in table.reduce.items():
            self.row_reduces.setdefault(row, []).append(i)
            self.stage_reduces.setdefault((row, self.plan.buckets[b].stage), []).append(i)
        for (row, b), ties in table.tie.items():
            self.row_reduces.setdefault(row, []).extend(ties)
            self.stage_reduces.setdefault((row, self.plan.buckets[b].stage), []).extend(ties)
        self.piece: dict[int, tuple[tuple[int, int, int, int], int]] = {}
        self.members: dict[tuple[int, int, int, int], list[int]] = {}
        for key, variant in table.variant.items():
            for position, i in enumerate(self._members(key, variant)):
                self.piece[i] = key, position
        self.turn: dict[tuple[int, int, int], list[int]] = {}
        for (row, when, b, microbatch), i in table.gather.items():
            if when is not None:
                self.turn.setdefault((row, b, microbatch), []).append(i)
        self.freed: dict[tuple[int, int, int], int] = {}

    def of(self, i: int) -> list[int]:
        """Return the actions that action i reads from.

        Raises:
            PlanError: ``data_dependency`` where there is none to read from, ``duplicate`` where there are too many.
        """
        table = self.table
        kind, stage, microbatch, row = table.kind[i], table.stage[i], table.microbatch[i], table.row[i]
        if kind in COMPUTE:
            if i not in self.piece:
                return self._own(i, kind) + self._incoming(i, kind) + self._buckets(i, kind, stage, microbatch)
            return self._piece(i) + self._buckets(i, kind, stage, microbatch)
        if kind in SENDS:
            made = self._output(table.lane[i], row, stage, (F,) if SENDS[kind] else (B, BI), microbatch)
            if not made:
                raise table.error(
                    "data_dependency", f"{table.name(i)} on row {row} sends what its row never makes", [i]
                )
            return made
        if kind in INNER:
            return self._piece(i)
        if kind in REDUCES:
            return self._gradients(i)
        if kind == UPDATE:
            need = [p for m in range(self.plan.microbatches) for p in self._last(i, stage, (B, BW), m)]
            need += self.stage_reduces.get((row, stage), [])
            return need + ([table.norm[row]] if self.plan.sync is Sync.GLOBAL_NORM else [])
        if kind == NORM:
            return self._weights(row) + self.row_reduces.get(row, [])
        if kind == FREE:
            at = row, table.bucket[i], microbatch
            self.freed[at] = self.freed.get(at, 0) + 1
            return self.turn.get(at, [])[self.freed[at] - 1 : self.freed[at]]
        return []

    def _piece(self, i: int) -> list[int]:
        """Return what a piece of an opened macro reads: other pieces, what comes in, what its stage has kept."""
        key, position = self.piece[i]
        variant, kind = self.table.variant[key], key[2]
        members = self._members(key, variant)
        part = variant[position]
        need = [members[j] for j in part.reads] + self._own(i, kind)
        return need + self._incoming(i, kind) if part.takes else need

    def _own(self, i: int, kind: int) -> list[int]:
        """Return what action i, of a macro of this kind, reads of its own stage: F and, for compute, R."""
        stage, microbatch = self.table.stage[i], self.table.microbatch[i]
        if kind == F:
            return []
        need = self._last(i, stage, (F,), microbatch)
        again = kind in (B, BI) and self.table.kind[i] not in INNER
        return need + self._last(i, stage, (R,), microbatch) if again else need

    def _incoming(self, i: int, kind: int) -> list[int]:
        """Return what other stages hand to the macro of action i; for BW, what BI does."""
        table, stage, microbatch = self.table, self.table.stage[i], self.table.microbatch[i]
        if kind == BW:
            return self._last(i, stage, (BI,), microbatch)
        if kind == R:
            return []
        need: list[int] = []
        forward = kind == F
        remote: list[int] = []
        for other in self.plan.inputs[stage] if forward else table.outputs[stage]:
            local = self._output(table.lane[i], table.row[i], other, (F,) if forward else (B, BI), microbatch)
            need += local
            if not local:
                remote.append(other)
        messages = table.recv.get((table.row[i], forward, stage, microbatch), [])
        if len(messages) != len(remote) or (len(remote) > 1 and sorted(self._sources(messages)) != sorted(remote)):
            reason = "data_dependency" if len(messages) <= len(remote) else "duplicate"
            what = f"{table.name(i)} on row {table.row[i]} has {len(messages)} messages to read from, of {len(remote)}"
            raise table.error(reason, what, [i, *messages])
        return need + messages

    def _sources(self, messages: list[int]) -> list[int]:
        return [self.table.stage[self.partner[message]] for message in messages]

    def _buckets(self, i: int, kind: int, stage: int, microbatch: int) -> list[int]:
        """Return the gathers that put together the parameters that action i uses."""
        table = self.table
        which = 0 if kind == F else 1 if kind in (B, BI) else 2
        if kind == BW or not self.plan.buckets:
            return []
        need: list[int] = []
        row, label = table.row[i], table.label[i]
        keys: list[tuple[int, bool | None, int, int]]
        keys = [(row, kind == F, b, microbatch) for b in self.users[stage][which].get(label, ())]
        if kind == F:
            keys += [(row, None, b, -1) for b in self.heads[stage].get(label, ())]
        for key in keys:
            if key not in table.gather:
                what = f"{table.name(i)} on row {row} reads bucket {key[2]}, which is not gathered for it"
                raise table.error("data_dependency", what, [i])
            need.append(table.gather[key])
        return need

    def _members(self, key: tuple[int, int, int, int], variant: tuple[Part, ...]) -> list[int]:
        """Return the actions of an opened macro, in the order of its cut (kept)."""
        if key not in self.members:
            table = self.table
            computes = iter(table.at[key])
            row = table.row[table.at[key][0]]
            self.members[key] = [
                table.inner[row, key[1], part.label, key[3]] if part.inner else next(computes)
                for part in variant
            ]  # fmt: skip
        return self.members[key]

    def _last(self, i: int, stage: int, kinds: tuple[int, ...], microbatch: int) -> list[int]:
        """Return the last piece of (stage, one of kinds, microbatch) when it is on the row of action i."""
        for kind in kinds:
            found = self.table.at.get((self.table.lane[i], stage, kind, microbatch))
            if found:
                return [found[-1]] if self.table.row[found[-1]] == self.table.row[i] else []
        return []

    def _output(self, lane: int, row: int, stage: int, kinds: tuple[int, ...], microbatch: int) -> list[int]:
        """Return the pieces that make what a stage hands on, when they are on a row."""
        for kind in kinds:
            key = lane, stage, kind, microbatch
            found = self.table.at.get(key)
            if found:
                if self.table.row[found[-1]] != row:
                    return []
                variant = self.table.variant.get(key)
                if variant is None:
                    return [found[-1]]
                members = self._members(key, variant)
                return [found[-1], *(m for m, part in zip(members, variant, strict=True) if part.inner and part.gives)]
        return []

    def _gradients(self, i: int) -> list[int]:
        """Return what a reduction sums: weight gradients of one microbatch or of all, and where they are tied, either
        the tied sum (before a reduction of the whole step) or all reductions (after those of each microbatch)."""
        table = self.table
        bucket, microbatch, row = table.bucket[i], table.microbatch[i], table.row[i]
        use = self.plan.buckets[bucket]
        tie = table.is_tie(i)
        if tie and use.reduction is Reduction.EACH:
            return [j for (r, b, _), j in table.reduce.items() if r == row and b == bucket]
        need: list[int] = [] if tie else list(table.tie.get((row, bucket), ()))
        if use.reduction is Reduction.EACH:
            need = []
        if microbatch < 0:
            found = self._backwards(table.lane[i], use.stage)
        else:
            found = [p for kind in (B, BW) for p in table.at.get((table.lane[i], use.stage, kind, microbatch), ())]
        need += [p for p in found if table.row[p] == row and table.label[p] in use.weight]
        return need

    def _backwards(self, lane: int, stage: int) -> list[int]:
        """Return all whole and weight backwards of a stage (kept: each of its buckets asks)."""
        if (lane, stage) not in self.backwards:
            keys = [(lane, stage, kind, m) for m in range(self.plan.microbatches) for kind in (B, BW)]
            self.backwards[lane, stage] = [p for key in keys for p in self.table.at.get(key, ())]
        return self.backwards[lane, stage]

    def _weights(self, row: int) -> list[int]:
        """Return the last weight gradient of a row."""
        table = self.table
        found = [p for (_, _, kind, _), at in table.at.items() if kind in (B, BW) for p in at if table.row[p] == row]
        return [max(found)] if found else []
