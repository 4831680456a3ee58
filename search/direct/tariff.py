"""All that the actions of a step may last in one list, so that plans of the same form differ in this list alone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from piper_core.ir.dag import Floats
from piper_core.names import Collective, Sync
from search.direct.groups import everyone
from search.direct.order import Order
from search.direct.prices import Prices
from search.direct.shape import Step

NOTHING = 0
"""Where a tariff says what lasts no time."""


class Offsets(NamedTuple):
    """Where each part of a tariff begins: ``piece`` by piece of the table, ``update`` by stage, ``reduce`` and
    ``gather`` by bucket, ``send`` by pair of the order's hops, the ``norm``, and ``tie`` by tie."""

    piece: int
    update: int
    reduce: int
    gather: int
    send: int
    norm: int
    tie: int


def offsets_of(pieces: int, step: Step, order: Order) -> Offsets:
    """Return where the parts of the tariff of a step under an order begin."""
    sizes = (1, pieces, step.stages.count, len(step.buckets), len(step.buckets), len(order.hops.pairs), 1)
    return Offsets(*np.cumsum(sizes).tolist())


def tariff_of(pieces: Floats, step: Step, order: Order, prices: Prices, sync: Sync) -> Floats:
    """Return the seconds of everything that a plan of the step may hold, of its ``pieces`` to begin with."""
    sizes = step.message_bytes.tolist()
    sends = prices.sends(step.mesh, step.rows, ((sizes[s], a, b) for s, a, b in order.hops.pairs))
    norm = 0.0
    if sync is not Sync.NONE:
        norm = prices.outer(Collective.ALL_REDUCE, 4.0, everyone(sum(map(len, step.rows)), prices.gpus_per_node))
    return np.concatenate([
        [0.0], pieces, step.update, step.sync.reduce, step.sync.gather, sends, [norm],
        [tie.seconds for tie in step.ties],
    ])  # fmt: skip
