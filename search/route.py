"""What the bounds of passing stages ask of a configuration, from the costs of those."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from piper_core.ir.dag import Floats
from piper_core.schedule.grid import Layout, rows_of_stage
from search.partial_bound import backward_s
from search.passage import Route, Stop, Visits, synced
from search.row_parts import RowEnds, RowSyncs, StageSync
from search.shape import Shape
from search.space import Configuration
from search.stage_costs import PhaseSeconds


def route_of(config: Configuration, shape: Shape, chains: Sequence[tuple[float, float]] | None, split: bool) -> Route:
    """Return the route, of orders that split the backward or do not; ``chains`` are what a forward and a
    backward of each distinct stage take of an overlap group at least, where those may hide collectives."""
    exchange, backward = chains is None, PhaseSeconds.input_backward if split else PhaseSeconds.backward
    stops = []
    for at, s in enumerate(shape.times.distinct):
        whole = turn = backward_s(s, split, exchange)
        if chains is not None:
            turn = max(turn, chains[at][1])
        last = backward(s) + (s.weight_backward(exchange=exchange) if split else 0.0)
        talk = s.tensor - s.bw_exchange, s.expert - s.bw_exchange, s.context - s.bw_exchange
        own = s.forward(exchange=exchange), backward(s, exchange=exchange), whole
        stops.append(Stop(s.forward(), backward(s), *own, *talk, last, turn))
    rows = rows_of_stage(config.layout, config.pp, config.virtual_stages)
    both = config.layout is Layout.BIDIRECTIONAL
    flows = np.arange(len(rows))[:, None] if both else np.asarray(shape.mine)
    hop = np.asarray([shape.message_s if a != b or len(a) > 1 else 0.0 for a, b in pairwise(rows)])
    return Route.of(np.asarray(stops)[shape.times.number], flows, hop)


def row_syncs(rows: Sequence[Sequence[int]], syncs: Sequence[Mapping[int, StageSync]]) -> RowSyncs:
    """Return what data parallelism and the update ask of each row; ``rows`` are those of each stage, and ``syncs`` has
    what a row's stages update and communicate, by stage in order."""
    each = np.asarray([list(row.values()) for row in syncs])
    update, reduce, first_reduce, gather, _ = each.transpose(2, 0, 1)
    updates, starts = update.sum(axis=1), list(rows[0])
    enter = np.maximum(updates[starts], [syncs[row][0].update + syncs[row][0].first_gather for row in starts]).min()
    at = [syncs[held[0]][s] for s, held in enumerate(rows)]
    ready = np.maximum(updates[[held[0] for held in rows]], [each.update + each.gather for each in at])
    return RowSyncs(
        updates, gather.sum(axis=1), reduce.sum(axis=1), update[:, 0], update.min(axis=1), gather, reduce, first_reduce,
        float(enter), ready, np.asarray([each.reduce for each in at]),
    )  # fmt: skip


def row_ends(config: Configuration, shape: Shape, syncs: RowSyncs, overlapping: bool, split: bool) -> RowEnds:
    """Return what data parallelism and the update add to each row at least."""
    m, zero = config.num_microbatches, config.zero
    gathers, reductions = syncs.gathers, syncs.reductions
    if zero >= 2:
        between, late = np.full(config.pp, -1.0), np.minimum.reduce(syncs.first_reduce, axis=1)
        gathers, reductions = gathers * (2 * m if zero == 3 else 1), m * reductions
        floor = np.maximum(syncs.updates + reductions, syncs.first_update + gathers)
    else:
        forward, backward, inward, hidden, whole = _visited(shape, overlapping, split)
        visits = Visits(forward, backward, inward, syncs.gather, syncs.reduce)
        between, floor = synced(visits, m, alone=config.layout is Layout.BIDIRECTIONAL)
        floor = floor + syncs.least_update
        # a row's last action is in no group, and is a BW or the backward of a microbatch's first stage
        ends = slice(None) if config.layout is Layout.BIDIRECTIONAL else slice(0, 1)
        hidden = hidden.copy()
        hidden[:, ends] = whole[:, ends]
        late = np.minimum.reduce(np.maximum(syncs.first_reduce, syncs.reduce - hidden), axis=1)
    return RowEnds(
        syncs.enter, syncs.updates, floor, late, np.maximum(gathers, reductions), between, syncs.ready,
        syncs.reduce_stage,
    )  # fmt: skip


def _visited(shape: Shape, overlapping: bool, split: bool) -> Floats:
    """Return what each stage of each row takes of a microbatch, shape (5, rows, stages of a row): forward, backward and
    what of that the stage before waits for, without what overlap groups may hide; with it, what comes last of the
    backward, and all of it."""
    known = shape.visits.get((overlapping, split))
    if known is None:
        exchange = not overlapping
        kinds = [
            (
                s.forward(exchange=exchange), backward_s(s, split, exchange),
                s.input_backward(exchange=exchange) if split else s.backward(exchange=exchange),
                s.weight_backward() if split else s.backward(), s.backward(),
            )
            for s in shape.times.distinct
        ]  # fmt: skip
        by_row = np.asarray(kinds)[shape.times.number][np.asarray(shape.mine)]
        known = shape.visits[overlapping, split] = by_row.transpose(2, 0, 1)
    return known
