"""Lower bounds on peak memory, and on time where memory holds a pipeline back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf

import numpy as np

from piper_core.ir.dag import Floats
from piper_core.names import Recompute
from piper_core.schedule.families import FAMILIES
from piper_core.schedule.grid import Layout, rows_of_stage
from search.life import Lives, Stages, Waits, lives_of
from search.loads import Loads
from search.partial_bound import COMPUTE_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES, backward_s, compute_s, overlaps
from search.replay import numbered, peaks_of
from search.row_parts import Frame, RowWork, alive_chunks, flows_of, kinds_of_row
from search.shape import Shape
from search.space import Configuration
from search.stage_costs import PhaseSeconds, shards_of


class Floors(Loads):
    """Memory floors of all configurations of one model on one cluster."""

    _last_lives: tuple[Shape | None, tuple[bool, bool], Lives | None] = None, (False, False), None

    def static_bytes(self, config: Configuration) -> list[float]:
        """Return parameters, gradients and optimiser state of one rank of each row, buffers left out."""
        return self._static(config, self.shape(config))

    def _static(self, config: Configuration, shape: Shape) -> list[float]:
        mine = self.held(config, shape)
        known = mine.static.get(config.zero)
        if known is None:
            known = mine.static[config.zero] = [
                COMPUTE_BYTES * (part if config.zero >= 3 else whole)
                + GRADIENT_BYTES * (part if config.zero >= 2 else whole)
                + OPTIMIZER_BYTES * (part if config.zero >= 1 else whole)
                for whole, part in mine.rows
            ]
        return known

    def memory_floor(self, config: Configuration, gap: float = 0.0) -> float:
        """Return bytes that the fullest row needs at least: static state, and activations of as many microbatches as
        its family keeps alive, each no larger than the smallest stage of the row, which are there until the next
        backward, with its workspace; the allocator loses ``gap`` of those."""
        shape = self.shape(config)
        alive = alive_chunks(config.schedule, config.pp, config.num_microbatches, config.virtual_stages)
        mine, last = self.held(config, shape), len(shape.counts) - 1
        static_bytes = self._static(config, shape)
        rows = zip(static_bytes, alive, mine.least_saved, mine.least_workspace, shape.mine, strict=True)
        worst = 0.0
        for static, n, least, work, held in rows:
            held_bytes = n * least + work
            if last in held:  # when the first backward begins
                held_bytes = max(held_bytes, mine.saved[last] + mine.workspace[last])
            worst = max(worst, static + (1 + gap) * held_bytes)
        return worst + self.context_bytes

    def any_order_floor(self, config: Configuration, gap: float = 0.0) -> float:
        """Return bytes that the fullest row needs at least under any order: static state, and one microbatch at all of
        its stages that this one passes, with the workspace of the backward that begins then."""
        shape = self.shape(config)
        rows = zip(self._static(config, shape), self.held(config, shape).one, strict=True)
        return max(static + (1 + gap) * one for static, one in rows) + self.context_bytes

    def floors(self, config: Configuration, policies: Sequence[str], gap: float, *, any_order: bool) -> Floats:
        """Return :meth:`any_order_floor` or :meth:`memory_floor` with each of some numbers of recomputed layers, of
        which the configuration has one; shape (policies,)."""
        shape = self.shape(config)
        mine, rows, static = self.held(config, shape), np.asarray(shape.mine), np.asarray(self._static(config, shape))
        shard, layers, again = shards_of(config), shape.counts, self.costs.repeated
        none, full = (np.asarray(self.saved(shard, policy)[1]) for policy in (Recompute.NONE, Recompute.FULL))
        more = np.asarray([again(layers, n) for n in policies]) - np.asarray(again(layers, config.recompute))
        saved = np.asarray(mine.saved) + more @ (full - none) * config.micro_batch  # (policies, stages)
        workspace = np.asarray(mine.workspace)
        if any_order:
            flows = saved[:, rows] if config.layout is Layout.BIDIRECTIONAL else np.cumsum(saved[:, rows], axis=2)
            held = (flows + workspace[rows]).max(axis=2)
        else:
            alive = alive_chunks(config.schedule, config.pp, config.num_microbatches, config.virtual_stages)
            held = np.asarray(alive) * saved[:, rows].min(axis=2) + workspace[rows].min(axis=1)
            ends = (rows == len(workspace) - 1).any(axis=1)  # when the first backward begins
            held = np.where(ends, np.maximum(held, saved[:, -1:] + workspace[-1]), held)
        return np.asarray((static + (1 + gap) * held).max(axis=1) + self.context_bytes)

    def _busy(self, config: Configuration, shape: Shape, overlapping: bool, split: bool) -> RowWork:
        """Return what each row does itself."""
        known = shape.busy.get((overlapping, split))
        if known is None:
            exchange = not overlapping
            kinds = [
                [s.forward(), s.backward(), compute_s(s), s.forward(exchange=exchange) + backward_s(s, split, exchange)]
                for s in shape.times.distinct
            ]
            if overlapping:  # each axis has a stream
                for kind, s, chain in zip(kinds, shape.times.distinct, self.chains(config, shape), strict=True):
                    kind += s.tensor, s.expert, s.context, *chain
            meets = kinds_of_row(config.layout, config.pp, config.virtual_stages, shape.times.number.tobytes())
            message = [shape.message_s, shape.message_s, *[0.0] * (len(kinds[0]) - 2)]
            before, each = meets @ [*kinds, message]
            work, talk = each[:, 3], np.zeros(len(each))
            if overlapping:
                work, talk = np.maximum.reduce(each[:, 3:], axis=1), np.maximum.reduce(each[:, 4:7], axis=1)
            first = meets[0, :, -1].astype(np.int64)
            known = RowWork(first, before[:, 0], work, before[:, 1], each[:, 2], talk)
            shape.busy[overlapping, split] = known
        return known

    def chains(self, config: Configuration, shape: Shape) -> list[tuple[float, float]]:
        """Return the seconds from first to last of what a forward, and a backward, does in turn, by distinct stage:
        what an overlap group takes at least that it is a member of. A group has one of each, so that neither all
        forwards of a row nor all backwards take less together. What the outermost chunks exchange may be through before
        the group starts, or come when its row is free again; what is recomputed may be another member."""
        found, distinct = [], shape.times.distinct
        for at, piece in enumerate(distinct):
            f, b = self.inner_exchange(config, at, len(distinct))
            backward = piece.bi + piece.bw + max(0.0, min(piece.b_exchange, piece.bi_exchange) - b)
            found.append((piece.f + max(0.0, piece.f_exchange - f), backward))
        return found

    def inner_exchange(self, config: Configuration, stage: int, stages: int) -> tuple[float, float]:
        """Return the exchanges of a stage's outermost chunks, in F and in B or BI: members of an overlap group may have
        them before the group starts, or after its row is free again."""
        embed, layer, head = self.costs.outer(shards_of(config), config.micro_batch)
        found = [layer, *([embed] if stage == 0 else []), *([head] if stage == stages - 1 else [])]
        return sum([e.f_exchange for e in found]), sum([max(e.b_exchange, e.bi_exchange) for e in found])

    def waits(self, config: Configuration, work: RowWork, frame: Frame, gap: float, capacity_bytes: float) -> Waits:
        """Return what memory costs rows in any order that fits, at least; ``inf`` where not even one microbatch fits.

        What is held at once leaves room for the workspace of the backward that frees some of it, but where that was
        through before (BI).
        """
        shape, overlapping, split = self.shape(config), overlaps(config), FAMILIES[config.schedule].splits_backward
        mine, lives = self.held(config, shape), self._lives(config, shape, overlapping, split)
        share = config.num_microbatches / (2 if config.layout is Layout.BIDIRECTIONAL else 1)
        more = self.room(config, gap, capacity_bytes)
        if (more < mine.one).any():
            return Waits(np.full(len(more), inf), inf, inf)
        room = more - mine.least_workspace
        begun, turned = frame.before - frame.enter, float(frame.arrives[-1]) - frame.enter
        return Waits(
            share * lives.hold(room, work.work), lives.idle(room, more, share, begun, turned),
            share * lives.mean(more) if split else 0.0,
        )  # fmt: skip

    def room(self, config: Configuration, gap: float, capacity_bytes: float) -> Floats:
        """Return the bytes that rows have for activations and workspace, shape (rows,)."""
        static = np.asarray(self._static(config, self.shape(config)))
        return np.asarray((capacity_bytes - self.context_bytes - static) / (1 + gap))

    def _lives(self, config: Configuration, shape: Shape, overlapping: bool, split: bool) -> Lives:
        """Return what rows hold of a microbatch; kept for the last shape alone, whose ZeRO stages come together."""
        last, ways, known = self._last_lives
        if last is not shape or ways != (overlapping, split) or known is None:
            rows = rows_of_stage(config.layout, config.pp, config.virtual_stages)
            hop = [shape.message_s if a != b or len(a) > 1 else 0.0 for a, b in pairwise(rows)]
            held, exchange = self.held(config, shape), not overlapping
            backward = PhaseSeconds.input_backward if split else PhaseSeconds.backward
            stages = Stages(
                held.saved, held.stash, [s.forward() for s in shape.stages], [backward(s) for s in shape.stages], hop,
                self._rest(config, shape),
                [s.forward(exchange=exchange) for s in shape.stages],
                [backward(s, exchange=exchange) for s in shape.stages],
                [s.weight_backward(exchange=exchange) if split else 0.0 for s in shape.stages],
                [s.weight_backward() if split else 0.0 for s in shape.stages],
            )  # fmt: skip
            known = lives_of([flows_of(config.layout, row) for row in shape.mine], stages, overlapping=overlapping)
            self._last_lives = shape, (overlapping, split), known
        return known

    def _rest(self, config: Configuration, shape: Shape) -> list[float]:
        """Return the seconds from when the second piece of a forward may start, in turns with those of a backward, to
        the forward's end, by stage; what its outermost chunks exchange may be through before, or come after."""
        embed, layer, head = self.costs.outer(shards_of(config), config.micro_batch)
        found, last = [], len(shape.stages) - 1
        for s, piece in enumerate(shape.stages):
            ends = [layer, *([embed] if s == 0 else []), *([head] if s == last else [])]
            exchange = piece.f_exchange - sum([end.f_exchange for end in ends])
            found.append(max(0.0, piece.f - sum([end.f for end in ends])) + max(0.0, exchange))
        return found

    def memory_of_order(self, config: Configuration, gap: float = 0.0) -> float:
        """Return bytes that the fullest row needs at least under the order that its family emits (level 2)."""
        shape = self.shape(config)
        mine = self.held(config, shape)
        order = numbered(config.schedule, config.pp, config.num_microbatches, config.virtual_stages)
        rows = zip(self._static(config, shape), peaks_of(order, mine.saved, mine.workspace), strict=True)
        return max(static + (1 + gap) * peak for static, peak in rows) + self.context_bytes
