"""The order of a configuration by the list scheduler, in place of the one that its family emits."""

from __future__ import annotations

from piper_core.schedule.families import FAMILIES
from piper_core.schedule.grid import Grid
from piper_core.schedule.list_problem import pipeline_problem, to_grid
from piper_core.schedule.list_scheduler import list_schedule
from search.bound import Bounds
from search.cost.memory import TIGHT_GAPS
from search.space import Configuration

MARGIN = 0.02
"""Part of a device's memory that the order leaves to what it does not see: buffers and workspace."""


def list_grid(config: Configuration, bounds: Bounds) -> Grid:
    """Return an order of the configuration's compute on its rows that is short at the stages' own seconds and keeps
    each row's memory, without overlap groups.

    The order is kept with the bounds: bucket, prefetch and streams do not change it.

    Raises:
        InfeasibleError: no order keeps the memory of some row.
    """
    plain = config.plain
    if plain not in bounds.orders:
        bounds.orders[plain] = _list_grid(plain, bounds)
    return bounds.orders[plain]


def _list_grid(config: Configuration, bounds: Bounds) -> Grid:
    family, shape = FAMILIES[config.schedule], bounds.shape(config)
    room, lost = bounds.capacity_bytes * (1 - MARGIN) - bounds.context_bytes, 1 + TIGHT_GAPS[1]
    problem = pipeline_problem(
        config.layout, config.pp, config.virtual_stages, config.num_microbatches,
        [(s.forward(), s.input_backward(), s.weight_backward()) for s in shape.stages],
        p2p_s=shape.message_s, split_backward=family.splits_backward, hold_bytes=bounds.held(config, shape).saved,
        limit_bytes=[(room - static) / lost for static in bounds.static_bytes(config)],
    )  # fmt: skip
    return to_grid(problem, list_schedule(problem))
