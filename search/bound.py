"""Lower bounds on step time and peak memory, before anything is built.

Both hold for every order of the actions and every assignment of streams of a configuration (level 1), or for the
order that its family emits (level 2, by replaying the grid). A configuration whose bound is worse than the best
found so far cannot win.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import ceil, inf

import numpy as np

from piper_core.arch.chunk import Chunk
from piper_core.names import Collective
from piper_core.schedule.families import FAMILIES
from piper_core.schedule.grid import Grid, Layout, rows_of_stage
from search.cost.base import CostModel
from search.floors import Floors
from search.partial_bound import COMPUTE_BYTES, GRADIENT_BYTES, OVERLAPPING, overlaps
from search.passage import Route, arrivals, passage
from search.replay import Times, numbered, replay
from search.route import route_of, row_ends, row_syncs
from search.row_parts import (
    Frame,
    RowEnds,
    RowParameters,
    RowSyncs,
    StageSync,
    count_parameters,
)
from search.shape import Shape
from search.space import Configuration
from search.stage_costs import StageCosts, mesh_of, ranks_of

MIB = 1 << 20


class Bounds(Floors):
    """Bounds of all configurations of one model on one cluster, of those that need at most ``capacity_bytes``."""

    def __init__(self, costs: StageCosts, cost: CostModel, context_bytes: float, capacity_bytes: float = inf) -> None:
        Floors.__init__(self, costs, cost, context_bytes, capacity_bytes)
        self.ends = lru_cache(maxsize=None)(self._ends_numel)
        self.first = lru_cache(maxsize=None)(self._first_bucket)
        self.norm = lru_cache(maxsize=None)(self._norm)
        self.widest = lru_cache(maxsize=None)(self._widest)
        self._known_syncs: dict[tuple[object, ...], dict[tuple[object, ...], StageSync]] = {}
        self._known_rows: dict[tuple[object, ...], RowSyncs] = {}
        self.orders: dict[Configuration, Grid] = {}  # of the list scheduler

    def time_bound(
        self, config: Configuration, gap: float | None = None, capacity_bytes: float = inf, enough: float = inf
    ) -> float:
        """Return seconds that a step takes at least, whatever the order and the streams (level 1); of orders that fit
        ``capacity_bytes`` where ``gap`` is given, ``inf`` where none does. What is dear to find, memory's part most, is
        looked at only where all before it is below ``enough``.

        Counted from when the gradient norm of the step before is known. A row updates its stages, and is busy with its
        own work; it starts after the forwards of the stages before its first, and, where the backward is whole, the
        backwards of those stages follow its last action. What its last backward leaves to be reduced comes after that.
        While collectives and compute overlap both are slower, so those that idle time does not hide lengthen the step.
        """
        shape, overlapping, norm = self.shape(config), overlaps(config), self.norm_s(config)
        frame = self.frame(config)
        if frame.least + norm >= enough:
            return frame.least + norm
        split = FAMILIES[config.schedule].splits_backward
        way = self._way(config, shape, frame, overlapping, split)
        best = max(frame.least, way)
        if gap is not None and best + norm < enough:
            rows = self._busy(config, shape, overlapping, split)
            waits = self.waits(config, rows, frame, gap, capacity_bytes)
            alone = frame.compute if overlapping else frame.work
            held = frame.before + np.maximum(np.maximum(frame.work, waits.hold), alone + waits.idle)
            ends = frame.before + frame.after
            best = max(best, float(frame.longest(held + frame.after).max()), waits.mean + float(ends.mean()))
        return best + norm

    def frame(self, config: Configuration) -> Frame:
        """Return what holds for a step whatever its rows do inside."""
        shape, overlapping, split = self.shape(config), overlaps(config), FAMILIES[config.schedule].splits_backward
        key = config.zero, split, overlapping
        known = shape.frames.get(key)
        if known is None:
            ends, rows = self._ends(config, shape, overlapping, split), self._busy(config, shape, overlapping, split)
            share = config.num_microbatches / (2 if config.layout is Layout.BIDIRECTIONAL else 1)
            arrives, after = arrivals(self._route(config, shape, overlapping, split), ends.enter, ends.ready), ends.late
            if not split and config.layout is Layout.LOOP:
                after = np.maximum(after, rows.tail + after[0])
            known = shape.frames[key] = Frame(
                ends.enter, np.maximum(arrives[rows.first], ends.update), ends.late, after, share * rows.work,
                share * rows.compute, ends.talk, share * rows.talk, ends.floor, arrives,
                ends.reduce * (config.zero < 2), self.cost.overlap_slowdown - 1,
            )  # fmt: skip
        return known

    def _way(self, config: Configuration, shape: Shape, frame: Frame, overlapping: bool, split: bool) -> float:
        """Return the seconds of the ways that the first and the last microbatch make."""
        key = config.zero, split, overlapping
        known = shape.ways.get(key)
        if known is None:
            ends, route = self._ends(config, shape, overlapping, split), self._route(config, shape, overlapping, split)
            m = config.num_microbatches // (2 if config.layout is Layout.BIDIRECTIONAL else 1)
            known = float(np.maximum.reduce(frame.before + ends.between))
            known = max(known, passage(route, m, frame.arrives, ends.ready, ends.reduce))
            shape.ways[key] = known
        return known

    def _route(self, config: Configuration, shape: Shape, overlapping: bool, split: bool) -> Route:
        known = shape.routes.get((overlapping, split))
        if known is None:
            chains = self.chains(config, shape) if overlapping else None
            known = shape.routes[overlapping, split] = route_of(config, shape, chains, split)
        return known

    def busy_bound(self, config: Configuration) -> float:
        """Return the part of :meth:`time_bound` that does not depend on the ZeRO stage: no reduction, no update."""
        family, shape = FAMILIES[config.schedule], self.shape(config)
        overlapping, split, layout = overlaps(config), family.splits_backward, family.layout
        share = config.num_microbatches / (2 if layout is Layout.BIDIRECTIONAL else 1)
        rows = self._busy(config, shape, overlapping, split)
        least = rows.head + share * rows.work
        if not split and layout is Layout.LOOP:
            least = least + rows.tail
        if overlapping:  # otherwise a row's work has all of its collectives
            slower = self.cost.overlap_slowdown - 1
            least = least + slower * np.maximum(0.0, share * (rows.talk + rows.compute) - least)
        return float(np.maximum.reduce(least))

    def norm_s(self, config: Configuration) -> float:
        """Return the seconds of the norm of all gradients, after which a step ends."""
        return self.norm(config.pp * config.row_size)

    def _norm(self, ranks: int) -> float:
        return self.cost.collective_s(Collective.ALL_REDUCE, 4.0, tuple(range(ranks)))

    def _ends(self, config: Configuration, shape: Shape, overlapping: bool, split: bool) -> RowEnds:
        """Return, for each row, what data parallelism and the update add at least."""
        key = config.zero, split, overlapping
        known = shape.ends.get(key)
        if known is None:
            known = shape.ends[key] = row_ends(config, shape, self._row_syncs(config, shape), overlapping, split)
        return known

    def _row_syncs(self, config: Configuration, shape: Shape) -> RowSyncs:
        """Return what data parallelism and the update ask of each row."""
        key = (config.layout, config.pp, config.tp, config.ep, config.dp, config.cp, config.outer, config.zero,
               shape.counts)  # fmt: skip
        known = self._known_rows.get(key)
        if known is None:
            rows = rows_of_stage(config.layout, config.pp, config.virtual_stages)
            syncs = [self._syncs(config, shape, row) for row in range(config.pp)]
            known = self._known_rows[key] = row_syncs(rows, syncs)
        return known

    def _syncs(self, config: Configuration, shape: Shape, row: int) -> dict[int, StageSync]:
        """Return what each stage of a row updates and communicates for data parallelism."""
        last, both = len(shape.counts) - 1, config.layout is Layout.BIDIRECTIONAL
        rows = (row, config.pp - 1 - row) if both else (row,)
        known = self._known_syncs.setdefault(
            (config.pp, config.tp, config.ep, config.dp, config.cp, config.outer, config.zero, rows), {}
        )
        found = {}
        for s in shape.mine[row]:
            key = shape.kinds[s], s == 0, s == last
            if key not in known:
                known[key] = self._stage_sync(config, shape, s, rows)
            found[s] = known[key]
        return found

    def _stage_sync(self, config: Configuration, shape: Shape, s: int, rows: tuple[int, ...]) -> StageSync:
        zero, gather = config.zero, Collective.ALL_GATHER
        degrees = (config.dp * config.cp, config.dp // config.ep * config.cp) if zero else (1, 1)
        kind = Collective.REDUCE_SCATTER if zero else Collective.ALL_REDUCE
        width = COMPUTE_BYTES if zero >= 2 else GRADIENT_BYTES
        held = self.held(config, shape).numel[s]
        first = self.first(config.tp, config.ep, s == 0, bool(shape.counts[s]))
        return StageSync(
            update=self.cost.update_s(held.over(*degrees) / (len(rows) if zero else 1)),
            reduce=self._sync(held, config, kind, width, rows),
            first_reduce=self._sync(first, config, kind, width, rows),
            gather=self._sync(held, config, gather, COMPUTE_BYTES, rows) if zero else 0.0,
            first_gather=self._sync(first, config, gather, COMPUTE_BYTES, rows) if zero else 0.0,
        )

    def _sync(
        self, held: RowParameters, config: Configuration, kind: Collective, width: int, rows: tuple[int, ...]
    ) -> float:
        """Return the seconds of one collective for each class of parameters, ``width`` bytes each, as one bucket; over
        both rows of a stage that lies on two."""
        ranks = ranks_of(mesh_of(config))
        seconds = 0.0
        for numel, groups in ((held.dense, ranks.dense), (held.expert, ranks.experts)):
            if numel:
                members = groups[rows[0]] if len(rows) == 1 else tuple(sorted(r for row in rows for r in groups[row]))
                seconds += self.cost.collective_s(kind, numel * width, members) if len(members) > 1 else 0.0
        return seconds

    def order_bound(self, config: Configuration) -> float:
        """Return the part of :meth:`replay` that does not depend on the ZeRO stage: compute and messages alone."""
        shape, rows = self.shape(config), config.pp
        order = numbered(config.schedule, rows, config.num_microbatches, config.virtual_stages)
        times = self._times(replace(config, zero=0), shape, [{}] * rows)
        return max(replay(order, times).rows) + self.norm_s(config)

    def replay(self, config: Configuration) -> float:
        """Return seconds that a step takes at least under the order that its family emits (level 2): the longest path
        through its actions with the quickest messages, and what data parallelism adds before, between and after them.
        """
        shape, zero = self.shape(config), config.zero
        syncs = [self._syncs(config, shape, row) for row in range(config.pp)]
        ends = replay(
            numbered(config.schedule, config.pp, config.num_microbatches, config.virtual_stages),
            self._times(config, shape, syncs),
        )
        least = max(ends.rows)
        both = config.layout is Layout.BIDIRECTIONAL
        for row, sync in enumerate(syncs):
            stream, last = 0.0, ends.last[row]
            if both:  # both rows of a stage reduce together
                other = ends.last[config.pp - 1 - row]
                last = {s: (max(a, other[s][0]), max(b, other[s][1])) for s, (a, b) in last.items()}
            for s, (start, end) in sorted(last.items(), key=lambda item: item[1]):
                if zero < 2:
                    stream = max(stream, start) + sync[s].reduce
                least = max(least, stream, end + sync[s].first_reduce)
        return max(least + self.norm_s(config), self.time_bound(config))

    def _times(self, config: Configuration, shape: Shape, syncs: list[dict[int, StageSync]]) -> Times:
        """Return the seconds that a replay takes."""
        overlapping, zero = config.schedule in OVERLAPPING, config.zero
        whole, compute, chain, gathers = [], [], [], []
        stages = len(shape.stages)
        ahead, behind = (
            self._gathers(config, shape) if zero == 3 and config.dp * config.cp > 1 else ([0.0] * stages,) * 2
        )
        for s, piece in enumerate(shape.stages):
            forward, backward = ahead[s], behind[s]
            gathers += [forward, backward, backward, 0.0]
            whole += [max(piece.forward(), forward), max(piece.backward(), backward),
                      max(piece.input_backward(), backward), piece.weight_backward()]  # fmt: skip
            if overlapping:
                compute += [piece.forward(exchange=False), piece.backward(exchange=False), 0.0, 0.0]
                f, b = self.inner_exchange(config, s, stages)
                chain += [
                    piece.f + max(0.0, piece.f_exchange - f),
                    piece.bi + piece.bw + max(0.0, piece.b_exchange - b),
                ]
                chain += [0.0, 0.0]
        first: list[dict[int, tuple[float, float]]] = []
        for sync in syncs:
            done, mine = 0.0, {}
            for s in sorted(sync):
                done += sync[s].update
                if zero:
                    mine[s] = done + sync[s].first_gather, done + sync[s].gather if zero < 3 else 0.0
            first.append(mine)
        start = [sum(each.update for each in sync.values()) for sync in syncs]
        return Times(whole, compute, chain, gathers, shape.message_s, start, first)

    def _gathers(self, config: Configuration, shape: Shape) -> tuple[list[float], list[float]]:
        """Return, for each stage, the seconds of gathering that an F, and a B or BI, spends at least between its first
        piece and its end under ZeRO-3.

        With a prefetch of n, a gather starts once the action before the user of the n-th gather before it has ended. So
        all but those of the first piece (its chunk's, and the rest of their buckets) and n more start after the first
        piece does, and follow one another.
        """
        tp, ep = config.tp, config.ep
        embed, first, last, head = self.ends(tp, ep, True)
        widest, ahead = self.widest(tp, ep, config.bucket), 1 + config.prefetch

        numel = self.held(config, shape).numel

        def rest(stage: int, outer: RowParameters) -> float:
            held = numel[stage]
            left = RowParameters(
                max(0.0, held.dense - outer.dense - ahead * widest.dense),
                max(0.0, held.expert - outer.expert - ahead * widest.expert),
            )
            return self._sync(left, config, Collective.ALL_GATHER, COMPUTE_BYTES, (0,))

        stages = len(numel)
        return (
            [rest(s, embed if s == 0 else first) for s in range(stages)],
            [rest(s, head if s == stages - 1 else last) for s in range(stages)],
        )

    def bucket_mib(self, tp: int, ep: int, layers: int = 1) -> int:
        """Return the bucket size that holds about ``layers`` layers on a rank (0, whatever the size: no layers)."""
        layer = self.numel(tp, ep)[1][self.costs.kind_of[-1]]
        return ceil(layers * layer.dense * COMPUTE_BYTES / MIB) if layers and layer.dense else layers

    def _widest(self, tp: int, ep: int, layers: int) -> RowParameters:
        """Return the most elements that a bucket of each class may hold: its limit, or the largest parameter."""
        limit = self.bucket_mib(tp, ep, layers) * MIB / COMPUTE_BYTES if layers else inf
        dense = expert = limit
        for parameter in (p for chunk in self.costs.model.chunks for p in chunk.parameters):
            share = parameter.numel / (tp if parameter.tensor else 1)
            if parameter.expert and ep > 1:
                expert = max(expert, share / ep)
            else:
                dense = max(dense, share)
        return RowParameters(dense, expert)

    def _first_bucket(self, tp: int, ep: int, embeds: bool, layers: bool) -> RowParameters:
        """Return the least that a stage's first chunk shares buckets with: smallest buckets are as large as a layer,
        and none is closed while the next parameter has room."""
        chunk = self.ends(tp, ep, False)[0 if embeds else 1]
        if not layers:
            return chunk
        limit, runs = self.bucket_mib(tp, ep) * MIB // COMPUTE_BYTES, []
        for kind in self.costs.kinds:
            total = 0
            for p in (p for c in [*(self.costs.first if embeds else ()), *kind] for p in c.parameters):
                share = p.numel // (tp if p.tensor else 1)
                if not (p.expert and ep > 1):
                    if total and total + share > limit:
                        break
                    total += share
            runs.append(total)
        return RowParameters(max(chunk.dense, min(runs)), chunk.expert)

    def _ends_numel(self, tp: int, ep: int, most: bool) -> tuple[RowParameters, ...]:
        """Return the parameters of the first chunk, of the first and the last of a layer, and of the last chunk; of
        several kinds of layer the most, or the least."""

        def of(*chunks: Chunk) -> RowParameters:
            found, pick = [count_parameters([chunk], tp, ep) for chunk in chunks], max if most else min
            return RowParameters(pick(each.dense for each in found), pick(each.expert for each in found))

        kinds = self.costs.kinds
        return (
            of(self.costs.first[0]), of(*(kind[0] for kind in kinds)), of(*(kind[-1] for kind in kinds)),
            of(self.costs.last[-1]),
        )  # fmt: skip
