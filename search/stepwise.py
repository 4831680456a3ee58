"""What the bound of one row's orders asks of a configuration, from the costs and sizes of its stages."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from piper_core.ir.dag import Floats
from piper_core.names import Recompute
from piper_core.schedule.families import FAMILIES
from piper_core.schedule.grid import rows_of_stage
from search.bound import Bounds
from search.partial_bound import overlaps
from search.row_order import Flow, Visit, Work, least_s
from search.row_parts import Frame, flows_of
from search.space import Configuration
from search.stage_costs import PhaseSeconds, shards_of

Phase: TypeAlias = Callable[..., float]
"""A method of :class:`PhaseSeconds`."""
WIDEST, DEEPEST = 2, 16
"""Stages of a row, and rows, up to which orders are followed: beyond, too many begin alike."""


def stepwise_bound(bounds: Bounds, config: Configuration, gap: float, capacity_bytes: float, enough: float) -> float:
    """Return seconds that a step takes at least in any order that fits ``capacity_bytes``, since no order of its first
    or of its busiest row is quicker; ``enough`` where that is less."""
    shape, norm = bounds.shape(config), bounds.norm_s(config)
    if len(shape.mine[0]) > WIDEST or config.pp > DEEPEST:
        return 0.0
    frame, room = bounds.frame(config), bounds.room(config, gap, capacity_bytes)
    busiest = int(np.argmax(frame.longest(frame.before + frame.work + frame.late)))
    best = 0.0
    for row in sorted({0, busiest}):
        before, late = float(frame.before[row]), float(frame.late[row])
        flows, enough_s = flows_of_row(bounds, config, row, frame), frame.within(enough - norm, row) - before
        least = least_s(flows, float(room[row]), enough_s, overlapping=overlaps(config), late=late)
        longest = frame.longest(np.where(np.arange(config.pp) == row, before + least, 0.0))
        best = max(best, float(longest.max()) + norm)
    return best


def flows_of_row(bounds: Bounds, config: Configuration, row: int, frame: Frame) -> list[Flow]:
    """Return what passes a row, and how long it is elsewhere at least."""
    shape, split = bounds.shape(config), FAMILIES[config.schedule].splits_backward
    forward = [s.forward() for s in shape.stages]
    backward = [s.input_backward() if split else s.backward() for s in shape.stages]
    rows = rows_of_stage(config.layout, config.pp, config.virtual_stages)
    hop = [shape.message_s if a != b or len(a) > 1 else 0.0 for a, b in pairwise(rows)]
    works = _Works(bounds, config, frame.reduce)
    down, up = (np.concatenate(([0.0], np.cumsum(np.add(each, [*hop, 0.0])))) for each in (forward, backward))
    flows = flows_of(config.layout, shape.mine[row])
    found = []
    for flow in flows:
        away = [float(down[t] - down[s] - forward[s]) for s, t in pairwise(flow)]
        turn, back = flow[-1], tuple(reversed(flow))
        away.append(float(down[-1] - down[turn] - forward[turn] + up[-1] - up[turn] - backward[turn]))
        away += [float(up[s] - up[t]) - backward[t] for s, t in pairwise(back)]
        leave = float(up[flow[0]] + frame.late.min()) if flow[0] else 0.0
        enter, m = frame.enter + down[flow[0]] - frame.before[row], config.num_microbatches // len(flows)
        found.append(Flow(tuple(works.visit(s) for s in flow), m, float(enter), tuple(away), leave))
    return found


class _Works:
    """What the stages of a configuration do on their rows."""

    def __init__(self, bounds: Bounds, config: Configuration, reduce: Floats) -> None:
        self.bounds, self.config, self.shape, self.reduce = bounds, config, bounds.shape(config), reduce
        self.split, self.overlapping = FAMILIES[config.schedule].splits_backward, overlaps(config)
        self.held = bounds.held(config, self.shape)
        costs, shard, b = bounds.costs, shards_of(config), config.micro_batch
        self.embed, self.kinds, self.head = costs.pieces(shard, b)
        policy = Recompute.SELECTIVE if config.recompute == Recompute.SELECTIVE else Recompute.FULL
        self.again = max([r.r for r in costs.repeats(shard, b, policy)]) if config.recompute != Recompute.NONE else 0.0

    def visit(self, s: int) -> Visit:
        """Return what a stage does, and what it holds."""
        at, held = self.shape.stages[s], self.held
        f, b = self.bounds.inner_exchange(self.config, s, len(self.shape.stages))
        backward = at.bi + at.bw + max(0.0, at.b_exchange - b)
        return Visit(
            self._work(s, PhaseSeconds.forward, at.f + max(0.0, at.f_exchange - f)),
            self._work(s, PhaseSeconds.backward, backward, again=True),
            self._work(s, PhaseSeconds.input_backward, at.bi + max(0.0, at.bi_exchange - b), again=True)
            if self.split else None,
            self._work(s, PhaseSeconds.weight_backward, at.bw) if self.split else None,
            held.saved[s], held.stash[s], held.workspace[s], float(self.reduce[s]),
        )  # fmt: skip

    def _work(self, s: int, phase: Phase, chain: float, *, again: bool = False) -> Work:
        """Return one phase of a stage. In an overlap group a collective cuts each layer at least once where all have
        one, and each chunk is a piece at most, or two where it is recomputed; then a piece is no longer than a layer,
        or two of different kinds, and what comes before the first layer and after the last."""
        at, last, costs = self.shape.stages[s], len(self.shape.stages) - 1, self.bounds.costs
        outer = [*([(self.embed, costs.first)] if s == 0 else []), *([(self.head, costs.last)] if s == last else [])]
        chunks = sum(len(kind) * n for kind, n in zip(costs.kinds, self.shape.kinds[s], strict=True))
        chunks += sum(len(held) for _, held in outer)
        regular = self.config.tp * self.config.cp > 1 and phase is not PhaseSeconds.weight_backward
        layer = max(phase(kind, exchange=False) for kind in self.kinds) + (self.again if again else 0.0)
        return Work(
            phase(at), phase(at, exchange=not self.overlapping), chain if self.overlapping else phase(at),
            max(1, self.shape.counts[s]) if regular else 1, chunks * (2 if again and self.again else 1),
            layer * min(2, len(self.kinds)), sum(phase(piece, exchange=False) for piece, _ in outer),
        )  # fmt: skip
