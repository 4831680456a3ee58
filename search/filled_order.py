"""The order of a schedule's family, with weight gradients where rows would wait.

A family orders actions as if forwards, backwards and weight gradients took equally long and messages no time. Here
forwards and the backwards that others wait for keep that order, and each row computes weight gradients that are due
when it would wait for another row, at the stages' own seconds; or when memory asks for it. The backwards of the last
overlap groups leave theirs for the end, when rows wait most. Zero Bubble fills its bubbles so (Qi, Wan, Huang, Lin,
arXiv 2401.10241, section 3.1); the groups are ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple, TypeAlias

from piper_core.ir.action import Action, ActionKind, Slot
from piper_core.schedule.grid import Grid

Datum: TypeAlias = tuple[bool, int, int]
"""What a forward (True) or backward of a stage makes of a microbatch."""


class StageWork(NamedTuple):
    """Seconds of one stage's actions by themselves, and in an overlap group, where others hide what they communicate;
    bytes that it keeps of a microbatch from F to B or BI, and from BI to BW."""

    alone: dict[ActionKind, float]
    grouped: dict[ActionKind, float]
    saved: float
    stash: float


def filled(
    grid: Grid, stages: Sequence[StageWork], hop_s: float, room: Sequence[float], *, late: int, wait: float
) -> Grid:
    """Return the order of ``grid`` with weight gradients where rows would wait for ``wait`` of one or longer, or for
    what has not begun.

    ``stages`` are all of the pipeline's, ``hop_s`` the seconds between rows, ``room`` the bytes of each row for
    activations, which are kept to where the order of forwards and backwards allows it. The last ``late`` overlap groups
    of a row leave their weight gradients for later; backwards outside of groups always do.
    """
    rows = [_Row(list(_without_weights(row, late)), most) for row, most in zip(grid.rows, room, strict=True)]
    home = {_datum(a): r for r, row in enumerate(rows) for slot in row.slots for a in slot}
    made: dict[Datum, float] = {}
    heap, asleep = [(0.0, r) for r in range(len(rows))], dict[int, float]()

    def there(action: Action) -> float:
        """Return when all is there that an action needs; ``inf`` while that is not known."""
        when, me = 0.0, home[_datum(action)]
        for need in _needs(action, len(stages)):
            when = max(when, made.get(need, inf) + (hop_s if home[need] != me else 0.0))
        return when

    while heap:
        now, r = heappop(heap)
        row = rows[r]
        slot = row.slots[row.done] if row.done < len(row.slots) else ()
        start = max([now, *map(there, slot)])
        full = start == now and row.held + _growth(slot, stages) > row.room
        if row.due and (not slot or full or start - now >= wait * row.seconds(stages)):
            heappush(heap, (row.weigh(now, stages), r))
        elif slot and start == now:
            end = row.run(slot, now, stages)
            heappush(heap, (end, r))
            for action in slot:
                made[_datum(action)] = end
                user = home.get(_next(action))
                if user is not None and user in asleep:
                    heappush(heap, (max(now, asleep.pop(user)), user))
        elif start == inf:
            asleep[r] = now
        elif slot:
            heappush(heap, (start, r))
    return Grid(tuple(tuple(row.order) for row in rows))


class _Row:
    """A row on its way: slots in order, how many are done; weight gradients that are due, those of late stages first,
    so that their gradients are reduced beside the rest; bytes held; what it has done in which order."""

    def __init__(self, slots: list[Slot], room: float) -> None:
        self.slots, self.room = slots, room
        self.done, self.held = 0, 0.0
        self.due: list[tuple[int, int]] = []
        self.order: list[Slot] = []

    def seconds(self, stages: Sequence[StageWork]) -> float:
        """Return what the next weight gradient takes."""
        return stages[-self.due[0][0]].alone[ActionKind.BW]

    def weigh(self, now: float, stages: Sequence[StageWork]) -> float:
        """Compute the next weight gradient; return when it ends."""
        end = now + self.seconds(stages)
        stage, microbatch = heappop(self.due)
        self.held -= stages[-stage].stash
        self.order.append((Action(-stage, ActionKind.BW, microbatch),))
        return end

    def run(self, slot: Slot, now: float, stages: Sequence[StageWork]) -> float:
        """Run the next slot; return when it ends."""
        self.done += 1
        self.held += _growth(slot, stages)
        self.order.append(slot)
        for action in slot:
            if action.kind is ActionKind.BI and action.microbatch is not None:
                heappush(self.due, (-action.stage, action.microbatch))
        works = [stages[a.stage] for a in slot]
        each = [w.alone if len(slot) == 1 else w.grouped for w in works]
        return now + sum(seconds[a.kind] for seconds, a in zip(each, slot, strict=True))


def _without_weights(row: Sequence[Slot], late: int) -> Iterator[Slot]:
    """Yield a row's slots without weight gradients; where these follow apart, backwards are input gradients alone."""
    slots = [slot for slot in row if slot[0].kind is not ActionKind.BW]
    groups = [i for i, slot in enumerate(slots) if len(slot) > 1]
    apart = {i for i, slot in enumerate(slots) if len(slot) == 1} | {*groups[max(0, len(groups) - late) :]}
    for i, slot in enumerate(slots):
        yield tuple(_inward(a) if i in apart and a.kind is ActionKind.B else a for a in slot)


def _inward(action: Action) -> Action:
    return Action(action.stage, ActionKind.BI, action.microbatch)


def _growth(slot: Slot, stages: Sequence[StageWork]) -> float:
    """Return the bytes that a slot adds to what its row holds."""
    total = 0.0
    for action in slot:
        work = stages[action.stage]
        if action.kind is ActionKind.F:
            total += work.saved
        else:
            total += (work.stash if action.kind is ActionKind.BI else 0.0) - work.saved
    return total


def _datum(action: Action) -> Datum:
    return action.kind is ActionKind.F, action.stage, action.microbatch or 0


def _next(action: Action) -> Datum:
    """Return what needs what an action makes."""
    forward, stage, microbatch = _datum(action)
    return forward, stage + (1 if forward else -1), microbatch


def _needs(action: Action, stages: int) -> list[Datum]:
    forward, stage, microbatch = _datum(action)
    if forward:
        return [(True, stage - 1, microbatch)] if stage else []
    own = (True, stage, microbatch)
    return [own] if stage == stages - 1 else [own, (False, stage + 1, microbatch)]
