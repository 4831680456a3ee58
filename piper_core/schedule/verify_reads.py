"""What each action of a plan reads."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np

from piper_core.ir.dag import Ints, Mask, among
from piper_core.names import Sync
from piper_core.schedule.plan import KINDS, Part, Reduction
from piper_core.schedule.verify_table import (
    BI,
    BW,
    COMPUTE,
    FREE,
    NORM,
    REDUCES,
    SENDS,
    UPDATE,
    B,
    F,
    PlanTable,
    R,
)


class Reads:
    """What each action reads, as actions of its own row.

    Per action, shape (A,): ``macro`` is the kind of the macro action that it is of (-1: none), ``takes`` whether it
    takes what other stages hand to that, ``inside`` whether it reads others of its macro. ``alone`` says whether a
    piece is on another row than its stage's forward. ``last[lane, stage, kind, microbatch]`` is the last piece of each
    macro action (-1: none), ``cuts`` are those that the opened ones of a (stage, kind) follow.
    """

    def __init__(self, table: PlanTable, partner: list[int]) -> None:
        self.table, self.plan, self.partner = table, table.plan, partner
        stages = len(self.plan.inputs)
        self.users: list[tuple[dict[int, list[int]], ...]] = [({}, {}, {}) for _ in range(stages)]
        self.heads: list[dict[int, list[int]]] = [{} for _ in range(stages)]
        for b, use in enumerate(self.plan.buckets):
            for k, labels in enumerate((use.forward, use.backward, use.again)):
                for label in labels:
                    held = self.users[use.stage][k] if use.each_use else self.heads[use.stage]
                    held.setdefault(label, []).append(b)
        self.backwards: dict[tuple[int, int], list[int]] = {}
        self.row_reduces: dict[int, list[int]] = {}
        self.stage_reduces: dict[tuple[int, int], list[int]] = {}
        for (row, b, _), i in table.reduce.items():
            self.row_reduces.setdefault(row, []).append(i)
            self.stage_reduces.setdefault((row, self.plan.buckets[b].stage), []).append(i)
        for (row, b), ties in table.tie.items():
            self.row_reduces.setdefault(row, []).extend(ties)
            self.stage_reduces.setdefault((row, self.plan.buckets[b].stage), []).extend(ties)
        self.turn: dict[tuple[int, int, int], list[int]] = {}
        for (row, when, b, microbatch), i in table.gather.items():
            if when is not None:
                self.turn.setdefault((row, b, microbatch), []).append(i)
        self.freed: dict[tuple[int, int, int], int] = {}
        self.row = np.asarray(table.row)
        self.compute = among(self.plan.kind, tuple(COMPUTE))
        self.macro = np.where(self.compute, self.plan.kind, -1)
        self.takes, self.inside = self.compute.copy(), np.zeros(len(self.plan), np.bool_)
        self.alone = False
        lanes = max(self.plan.lanes, default=0) + 1
        self.last = np.full((lanes, stages, len(KINDS), self.plan.microbatches), -1, np.int32)
        self.last[tuple(np.asarray(list(table.at), np.int32).reshape(-1, 4).T)] = [
            found[-1] for found in table.at.values()
        ]
        self.cuts: dict[tuple[int, int], list[tuple[Part, ...]]] = {}

    def pairs(self) -> tuple[Ints, Ints]:
        """Return (who reads, from whom); what one action reads is in order.

        Raises:
            PlanError: ``data_dependency`` where there is none to read from, ``duplicate`` where there are too many.
        """
        found = [*self._pieces(), *self._own(), self._rest()]
        reader, read = (np.concatenate(side) for side in zip(*found, strict=True))
        return reader, read

    def _pieces(self) -> Iterator[tuple[Ints, Ints]]:
        """Yield what the pieces of opened macros read of each other, those of one cut at once."""
        alike: dict[tuple[int, int, int], tuple[tuple[Part, ...], list[list[int]]]] = {}
        for key, cut in self.table.variant.items():
            alike.setdefault((key[1], key[2], id(cut)), (cut, []))[1].append(self.table.members[key])
        for (stage, kind, _), (cut, macros) in alike.items():
            members = np.asarray(macros, np.int32)
            self.cuts.setdefault((stage, kind), []).append(cut)
            self.macro[members], self.takes[members] = kind, [part.takes for part in cut]
            self.inside[members] = [bool(part.reads) for part in cut]
            reader = [k for k, part in enumerate(cut) for _ in part.reads]
            yield members[:, reader].ravel(), members[:, [j for part in cut for j in part.reads]].ravel()

    def _own(self) -> Iterator[tuple[Ints, Ints]]:
        """Yield what macros read of their own stage: F and, for compute of a backward, R."""
        plan, row, lane = self.plan, self.row, np.asarray(self.table.lane)
        again = among(self.macro, (B, BI)) & self.compute
        for kind, mask in ((F, (self.macro >= 0) & (self.macro != F)), (R, again)):
            user = np.flatnonzero(mask)
            read = self.last[lane[user], plan.stage[user], kind, plan.microbatch[user]]
            here = (read >= 0) & (row[read] == row[user])
            self.alone |= kind == F and not here.all()
            yield user[here], read[here]

    def _rest(self) -> tuple[Ints, Ints]:
        """Return what comes from other stages and goes to them, gathers, reductions, and the end of the step."""
        plan, width = self.plan, len(self.plan.labels) + 1
        looks = self.takes | among(plan.kind, (*SENDS, *REDUCES, UPDATE, NORM, FREE))
        for kind, which in ((F, 0), (B, 1), (BI, 1), (R, 2)):
            heads = self.heads if kind == F else [()] * plan.stages
            labels = [(*users[which], *more) for users, more in zip(self.users, heads, strict=True)]
            used = [stage * width + label for stage, of_stage in enumerate(labels) for label in of_stage]
            looks |= (plan.kind == kind) & np.isin(plan.stage.astype(np.int64) * width + plan.label, used)
        reader = np.flatnonzero(looks)
        read = [self._of(i) for i in reader.tolist()]
        return np.repeat(reader, list(map(len, read))), np.fromiter(chain.from_iterable(read), np.int32)

    def implied(self, reader: Ints, read: Ints) -> Mask:
        """Return which reads follow from all the others: some of those of the forward of the reader's own stage.

        Another piece of its macro that it reads has read that too. Or what a backward takes is of the backward of the
        next stage, which has read its own forward, and that has taken what this stage's forward gave: where the next
        stage is the only one, is fed by no other, and its forward does not end without what it takes.
        """
        plan, table = self.plan, self.table
        found = np.zeros(len(reader), np.bool_)
        if self.alone or plan.lanes:
            return found
        chained = np.zeros(plan.stages, np.bool_)
        for stage, later in enumerate(table.outputs):
            if len(later) == 1 and plan.inputs[later[0]] == (stage,):
                chained[stage] = all(map(_ends_with_taken, self.cuts.get((later[0], F), ())))
        piece = np.flatnonzero(self.macro[reader] >= 0)
        user, macro = reader[piece], self.macro[reader[piece]]
        own = self.last[0, plan.stage[user], F, plan.microbatch[user]] == read[piece]
        backward = among(macro, (B, BI)) & self.takes[user] & chained[plan.stage[user]]
        found[piece] = own & (macro != F) & (self.inside[user] | backward)
        return found

    def _of(self, i: int) -> list[int]:
        """Return what action i reads from other macros, and from others than macros."""
        table = self.table
        kind, stage, microbatch, row = table.kind[i], table.stage[i], table.microbatch[i], table.row[i]
        macro = int(self.macro[i])
        if macro >= 0:
            need = self._incoming(i, macro) if self.takes[i] else []
            return need + self._buckets(i, kind, stage, microbatch) if kind in COMPUTE else need
        if kind in SENDS:
            made = self._output(table.lane[i], row, stage, (F,) if SENDS[kind] else (B, BI), microbatch)
            if not made:
                raise table.error(
                    "data_dependency", f"{table.name(i)} on row {row} sends what its row never makes", [i]
                )
            return made
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

    def _last(self, i: int, stage: int, kinds: tuple[int, ...], microbatch: int) -> list[int]:
        """Return the last piece of (stage, one of kinds, microbatch) when it is on the row of action i."""
        for kind in kinds:
            found = self.table.at.get((self.table.lane[i], stage, kind, microbatch))
            if found:
                return [found[-1]] if self.table.row[found[-1]] == self.table.row[i] else []
        return []

    def _output(self, lane: int, row: int, stage: int, kinds: tuple[int, ...], microbatch: int) -> list[int]:
        """Return the pieces that make what a stage hands on, when they are on a row."""
        table = self.table
        for kind in kinds:
            key = lane, stage, kind, microbatch
            found = table.at.get(key)
            if found:
                if table.row[found[-1]] != row:
                    return []
                variant = table.variant.get(key)
                if variant is None:
                    return [found[-1]]
                members = table.members[key]
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
        found: list[int] = np.flatnonzero(among(self.plan.kind, (B, BW)) & (self.row == row))[-1:].tolist()
        return found


def _ends_with_taken(cut: tuple[Part, ...]) -> bool:
    """Return whether the last compute piece of a macro reads, maybe through others, what the macro takes."""
    pending, seen = [k for k, part in enumerate(cut) if not part.inner][-1:], set[int]()
    while pending:
        k = pending.pop()
        if cut[k].takes:
            return True
        pending += set(cut[k].reads) - seen
        seen |= set(cut[k].reads)
    return False
