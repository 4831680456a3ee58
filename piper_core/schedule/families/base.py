"""What a schedule family is: for which degrees it is defined, and the grid that it makes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol

from piper_core.errors import ScheduleError
from piper_core.ir.action import Action, ActionKind, Slot
from piper_core.schedule.grid import Grid, Layout

Rows = Sequence[Sequence[Slot]]

_slots: dict[tuple[int, ActionKind], tuple[Slot, ...]] = {}


def at_least(start: int, step: int = 1) -> range:
    """Return start, start + step, ... without an end that matters."""
    return range(start, sys.maxsize, step)


def slots(stage: int, kind: ActionKind, m: int) -> tuple[Slot, ...]:
    """Return the actions of one stage and kind, at least those of microbatches 0 to m - 1, each a slot.

    The same objects are returned every time: making an action costs more than placing it.
    """
    made = _slots.get((stage, kind), ())
    if len(made) < m:
        made += tuple((Action(stage, kind, i),) for i in range(len(made), m))
        _slots[stage, kind] = made
    return made


def forwards(stage: int, m: int) -> tuple[Slot, ...]:
    """Return F of microbatches 0, 1, ... (see :func:`slots`)."""
    return slots(stage, ActionKind.F, m)


def backwards(stage: int, m: int) -> tuple[Slot, ...]:
    """Return B, the whole backward, of microbatches 0, 1, ..."""
    return slots(stage, ActionKind.B, m)


def input_backwards(stage: int, m: int) -> tuple[Slot, ...]:
    """Return BI of microbatches 0, 1, ..."""
    return slots(stage, ActionKind.BI, m)


def weight_backwards(stage: int, m: int) -> tuple[Slot, ...]:
    """Return BW of microbatches 0, 1, ..."""
    return slots(stage, ActionKind.BW, m)


class Family(Protocol):
    """A published rule that orders F and backward of m microbatches on p rows of v virtual stages.

    ``name`` is its word in text and options; ``layout`` says which row holds which stage;
    ``splits_backward`` whether it uses BI and BW in place of B anywhere.
    """

    name: str
    layout: Layout
    splits_backward: bool

    def degrees(self) -> range:
        """Return the legal pipeline degrees p (rows)."""
        return at_least(1)

    def virtual_stages(self, p: int) -> range:
        """Return the legal numbers v of virtual stages of a row."""
        return range(2, 3) if self.layout is Layout.V else range(1, 2)

    def microbatches(self, p: int, v: int) -> range:
        """Return the legal numbers m of microbatches."""
        return at_least(1)

    def check(self, p: int, m: int, v: int) -> None:
        """Accept the degrees, or say which are legal.

        Raises:
            ScheduleError: p, v or m is outside what the family is defined for; names the nearest legal.
        """
        self._among("p", "pipeline rows", p, self.degrees())
        self._among("v", "virtual stages a row", v, self.virtual_stages(p))
        self._among("m", f"microbatches at p={p}", m, self.microbatches(p, v))

    def grid(self, p: int, m: int, v: int) -> Grid:
        """Order the compute of every row.

        Raises:
            ScheduleError: as :meth:`check`.
        """
        self.check(p, m, v)
        return Grid(tuple(map(tuple, self.rows(p, m, v))))

    def rows(self, p: int, m: int, v: int) -> Rows:
        """Order the compute of every row at degrees that are known to be legal."""
        ...

    def _among(self, letter: str, what: str, value: int, legal: range) -> None:
        if value in legal:
            return
        nearest = " or ".join(f"{letter}={x}" for x in nearest_in(legal, value))
        raise ScheduleError(
            f"{self.name} is not defined for {value} {what}",
            expected=f"{letter} {_words(legal)}",
            found=f"{letter}={value}",
            hint=f"{nearest} would do",
        )


def nearest_in(legal: range, value: int) -> tuple[int, ...]:
    """Return the nearest members of a range below and above a value that it lacks."""
    if value <= legal[0]:
        return (legal[0],)
    if value >= legal[-1]:
        return (legal[-1],)
    below = legal[(value - legal.start) // legal.step]
    return (below, below + legal.step)


def _words(legal: range) -> str:
    if len(legal) == 1:
        return f"= {legal[0]}"
    words = f">= {legal.start}" if legal.stop == sys.maxsize else f"from {legal[0]} to {legal[-1]}"
    return words if legal.step == 1 else f"{words} in steps of {legal.step}"
