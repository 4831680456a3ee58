"""What rows do of a microbatch at least, from how many layers they hold: of many schedules and cuts at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import inf
from typing import NamedTuple

import numpy as np

from piper_core.ir.dag import Floats
from piper_core.names import Recompute
from piper_core.schedule.families import FAMILIES
from piper_core.schedule.grid import Layout
from search.cost.base import CostModel
from search.partial_bound import backward_s, compute_s, overlaps
from search.row_parts import stages_of_row
from search.shape import Shapes
from search.space import Configuration
from search.stage_costs import PhaseSeconds, Shards, StageCosts, shards_of


class Choice(NamedTuple):
    """What a partial assignment leaves open: family, virtual stages, layers of each stage, and recompute policy."""

    schedule: str
    virtual_stages: int
    layers: tuple[int, ...]
    recompute: str


class Loads(Shapes):
    """Loads of rows of one model on one cluster."""

    def __init__(self, costs: StageCosts, cost: CostModel, context_bytes: float, capacity_bytes: float = inf) -> None:
        Shapes.__init__(self, costs, cost, context_bytes, capacity_bytes)
        self.parts_of_rows = lru_cache(maxsize=100_000)(self._parts_of_rows)
        self.part_seconds = lru_cache(maxsize=None)(self._part_seconds)

    def busy_bounds(self, part: Configuration, choices: Sequence[Choice]) -> Floats:
        """Return seconds that each choice of a partial assignment takes at least, shape (choices,): those of
        :meth:`Bounds.busy_bound`, or less where layers differ, since a row's overlap groups are taken together."""
        families, overlapping = [FAMILIES[choice.schedule] for choice in choices], overlaps(part)
        held = np.asarray([self.parts_of_rows(family.layout, part.pp, v, layers, policy)
                           for family, (_, v, layers, policy) in zip(families, choices, strict=True)])  # fmt: skip
        again = Recompute.SELECTIVE if part.recompute == Recompute.SELECTIVE else Recompute.FULL
        each = held @ self.part_seconds(shards_of(part), part.micro_batch, again, overlapping)
        split = np.asarray([[family.splits_backward] for family in families])
        share = np.asarray([[part.num_microbatches / (1 + (f.layout is Layout.BIDIRECTIONAL))] for f in families])
        loop = np.asarray([[not f.splits_backward and f.layout is Layout.LOOP] for f in families])
        forward, backward = (each[:, 0, :, :2] + held[:, 0, :, -1:] * self.costs.message_s(part)).transpose(2, 0, 1)
        compute, whole, apart, *hidden = each[:, 1, :, 2:].transpose(2, 0, 1)
        work = np.where(split, apart, whole)
        if overlapping:
            work = np.maximum(work, np.maximum.reduce(hidden))
        least = forward + share * work + loop * backward
        if overlapping:
            beside = share * (np.maximum.reduce(hidden[:3]) + compute)
            least = least + (self.cost.overlap_slowdown - 1) * np.maximum(0.0, beside - least)
        return np.asarray(least.max(axis=1))

    def _parts_of_rows(self, layout: Layout, pp: int, v: int, layers: tuple[int, ...], policy: str) -> Floats:
        """Return what stages before the first of each row hold, and those on it: layers of each kind, those that are
        recomputed, embeddings, heads, and how many stages there are; shape (2, rows, parts)."""
        n, rows = len(layers), stages_of_row(layout, pp, v)
        ends = np.zeros((n, 3))
        ends[0, 0] = ends[-1, 1] = 1.0
        ends[:, 2] = 1.0
        each = np.hstack([self.costs.composition(layers), self.costs.repeated(layers, policy), ends])
        before = np.vstack([np.zeros(each.shape[1]), np.cumsum(each, axis=0)])
        return np.stack([before[[row[0] for row in rows]], each[np.asarray(rows)].sum(axis=1)])

    def _part_seconds(self, shard: Shards, b: int, again: Recompute, overlapping: bool) -> Floats:
        """Return what the parts of :meth:`_parts_of_rows` take of one microbatch, shape (parts, columns): forward,
        backward, compute, the work of a row (whole backwards, or apart); where overlap groups may hide collectives,
        those over each axis, and what a forward, and a backward, does in turn (:meth:`Floors.chains`)."""
        (embed, kinds, head), exchange = self.costs.pieces(shard, b), not overlapping
        pieces = [*kinds, *self.costs.repeats(shard, b, again), embed, head]
        outer = self.costs.outer(shard, b)
        # layers exchange in the midst of a stage, but for its outermost chunks
        less = [*[PhaseSeconds(*[0.0] * 7)] * (len(pieces) - 2), outer[0], outer[2]]
        table = [
            [p.forward(), p.backward(), compute_s(p), *[p.forward(exchange=exchange) + backward_s(p, split, exchange)
                                                        for split in (False, True)]]
            for p in pieces
        ]  # fmt: skip
        stage = [0.0] * 5
        if overlapping:
            for row, p, ends in zip(table, pieces, less, strict=True):
                row += p.tensor, p.expert, p.context, p.f + p.f_exchange - ends.f_exchange
                row += [p.bi + p.bw + min(p.b_exchange, p.bi_exchange) - max(ends.b_exchange, ends.bi_exchange)]
            stage += [0.0, 0.0, 0.0, -outer[1].f_exchange, -max(outer[1].b_exchange, outer[1].bi_exchange)]
        return np.asarray([*table, stage])
