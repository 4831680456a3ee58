"""A plan being made: its units, and which of them wait for which.

Units are numbered as they are made: pieces of compute row by row, then updates, communication, FREEs. ``place`` orders
them on their streams, as ``schedule.streams`` has it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from piper_core.ir.action import ActionKind
from piper_core.ir.dag import Floats, Ints
from piper_core.names import Phase
from piper_core.schedule.plan import CODE
from search.direct.order import Order
from search.direct.shape import Step
from search.direct.sliced import Sliced
from search.direct.table import VARIANTS, Macros, macros_of, table_of
from search.direct.tariff import offsets_of

NONE: Ints = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Uses:
    """Collectives for one use each, shape (n,): the unit, a unit of the compute stream, the bucket."""

    unit: Ints
    compute: Ints
    bucket: Ints


NO_USES = Uses(NONE, NONE, NONE)


class Columns:
    """Columns of units that are being collected, in the order in which they are added; ``count`` so far."""

    INTEGERS: ClassVar = ("price", "kind", "stage", "microbatch", "bucket", "row", "queue", "line", "comm")

    def __init__(self) -> None:
        self.count = 0
        self._integers: list[tuple[int, dict[str, Ints | int]]] = []
        self._places: list[Floats | float] = []

    def add(self, n: int, place: Floats | float, **columns: Ints | int) -> Ints:
        """Add ``n`` units with the columns of ``INTEGERS``; return their numbers. ``price`` is where a tariff says what
        each lasts; ``queue`` tells streams of a row apart, -1 is its compute; ``bucket``, ``microbatch``, ``line`` and
        ``comm`` are -1 where there is none."""
        self._integers.append((self.count, columns))
        self._places.append(place)
        self.count += n
        return np.arange(self.count - n, self.count)

    def finish(self) -> tuple[dict[str, Ints], Floats]:
        """Return the columns of integers, and the places."""
        starts = [start for start, _ in self._integers]
        slices = [slice(a, b) for a, b in zip(starts, [*starts[1:], self.count], strict=True)]
        made: dict[str, Ints] = {}
        for name in self.INTEGERS:
            column = made[name] = np.empty(self.count, np.int32)
            for at, (_, columns) in zip(slices, self._integers, strict=True):
                column[at] = columns.get(name, -1)
        place = np.empty(self.count)
        for at, each in zip(slices, self._places, strict=True):
            place[at] = each
        return made, place


class Draft:
    """The units of a step under an order, compute and updates to begin with, and the edges between them."""

    def __init__(self, step: Step, order: Order, sliced: Sliced) -> None:
        self.step, self.order, self.sliced = step, order, sliced
        self.table = table_of(step, sliced)
        self.macros: Macros = macros_of(sliced, order, self.table)
        self.columns, self.edges = Columns(), list[tuple[Ints, Ints]]()
        self.prices = offsets_of(len(self.table.code), step, order)
        self.rows = len(step.rows)
        self.width = 2 * self.rows + 2
        """What the numbers of queues of one name span: one for each end of each channel."""
        self.end = float(self.macros.place.max()) + 2
        """Where updates begin on the compute streams."""
        self._compute()
        stage = order.holder_stage
        self.updates = self.columns.add(
            len(stage), self.end + stage.astype(np.float64), price=self.prices.update + stage,
            kind=CODE[ActionKind.UPDATE], stage=stage, row=order.holder_row,
        )  # fmt: skip

    def link(self, src: Ints, dst: Ints) -> None:
        """Let units of ``dst`` wait for those of ``src``."""
        self.edges.append((src, dst))

    def unit(self, macro: Ints, what: str) -> Ints:
        """Return the unit of one piece of each macro: that of its stage which a column of the table names."""
        local = getattr(self.table, what)[self.order.phase[macro], self.macros.variant[macro], self.order.stage[macro]]
        return np.asarray(self.macros.base[macro] + local)

    def user(self, macro: Ints, bucket: Ints, what: str) -> Ints:
        """Return the unit of the piece of each macro that uses a bucket, as a column of the table names it."""
        local = getattr(self.table, what)[self.order.phase[macro], self.macros.variant[macro], bucket]
        return np.asarray(self.macros.base[macro] + local)

    def _compute(self) -> None:
        order, table, at, piece = self.order, self.table, self.macros.macro, self.macros.piece
        self.columns.add(
            len(at), self.macros.place, price=self.prices.piece + piece, kind=table.code[piece], stage=order.stage[at],
            microbatch=order.microbatch[at], row=order.row[at], queue=table.queue[piece], comm=table.comm[piece],
        )  # fmt: skip
        self.link(self.unit(order.hops.near[0], "leave"), self.unit(order.hops.near[1], "enter"))
        if self.sliced.overlapped.any():
            self._opened()

    def _opened(self) -> None:
        """Link the pieces of opened macro actions, and what forwards and their last pieces keep for them."""
        order, base, variant = self.order, self.macros.base, self.macros.variant
        members = np.flatnonzero(self.sliced.overlapped)
        key = order.phase[members] * VARIANTS + variant[members]
        key = key * self.step.stages.count + order.stage[members]
        by = np.argsort(key, kind="stable")
        starts = np.flatnonzero(np.diff(key[by], prepend=-1))
        for mine in np.split(members[by], starts[1:]):
            phase, stage = Phase(int(order.phase[mine[0]])), int(order.stage[mine[0]])
            found = self.sliced.pieces[phase][int(variant[mine[0]])].opened[stage]
            assert found is not None
            mine_first = base[mine][:, None]
            self.link(*((mine_first + found.edges[:, side]).ravel() for side in (0, 1)))
            if len(found.saved):
                forward, chunk = order.find[Phase.F, stage, order.microbatch[mine]], found.saved[:, 0]
                kept = self.table.forward[variant[forward][:, None], chunk + self.step.stages.ends[stage]]
                self.link((base[forward][:, None] + kept).ravel(), (mine_first + found.saved[:, 1]).ravel())
