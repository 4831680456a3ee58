"""What the bounds of passing stages ask of a configuration, from the costs of those."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from piper_core.ir.dag import Floats
from piper_core.schedule.grid import Layout, rows_of_stage
from search.partial_bound import backward_s
from search.passage import Route, Stop, Visit, synced
from search.row_parts import StageSync
from search.shape import Shape
from search.space import Configuration
from search.stage_costs import PhaseSeconds


def route_of(config: Configuration, shape: Shape, chains: Floats | None, split: bool) -> Route:
    """Return the route, of orders that split the backward or do not; ``chains``, shape (stages, 2), are what forwards
    and backwards take of overlap groups at least, where those may hide collectives."""
    exchange, backward = chains is None, PhaseSeconds.input_backward if split else PhaseSeconds.backward
    stops = []
    for s in shape.times.distinct:
        whole = backward_s(s, split, exchange)
        last = backward(s) + (s.weight_backward(exchange=exchange) if split else 0.0)
        talk = s.tensor - s.bw_exchange, s.expert - s.bw_exchange, s.context - s.bw_exchange
        own = s.forward(exchange=exchange), backward(s, exchange=exchange), whole
        stops.append(Stop(s.forward(), backward(s), *own, *talk, last, whole))
    each = np.asarray(stops)[shape.times.number]
    if chains is not None:
        each[:, -1] = np.maximum(each[:, -1], chains[:, 1])
    rows = rows_of_stage(config.layout, config.pp, config.virtual_stages)
    both = config.layout is Layout.BIDIRECTIONAL
    flows = np.arange(len(rows))[:, None] if both else np.asarray(shape.mine)
    hop = np.asarray([shape.message_s if a != b or len(a) > 1 else 0.0 for a, b in pairwise(rows)])
    return Route.of(each, flows, hop)


def synced_of(
    config: Configuration, shape: Shape, syncs: Mapping[int, StageSync], overlapping: bool, split: bool
) -> tuple[float, float]:
    """Return what :func:`~search.passage.synced` does of a row, whose stages' collectives ``syncs`` has."""
    exchange, visits = not overlapping, []
    for s, each in sorted(syncs.items()):
        stage = shape.stages[s]
        inward = stage.input_backward(exchange=exchange) if split else stage.backward(exchange=exchange)
        whole = backward_s(stage, split, exchange)
        visits.append(Visit(stage.forward(exchange=exchange), whole, inward, each.gather, each.reduce))
    return synced(visits, config.num_microbatches, alone=config.layout is Layout.BIDIRECTIONAL)
