"""The order of a configuration by the list scheduler, in place of the one that its family emits."""

from __future__ import annotations

from piper_core.errors import InfeasibleError
from piper_core.names import Phase
from piper_core.schedule.families import FAMILIES
from piper_core.schedule.grid import Grid
from piper_core.schedule.list_decode import Network, replay
from piper_core.schedule.list_problem import ListProblem, Order, action_of, pipeline_problem, to_grid
from piper_core.schedule.list_scheduler import list_schedule
from search.bound import Bounds
from search.cost.memory import TIGHT_GAPS
from search.partial_bound import overlaps
from search.space import Configuration

MARGIN = 0.02
"""Part of a device's memory that the order leaves to what it does not see: buffers and workspace."""


def list_grids(config: Configuration, bounds: Bounds, *, effort: int = 1) -> tuple[Grid, ...]:
    """Return orders of a configuration's compute on its rows that are short at the stages' own seconds and keep each
    row's memory: one with weight gradients at once, and where its family has them apart, one with them apart. Of a
    family with overlap groups, neighbours that need nothing of each other are one. ``effort`` is the scheduler's.

    Raises:
        InfeasibleError: no order keeps the memory of some row.
    """
    grids: list[Grid] = []
    for split in (True, False) if FAMILIES[config.schedule].splits_backward else (False,):
        problem = _problem(config, bounds, split=split)
        try:
            order = list_schedule(problem, effort=effort)
        except InfeasibleError:
            if split:
                continue
            if not grids:
                raise
        else:
            grids.append(overlapped(problem, order) if overlaps(config) else to_grid(problem, order))
    return tuple(grids)


def _problem(config: Configuration, bounds: Bounds, *, split: bool) -> ListProblem:
    shape, exchange = bounds.shape(config), not overlaps(config)
    room, lost = bounds.capacity_bytes * (1 - MARGIN) - bounds.context_bytes, 1 + TIGHT_GAPS[1]
    return pipeline_problem(
        config.layout, config.pp, config.virtual_stages, config.num_microbatches,
        [(s.forward(exchange=exchange), s.input_backward(exchange=exchange), s.weight_backward(exchange=exchange))
         for s in shape.stages],
        p2p_s=shape.message_s, split_backward=split, hold_bytes=bounds.held(config, shape).saved,
        limit_bytes=[(room - static) / lost for static in bounds.static_bytes(config)],
    )  # fmt: skip


def overlapped(problem: ListProblem, order: Order) -> Grid:
    """Return an order whose neighbours on a row, a forward and a backward, are one overlap group where what the second
    needs is there when the first begins: then no group waits for itself."""
    done = replay(Network.of(problem), order)
    assert done is not None
    start, seconds = done.start_s, problem.seconds
    ready = [max((start[p] + seconds[p] + d for p, d in preds), default=0.0) for preds in problem.preds]
    rows = []
    for tasks in order:
        slots, i = [], 0
        while i < len(tasks):
            one, two = tasks[i], tasks[i + 1] if i + 1 < len(tasks) else -1
            pair = two >= 0 and ready[two] <= start[one] and _meet(problem, one, two)
            slots.append(tuple(action_of(problem, t) for t in (tasks[i : i + 2] if pair else [one])))
            i += 1 + pair
        rows.append(tuple(slots))
    return Grid(tuple(rows))


def _meet(problem: ListProblem, one: int, two: int) -> bool:
    """Say whether one is a forward and the other a backward, of different microbatches."""
    (_, a, first), (_, b, second) = problem.key[one], problem.key[two]
    return (a == Phase.F) != (b == Phase.F) and Phase.BW not in (a, b) and first != second
