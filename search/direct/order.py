"""Orders of compute as arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from piper_core.ir.action import PHASE_OF_KIND
from piper_core.ir.dag import Ints, Mask
from piper_core.names import Phase
from piper_core.schedule.families import get_family
from piper_core.schedule.grid import Grid
from search.sized import sized_cache


@dataclass(frozen=True, slots=True)
class Order:
    """The macro actions of all rows, row by row in order; columns of shape (M,).

    ``position`` counts on the row. ``turn`` is an action's place in its overlap group, ``group`` the position of the
    group's first, ``among`` its size (0, the own position and 1 outside of groups). ``find`` (phase, stage, microbatch)
    is the macro of each, -1: none; ``back`` and ``weight`` (stage, microbatch) are B, or BI and BW.

    Holders are the pairs of a stage and a row that holds it, by stage: ``holder`` (rows, stages) finds one; of each,
    ``first`` is the first forward and ``last`` the last whole or weight backward. Of each stage, ``first_of`` and
    ``last_of`` are the same over all its rows. ``end`` is the last such backward of each row. ``phases`` occur;
    ``grouped`` says whether there are overlap groups; ``runs`` (phases, rows, stages) counts macro actions.
    """

    row: Ints
    stage: Ints
    phase: Ints
    microbatch: Ints
    position: Ints
    turn: Ints
    group: Ints
    among: Ints
    find: Ints
    back: Ints
    weight: Ints
    holder: Ints
    holder_stage: Ints
    holder_row: Ints
    first: Ints
    last: Ints
    first_of: Ints
    last_of: Ints
    end: Ints
    phases: tuple[Phase, ...]
    grouped: bool
    hops: Hops
    runs: Ints

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True, slots=True)
class Hops:
    """Where data goes from one stage to the next, or gradients back: columns of shape (H,), activations first.

    ``source`` and ``target`` are macro actions on different rows; ``forward`` says whether an activation goes, out of
    or into stage ``boundary``; ``line`` numbers the ``channels`` that occur, and ``pair`` the ``pairs`` of
    (boundary, row, row). ``near`` are (source, target) on one row.
    """

    source: Ints
    target: Ints
    forward: Mask
    boundary: Ints
    line: Ints
    channels: int
    pair: Ints
    pairs: tuple[tuple[int, int, int], ...]
    near: tuple[Ints, Ints]


@sized_cache(1_000_000)  # macro actions, 150 bytes each
def family_order(schedule: str, pp: int, m: int, v: int, stages: int) -> Order:
    """Return the order that a family emits."""
    return order_of(get_family(schedule).grid(pp, m, v), stages, m)


def order_of(grid: Grid, stages: int, m: int) -> Order:
    """Return the arrays of a grid."""
    code = {kind: int(phase) for kind, phase in PHASE_OF_KIND.items()}
    flat = [action for row in grid.rows for slot in row for action in slot]
    table = np.asarray([(a.stage, code[a.kind], a.microbatch) for a in flat], np.int32).reshape(-1, 3)
    sizes = [sum(map(len, row)) for row in grid.rows]
    row = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    position = np.concatenate([np.arange(size, dtype=np.int32) for size in sizes])
    count = np.asarray([len(slot) for row in grid.rows for slot in row], np.int32)
    among = np.repeat(count, count)
    turn = (np.arange(len(flat)) - np.repeat(np.cumsum(count) - count, count)).astype(np.int32)
    stage, phase, microbatch = (np.ascontiguousarray(column) for column in table.T)
    find = np.full((4, stages, m), -1, np.int32)
    find[phase, stage, microbatch] = np.arange(len(flat))
    back = np.where(find[Phase.B] < 0, find[Phase.BI], find[Phase.B])
    weight = np.where(find[Phase.B] < 0, find[Phase.BW], find[Phase.B])
    by = np.lexsort((row, position))  # macros as they come, of several rows the first
    forwards = by[phase[by] == Phase.F]
    weights = by[(phase[by] == Phase.B) | (phase[by] == Phase.BW)]
    holder = np.full((len(sizes), stages), -1, np.int32)
    pairs = np.unique(stage[forwards].astype(np.int64) * len(sizes) + row[forwards])
    holder_stage, holder_row = pairs // len(sizes), pairs % len(sizes)
    holder[holder_row, holder_stage] = np.arange(len(pairs))
    first, last = np.zeros(len(pairs), np.int64), np.zeros(len(pairs), np.int64)
    first_of, last_of = np.zeros(stages, np.int64), np.zeros(stages, np.int64)
    end = np.zeros(len(sizes), np.int64)
    first[holder[row[forwards], stage[forwards]][::-1]] = forwards[::-1]
    first_of[stage[forwards][::-1]] = forwards[::-1]
    last[holder[row[weights], stage[weights]]] = weights
    last_of[stage[weights]] = weights
    end[row[weights]] = weights
    return Order(
        row, stage, phase, microbatch, position, turn, position - turn, among, find, back, weight, holder,
        holder_stage, holder_row, first, last, first_of, last_of, end,
        tuple(Phase(p) for p in np.flatnonzero(np.bincount(phase)).tolist()), bool((count > 1).any()),
        _hops(row, stage, find[Phase.F], back, len(sizes)), runs_of(phase, row, stage, len(sizes), stages),
    )  # fmt: skip


def runs_of(phase: Ints, row: Ints, stage: Ints, rows: int, stages: int) -> Ints:
    """Return how many macro actions there are of each (phase, row, stage)."""
    key = (phase.astype(np.int64) * rows + row) * stages + stage
    return np.bincount(key, minlength=4 * rows * stages).reshape(4, rows, stages)


def _hops(row: Ints, stage: Ints, forwards: Ints, back: Ints, rows: int) -> Hops:
    """Return where data goes; ``forwards`` and ``back`` (stages, microbatches) are macro actions."""
    source = np.concatenate([forwards[:-1].ravel(), back[1:].ravel()])
    target = np.concatenate([forwards[1:].ravel(), back[:-1].ravel()])
    forward = np.arange(len(source)) < len(source) // 2
    apart = row[source] != row[target]
    near = source[~apart], target[~apart]
    source, target, forward = source[apart], target[apart], forward[apart]
    a, b = row[source].astype(np.int64), row[target].astype(np.int64)
    boundary = np.where(forward, stage[source], stage[target])
    channel = (a * rows + b) * 2 + ~forward
    used = np.zeros(2 * rows * rows, np.bool_)
    used[channel] = True
    line = np.cumsum(used)[channel] - 1
    some, pair = np.unique((boundary * rows + a) * rows + b, return_inverse=True)
    pairs = tuple((key // rows // rows, key // rows % rows, key % rows) for key in some.tolist())
    return Hops(source, target, forward, boundary, line, int(used.sum()), pair, pairs, near)
