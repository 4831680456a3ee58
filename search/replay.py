"""When each row is done at the earliest under the order of a grid: the replay behind the level 2 bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from piper_core.ir.action import ActionKind
from piper_core.schedule.families import get_family
from piper_core.schedule.grid import rows_of_stage

F, B, BI, BW = range(4)
PHASES = 4
_CODE = {ActionKind.F: F, ActionKind.B: B, ActionKind.BI: BI, ActionKind.BW: BW}

Op = tuple[int, int, bool, int]
"""(stage * PHASES + phase; result that it needs, -1 for none; whether that comes from another row; its own result)."""


@dataclass(frozen=True, slots=True)
class Numbered:
    """The order of a family as numbers: rows of slots of operations, and how many results there are."""

    rows: tuple[tuple[tuple[Op, ...], ...], ...]
    results: int


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


@lru_cache(maxsize=128)
def numbered(schedule: str, pp: int, m: int, v: int) -> Numbered:
    """Return the order that a family emits."""
    family = get_family(schedule)
    grid = family.grid(pp, m, v)
    rows_of = rows_of_stage(family.layout, pp, v)
    stages = len(rows_of)
    hop = [a != b or len(a) > 1 for a, b in pairwise(rows_of)]

    def operation(stage: int, code: int, mb: int) -> Op:
        if code == F:
            return stage * PHASES, (stage - 1) * m + mb if stage else -1, stage > 0 and hop[stage - 1], stage * m + mb
        if code == BW:
            return stage * PHASES + BW, -1, False, -1
        last = stage == stages - 1
        need = -1 if last else (stages + stage + 1) * m + mb
        return stage * PHASES + code, need, not last and hop[stage], (stages + stage) * m + mb

    rows = tuple(
        tuple(tuple(operation(a.stage, _CODE[a.kind], a.microbatch or 0) for a in slot) for slot in row)
        for row in grid.rows
    )
    return Numbered(rows, 2 * stages * m)


def replay(order: Numbered, times: Times) -> Ends:
    """Run every row as early as its order, the data and the messages allow.

    An overlap group is taken to be as short as any way to interleave its members: they share the row's compute, each
    may start as soon as what it needs is there, and none waits for the other.
    """
    whole, message = times.whole, times.message
    done = [-1.0] * order.results
    clock = list(times.start)
    last: list[dict[int, tuple[float, float]]] = [{} for _ in order.rows]
    first = [dict(each) for each in times.first]
    cursor = [0] * len(order.rows)
    waiting: dict[int, int] = {}
    ready = list(range(len(order.rows) - 1, -1, -1))
    while ready:
        r = ready.pop()
        slots, now, i = order.rows[r], clock[r], cursor[r]
        n, pending, ended = len(slots), first[r], last[r]
        while i < n:
            slot = slots[i]
            missing = next((need for _, need, _, _ in slot if need >= 0 and done[need] < 0.0), -1)
            if missing >= 0:
                waiting[missing] = r
                break
            if len(slot) > 1:
                now = _group(slot, now, times, done, ended)
            else:
                at, need, hop, result = slot[0]
                begin = now
                if need >= 0:
                    there = done[need] + message if hop else done[need]
                    if there > begin:
                        begin = there
                now = begin + whole[at]
                phase = at % PHASES
                if phase == F:
                    if pending and at // PHASES in pending:
                        earliest, least = pending.pop(at // PHASES)
                        now = max(now, earliest + whole[at], least)
                elif phase != BI:
                    ended[at // PHASES] = begin, now
                if result >= 0:
                    done[result] = now
            i += 1
            for op in slot:
                if op[3] >= 0 and op[3] in waiting:
                    ready.append(waiting.pop(op[3]))
        clock[r], cursor[r] = now, i
    return Ends(clock, last)


def _group(
    slot: tuple[Op, ...], now: float, times: Times, done: list[float], ended: dict[int, tuple[float, float]]
) -> float:
    """Run an overlap group; return when its row is free again."""
    members = []
    for at, need, hop, result in slot:
        there = -1.0 if need < 0 else done[need] + (times.message if hop else 0.0)
        members.append((max(now, there), at, result))
    busy, latest = now, now + sum(times.gathers[op[0]] for op in slot)
    for begin, at, result in sorted(members):
        busy = max(busy, begin) + times.compute[at]
        end = begin + max(times.chain[at], times.compute[at])
        latest = max(latest, begin + times.chain[at])
        if at % PHASES != F:
            ended[at // PHASES] = begin, end
        if result >= 0:
            done[result] = end
    return max(busy, latest)
