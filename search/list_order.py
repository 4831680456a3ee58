"""The order of a configuration by list scheduling, in place of the one that its family emits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from piper_core.errors import InfeasibleError
from piper_core.ir.action import ActionKind
from piper_core.names import Phase
from piper_core.schedule.families import FAMILIES, get_family
from piper_core.schedule.grid import Grid
from piper_core.schedule.list_decode import Network, replay
from piper_core.schedule.list_problem import ListProblem, Order, action_of, pipeline_problem, slackened, to_grid
from piper_core.schedule.list_scheduler import list_schedule
from search.bound import Bounds
from search.cost.memory import TIGHT_GAPS
from search.filled_order import StageWork, filled
from search.partial_bound import overlaps
from search.space import Configuration
from search.stage_costs import PhaseSeconds

MARGIN = 0.02
"""Part of a device's memory that the order leaves to what it does not see: buffers and workspace."""
LONGEST = 8_000
"""Actions of a step up to which an order is found from nothing (16,000 take it 10 s and more)."""
TALK = 0.05
"""Seconds of collectives that overlap groups may hide, for each of compute, up to which an order is found from nothing,
without them. Of 123 configurations of six problems that were made 19 of 29 quicker than any filled order, by up to 3 %,
with less, and 15 of 94 with more, none within 4 % of the best."""
LONGEST_FILLED = 60_000
"""Actions of a step up to which its family's order is filled (0.3 s for each of 25,000)."""
WAITS = 0.6, 0.3
"""Parts of a weight gradient for which a row would wait from which on it computes one."""


def actions(config: Configuration) -> int:
    """Return the actions of a step whose backwards are cut."""
    return 3 * config.stages * config.num_microbatches


def orderable(config: Configuration) -> bool:
    """Say whether :func:`list_grids` has orders of a configuration: there are others, and it is not too long."""
    longest = LONGEST_FILLED if FAMILIES[config.schedule].splits_backward else LONGEST
    return config.pp > 1 and config.num_microbatches > 1 and actions(config) <= longest


def list_grids(config: Configuration, bounds: Bounds, *, effort: int = 1) -> tuple[Grid, ...]:
    """Return orders of a configuration's compute on its rows that are short at the stages' own seconds and keep each
    row's memory: its family's with weight gradients where rows would wait, where that has them apart; and, of steps
    that are not too long and have little to hide in overlap groups, orders found from nothing. ``effort`` is the
    scheduler's.

    Raises:
        InfeasibleError: no order keeps the memory of some row.
    """
    found = tuple(_filled(config, bounds)) if FAMILIES[config.schedule].splits_backward else ()
    if found and (actions(config) > LONGEST or _talk(config, bounds) > TALK):
        return found
    try:
        return *found, *_scheduled(config, bounds, effort)
    except InfeasibleError:
        if not found:
            raise
        return found


def _filled(config: Configuration, bounds: Bounds) -> Iterator[Grid]:
    """Yield the family's order, filled: more and fewer overlap groups leave their weight gradients for later."""
    shape, pp = bounds.shape(config), config.pp
    held, slower = bounds.held(config, shape), bounds.cost.overlap_slowdown - 1
    family = get_family(config.schedule).grid(pp, config.num_microbatches, config.virtual_stages)
    works = [
        _work(piece, slower, saved, stash)
        for piece, saved, stash in zip(shape.stages, held.saved, held.stash, strict=True)
    ]
    room = bounds.room(config, TIGHT_GAPS[1], bounds.capacity_bytes * (1 - MARGIN)) - max(held.workspace)
    lates = [(pp, WAITS[0]), (2 * pp, WAITS[0]), (pp // 2, WAITS[0])] if overlaps(config) else [(0, WAITS[0])]
    for late, wait in [*lates, (lates[0][0], WAITS[1])]:
        yield filled(family, works, shape.message_s, room.tolist(), late=late, wait=wait)


def _talk(config: Configuration, bounds: Bounds) -> float:
    """Return the seconds that overlap groups may hide, for each of compute."""
    stages = bounds.shape(config).stages if overlaps(config) else ()
    alone = sum(s.forward(exchange=False) + s.backward(exchange=False) for s in stages)
    return sum(s.forward() + s.backward() for s in stages) / alone - 1 if stages else 0.0


def _work(piece: PhaseSeconds, slower: float, saved: float, stash: float) -> StageWork:
    """Return the costs of one stage; in an overlap group what it communicates slows compute down, and no more."""
    alone = {
        ActionKind.F: piece.forward(), ActionKind.B: piece.backward(), ActionKind.BI: piece.input_backward(),
        ActionKind.BW: piece.weight_backward(),
    }  # fmt: skip
    compute = {
        ActionKind.F: piece.forward(exchange=False), ActionKind.B: piece.backward(exchange=False),
        ActionKind.BI: piece.input_backward(exchange=False),
    }  # fmt: skip
    grouped = {kind: seconds + slower * (alone[kind] - seconds) for kind, seconds in compute.items()}
    return StageWork(alone, grouped, saved, stash)


def _scheduled(config: Configuration, bounds: Bounds, effort: int) -> tuple[Grid, ...]:
    """Return orders found from nothing: one with weight gradients at once, and where the family has them apart, one
    with them apart. One that leaves some backward no room for its workspace is followed by one that does, if there
    is one. Of a family with overlap groups, neighbours that need nothing of each other are one."""
    held, grids = bounds.held(config, bounds.shape(config)), list[Grid]()
    for split in (True, False) if FAMILIES[config.schedule].splits_backward else (False,):
        problem = problem_of(config, bounds, split=split)
        try:
            order = list_schedule(problem, effort=effort)
        except InfeasibleError:
            if split or grids:
                continue
            raise
        orders = [(problem, order)]
        if crowded(problem, order, held.workspace):
            with suppress(InfeasibleError):
                spared = spare(problem, held.workspace)
                orders.append((spared, list_schedule(spared, effort=effort)))
        grids += [overlapped(each, found) if overlaps(config) else to_grid(each, found) for each, found in orders]
    return tuple(grids)


def crowded(problem: ListProblem, order: Order, workspace: Sequence[float]) -> bool:
    """Say whether some backward of an order has no room for the ``workspace`` of its stage, in bytes, beside what its
    row holds."""
    for tasks, limit in zip(order, problem.limit_bytes, strict=True):
        now = 0.0
        for task in tasks:
            stage, phase, _ = problem.key[task]
            now += problem.hold_bytes[task]
            if phase in (Phase.B, Phase.BI) and now + workspace[stage] > slackened(limit):
                return True
            now -= problem.release_bytes[task]
    return False


def spare(problem: ListProblem, workspace: Sequence[float]) -> ListProblem:
    """Return a problem whose rows leave room for the largest ``workspace`` of their stages, in bytes."""
    most = [0.0] * problem.rows
    for row, (stage, _, _) in zip(problem.row, problem.key, strict=True):
        most[row] = max(most[row], workspace[stage])
    return replace(problem, limit_bytes=[a - b for a, b in zip(problem.limit_bytes, most, strict=True)])


def problem_of(config: Configuration, bounds: Bounds, *, split: bool) -> ListProblem:
    """Return what the list scheduler orders of a configuration."""
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
