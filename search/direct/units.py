"""The units of a step under an order: pieces of compute, and what happens beside them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from piper_core.ir.action import ActionKind
from piper_core.ir.dag import Floats, Ints, Mask
from piper_core.names import Phase
from piper_core.schedule.plan import CODE
from search.direct.order import Order
from search.direct.pieces import Pieces
from search.direct.shape import Step

CODE_OF_PHASE = np.asarray([CODE[ActionKind(name)] for name in ("F", "B", "BI", "BW")], np.int32)
WHOLE, CUT = 0, 1
VARIANTS = 2


@dataclass(frozen=True, slots=True)
class Table:
    """All pieces of a step: ``start`` (phases, variants) says where those of a phase begin. By bucket, shape
    (phases, variants, B), the piece of a macro action that uses it ``first`` and ``last``, counted from its own first."""

    start: Ints
    sets: tuple[tuple[Pieces, ...], ...]
    first: Ints
    last: Ints

    def column(self, name: str) -> Floats:
        """Return a column of all pieces."""
        return np.concatenate([getattr(each, name) for some in self.sets for each in some])


def table_of(step: Step) -> Table:
    """Return the table of a step's pieces."""
    buckets, stages = step.buckets, step.stages
    start, at = np.zeros((4, VARIANTS), np.int64), 0
    first = np.zeros((4, VARIANTS, len(buckets)), np.int64)
    last = np.zeros_like(first)
    again = stages.again[buckets.parts]
    sets = []
    for phase, some in step.pieces.items():
        sets.append(some)
        for variant, each in enumerate(some):
            start[phase, variant] = at
            at += len(each.seconds)
            base = each.first[buckets.stage]
            low, high = each.of[buckets.low] - base, each.of[buckets.high] - base
            if phase is Phase.F:
                first[phase, variant], last[phase, variant] = low, high
            else:
                users = each.of[buckets.parts]
                users = np.where(again, np.minimum(users, each.repeat[buckets.parts]), users)
                first[phase, variant] = np.minimum.reduceat(users, buckets.start[:-1]) - base
                last[phase, variant] = low
    return Table(start, tuple(sets), first, last)


@dataclass(slots=True)
class Macros:
    """Where the macro actions of an order lie among the units: their ``variant``, first unit (``base``), number of
    pieces (``count``), and for each unit of compute its macro, its piece in the table, and its place on its row."""

    variant: Ints
    base: Ints
    count: Ints
    macro: Ints
    piece: Ints
    place: Floats

    def unit(self, macro: Ints, local: Ints) -> Ints:
        """Return the unit of a piece of each macro."""
        return np.asarray(self.base[macro] + local)


def macros_of(step: Step, order: Order, table: Table) -> Macros:
    """Place the macro actions of an order.

    One is cut where collectives of buckets need it: each under ZeRO-3, and after ZeRO-2's reductions; else the first
    forward of a stage and its last whole or weight backward.
    """
    zero = step.config.zero
    steady = np.asarray([zero == 3, zero >= 2, zero == 3, zero >= 2])
    variant = steady[order.phase].astype(np.int64)
    variant[order.first_of] = variant[order.last_of] = CUT
    start = table.start[order.phase, variant]
    count = np.zeros((4, VARIANTS, step.stages.count), np.int64)
    first = np.zeros_like(count)
    for phase, some in step.pieces.items():
        for v, each in enumerate(some):
            count[phase, v], first[phase, v] = each.count, each.first
    pieces, start = count[order.phase, variant, order.stage], start + first[order.phase, variant, order.stage]
    base = np.cumsum(pieces) - pieces
    macro = np.repeat(np.arange(len(order)), pieces)
    local = np.arange(len(macro)) - base[macro]
    scale = 2.0 * (int(pieces.max()) + 1)
    return Macros(variant, base, pieces, macro, start[macro] + local, order.position[macro] * scale + local)


@dataclass(slots=True)
class Columns:
    """Columns of units that are being collected, parts in the order of ``add``; ``count`` so far."""

    count: int = 0
    parts: list[tuple[Ints, ...]] = field(default_factory=list)
    seconds: list[Floats] = field(default_factory=list)

    def add(
        self, n: int, *, kind: Ints | int, stage: Ints | int, microbatch: Ints | int, bucket: Ints | int, row: Ints | int,
        queue: Ints | int, line: Ints | int, comm: int, place: Floats, seconds: Floats,
    ) -> Ints:  # fmt: skip
        """Add ``n`` units; return their numbers. ``queue`` is what tells streams of a row apart, -1 its compute."""
        self.parts.append(tuple(np.broadcast_to(c, n) for c in (kind, stage, microbatch, bucket, row, queue, line, comm)))
        self.seconds.append(np.stack([np.broadcast_to(place, n), np.broadcast_to(seconds, n)]))
        self.count += n
        return np.arange(self.count - n, self.count)

    def finish(self) -> tuple[list[Ints], Floats, Floats]:
        """Return (kind, stage, microbatch, bucket, row, queue, line, comm), places and seconds."""
        columns = [np.concatenate(column) for column in zip(*self.parts, strict=True)]
        place, seconds = np.concatenate(self.seconds, axis=1)
        return columns, place, seconds


@dataclass(frozen=True, slots=True)
class Messages:
    """Units of messages, shape (n,): both ends, the pieces that make and take what they carry, bytes, whether it is an
    activation."""

    send: Ints
    recv: Ints
    producer: Ints
    consumer: Ints
    bytes: Floats
    forward: Mask


@dataclass(frozen=True, slots=True)
class Uses:
    """Units of collectives for one use each, shape (n,): the collective, a unit of compute, bytes."""

    unit: Ints
    compute: Ints
    bytes: Floats
