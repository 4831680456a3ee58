"""A schedule: the order of compute on each row, before communication, streams and buffers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from piper_core.ir.action import Slot, format_slots, parse_slots


class Layout(StrEnum):
    """How pipeline stages lie on pipeline rows (p rows, v virtual stages each).

    LOOP: stage s on row s mod p (v = 1 is the plain pipeline). V: v = 2, stages 0..p-1 down the rows and
    p..2p-1 back up. BIDIRECTIONAL: p stages, each on two rows: microbatches of the first half see stage s on
    row s, those of the second half on row p-1-s.
    """

    LOOP = "loop"
    V = "v"
    BIDIRECTIONAL = "bidirectional"


def rows_of_stage(layout: Layout, p: int, v: int) -> tuple[tuple[int, ...], ...]:
    """Return, for each of the stages, the row or rows that hold it."""
    if layout is Layout.LOOP:
        return tuple((s % p,) for s in range(p * v))
    if layout is Layout.V:
        return tuple((s,) if s < p else (2 * p - 1 - s,) for s in range(2 * p))
    return tuple((s, p - 1 - s) if s != p - 1 - s else (s,) for s in range(p))


@dataclass(frozen=True, slots=True)
class Grid:
    """``rows[r]`` is the total order of compute on row r: slots of one action, or of several that may overlap."""

    rows: tuple[tuple[Slot, ...], ...]

    def __str__(self) -> str:
        return "\n".join(f"{r}: {format_slots(row)}" for r, row in enumerate(self.rows))

    @staticmethod
    def parse(text: str) -> Grid:
        """Read ``str(grid)`` back."""
        return Grid(tuple(parse_slots(line.split(":", 1)[1]) for line in text.splitlines() if line.strip()))
