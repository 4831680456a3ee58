"""When each row is done at the earliest under the order of a grid: the replay behind the level 2 bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from piper_core.ir.action import ActionKind
from piper_core.ir.dag import Ints
from piper_core.jit import Loops
from piper_core.schedule.families import get_family
from piper_core.schedule.grid import rows_of_stage
from search.sized import sized_cache

F, B, BI, BW = range(4)
PHASES = 4
_CODE = {ActionKind.F: F, ActionKind.B: B, ActionKind.BI: BI, ActionKind.BW: BW}

Column = Any
"""Numbers: a list, or an array for compiled loops."""


@dataclass(frozen=True, slots=True)
class Numbered:
    """The order of a family as numbers, as lists and as arrays: the row of each slot, which comes after all that it
    needs; the first operation of each slot; of each operation ``stage * PHASES + phase``, the result that it needs (-1:
    none), whether that comes from another row, and its own result. Besides the number of rows, the most operations of a
    slot, and how many results there are."""

    listed: tuple[list[int], ...]
    arrays: tuple[Column, ...]
    rows: int
    widest: int
    results: int

    def __len__(self) -> int:
        return len(self.listed[2])


@dataclass(frozen=True, slots=True)
class Times:
    """What the replay takes from a configuration, in seconds.

    ``whole`` is an action by itself, by stage * PHASES + phase. In an overlap group an action takes ``compute`` of its
    row, and ``chain`` from its start to its result; gathering its parameters takes ``gathers`` once the group has
    started. ``start`` is when each row may begin; the first forward of a stage on a row starts and ends no earlier than
    ``first[row][stage]``.
    """

    whole: Sequence[float]
    compute: Sequence[float]
    chain: Sequence[float]
    gathers: Sequence[float]
    message: float
    start: Sequence[float]
    first: Sequence[dict[int, tuple[float, float]]]


@dataclass(frozen=True, slots=True)
class Ends:
    """When each row's compute ends, and for each row and stage (start, end) of the last backward that adds to its
    gradient."""

    rows: list[float]
    last: list[dict[int, tuple[float, float]]]


@sized_cache(2_000_000)  # operations, 150 bytes each
def numbered(schedule: str, pp: int, m: int, v: int) -> Numbered:
    """Return the order that a family emits."""
    family = get_family(schedule)
    grid = family.grid(pp, m, v)
    rows_of = rows_of_stage(family.layout, pp, v)
    stages = len(rows_of)
    hop = np.asarray([a != b or len(a) > 1 for a, b in pairwise([(), *rows_of, ()])], np.int64)
    hop[[0, -1]] = 0
    slots = [slot for row in grid.rows for slot in row]
    stage, code, mb = np.asarray([(a.stage, _CODE[a.kind], a.microbatch or 0) for slot in slots for a in slot]).T
    forward, apart = code == F, code == BW
    free = apart | np.where(forward, stage == 0, stage == stages - 1)
    columns = np.stack([
        stage * PHASES + code,
        np.where(free, -1, np.where(forward, stage - 1, stages + stage + 1) * m + mb),
        np.where(free, 0, hop[np.where(forward, stage, stage + 1)]),
        np.where(apart, -1, np.where(forward, stage, stages + stage) * m + mb),
    ])  # fmt: skip
    first, row_first = [0, *accumulate(map(len, slots))], [0, *accumulate(map(len, grid.rows))]
    turns = _turns(row_first, first, columns[1], columns[3], 2 * stages * m)
    row_of = np.searchsorted(row_first, turns, "right") - 1
    sizes = np.diff(first)[turns]
    slot_first = np.concatenate(([0], np.cumsum(sizes)))
    places = np.arange(len(stage)) + np.repeat(np.asarray(first)[turns] - slot_first[:-1], sizes)
    arrays = tuple(column.astype(np.int32) for column in (row_of, slot_first, *columns[:, places]))
    listed = tuple(column.tolist() for column in arrays)
    return Numbered(listed, arrays, len(grid.rows), int(sizes.max()), 2 * stages * m)


def _turns(row_first: list[int], slot_first: list[int], need: Ints, result: Ints, results: int) -> Ints:
    """Return slots such that each comes after the one before on its row and after all that it needs."""
    loops, rows, slots = LOOPS.pick(len(need)), len(row_first) - 1, len(slot_first) - 1
    given = [np.asarray(each, np.int32) for each in (row_first, slot_first, need, result)]
    room = [np.full(n, value, np.int32) for n, value in ((results, 0), (results, -1), (rows, 0), (rows, 0), (slots, 0))]
    columns = [*given, *room] if loops.compiled else [each.tolist() for each in (*given, *room)]
    loops.sort(*columns)
    return np.asarray(columns[-1])


def replay(order: Numbered, times: Times) -> Ends:
    """Run every row as early as its order, the data and the messages allow.

    An overlap group is taken to be as short as any way to interleave its members: they share the row's compute, each
    may start as soon as what it needs is there, and none waits for the other.
    """
    loops = LOOPS.pick(len(order))
    rows, stages = len(times.start), len(times.whole) // PHASES

    def room(n: int, value: float) -> Column:
        return np.full(n, value) if loops.compiled else [value] * n

    def count(n: int, value: int) -> Column:
        return np.full(n, value, np.int32) if loops.compiled else [value] * n

    def take(values: Sequence[float]) -> Column:
        return np.asarray(values or [0.0], np.float64) if loops.compiled else values

    firsts = [0.0] * (2 * rows * stages)
    for row, each in enumerate(times.first):
        for stage, pair in each.items():
            firsts[2 * (row * stages + stage) : 2 * (row * stages + stage) + 2] = pair
    clock, last = take(list(times.start)), room(2 * rows * stages, -1.0)
    loops.run(
        *(order.arrays if loops.compiled else order.listed),
        take(times.whole), take(times.compute), take(times.chain), take(times.gathers), times.message, take(firsts),
        stages, clock, last, room(order.results, -1.0), count(rows * stages, 1), room(order.widest, 0.0),
        count(order.widest, 0),
    )  # fmt: skip
    if loops.compiled:
        clock, last = clock.tolist(), last.tolist()
    ends = [{s: (last[2 * at], last[2 * at + 1]) for s in range(stages) if last[2 * (at := r * stages + s) + 1] >= 0.0}
            for r in range(rows)]  # fmt: skip
    return Ends(clock, ends)


def peaks_of(order: Numbered, saved: Sequence[float], workspace: Sequence[float]) -> list[float]:
    """Return the most that each row holds at once between F and B or BI, ``saved`` of each stage, and with the
    ``workspace`` of a backward when that starts; in an overlap group what ends counts first."""
    loops = LOOPS.pick(len(order))
    if not loops.compiled:
        peaks: list[float] = [0.0] * order.rows
        loops.held(*order.listed[:3], saved, workspace, [0.0] * order.rows, peaks)
        return peaks
    now, found = np.zeros(order.rows), np.zeros(order.rows)
    loops.held(*order.arrays[:3], np.asarray(saved, np.float64), np.asarray(workspace, np.float64), now, found)
    return [float(peak) for peak in found]


def run(
    row_of: Column, slot_first: Column, at: Column, need: Column, hop: Column, result: Column,
    whole: Column, compute: Column, chain: Column, gathers: Column, message: float, firsts: Column,
    stages: int, clock: Column, last: Column, done: Column, pending: Column, begins: Column, members: Column,
) -> None:  # fmt: skip
    """Fill ``clock`` (rows,), which holds the starts, and ``last`` (rows x stages x 2); the rest is room to work in."""
    for i in range(len(row_of)):
        r, low, high = row_of[i], slot_first[i], slot_first[i + 1]
        now = clock[r]
        if high - low > 1:
            # a group: those that may begin first come first, ties by operation
            gathered = 0.0
            for o in range(low, high):
                gathered += gathers[at[o]]
                there = -1.0
                if need[o] >= 0:
                    there = done[need[o]] + (message if hop[o] else 0.0)
                begin, k = max(now, there), o - low
                while k > 0 and (begins[k - 1] > begin or (begins[k - 1] == begin and at[members[k - 1]] > at[o])):
                    begins[k], members[k] = begins[k - 1], members[k - 1]
                    k -= 1
                begins[k], members[k] = begin, o
            busy, latest = now, now + gathered
            for k in range(high - low):
                o, begin = members[k], begins[k]
                a = at[o]
                busy = max(busy, begin) + compute[a]
                end = begin + max(chain[a], compute[a])
                latest = max(latest, begin + chain[a])
                if a % 4 != 0:
                    place = 2 * (r * stages + a // 4)
                    last[place], last[place + 1] = begin, end
                if result[o] >= 0:
                    done[result[o]] = end
            now = max(busy, latest)
        else:
            a = at[low]
            begin = now
            if need[low] >= 0:
                there = done[need[low]]
                if hop[low]:
                    there += message
                if there > begin:
                    begin = there
            now = begin + whole[a]
            place = r * stages + a // 4
            if a % 4 == 0:
                if pending[place]:
                    pending[place] = 0
                    now = max(now, firsts[2 * place] + whole[a], firsts[2 * place + 1])
            elif a % 4 != 2:
                last[2 * place], last[2 * place + 1] = begin, now
            if result[low] >= 0:
                done[result[low]] = now
        clock[r] = now


def sort(
    row_first: Column, slot_first: Column, need: Column, result: Column,
    done: Column, waiting: Column, cursor: Column, ready: Column, turns: Column,
) -> None:  # fmt: skip
    """Fill ``turns`` (slots,) with slots that need nothing of later ones; the four before it are room to work in."""
    count, n = len(cursor), 0
    for r in range(count):
        cursor[r] = row_first[r]
        ready[r] = count - 1 - r
    while count > 0:
        count -= 1
        r = ready[count]
        i, missing = cursor[r], -1
        while i < row_first[r + 1]:
            for o in range(slot_first[i], slot_first[i + 1]):
                if missing < 0 and need[o] >= 0 and not done[need[o]]:
                    missing = need[o]
            if missing >= 0:
                waiting[missing] = r
                break
            turns[n] = i
            n += 1
            for o in range(slot_first[i], slot_first[i + 1]):
                if result[o] >= 0:
                    done[result[o]] = 1
                    if waiting[result[o]] >= 0:
                        ready[count] = waiting[result[o]]
                        count += 1
            i += 1
        cursor[r] = i


def held(
    row_of: Column, slot_first: Column, at: Column, saved: Column, workspace: Column, now: Column, peaks: Column
) -> None:
    """Fill ``peaks`` (rows,) with the most that each row holds: see :func:`peaks_of`; ``now`` is room to work in."""
    for i in range(len(row_of)):
        r = row_of[i]
        for o in range(slot_first[i], slot_first[i + 1]):
            if at[o] % 4 == 1 or at[o] % 4 == 2:
                peaks[r] = max(peaks[r], now[r] + workspace[at[o] // 4])
                now[r] -= saved[at[o] // 4]
        for o in range(slot_first[i], slot_first[i + 1]):
            if at[o] % 4 == 0:
                now[r] += saved[at[o] // 4]
        peaks[r] = max(peaks[r], now[r])


LOOPS = Loops(held, sort, run)
