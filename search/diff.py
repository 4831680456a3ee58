"""What two strategies say differently: header fields, directives, and places in the order of each row."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from piper_core.directives import Order
from piper_core.ir.action import format_slots
from piper_core.program.program import Program
from piper_core.program.strategy import Strategy

RECORDED = ("predicted", "measured", "versions")
"""Header fields that record and decide nothing."""
MOST_PLACES, MOST_WORDS = 3, 6
"""How much of an order is shown: places in a row, actions of a place."""


@dataclass(frozen=True, slots=True)
class RowChange:
    """Where the order of a row differs: (position, actions before, actions after) for each place."""

    row: int
    places: tuple[tuple[int, tuple[str, ...], tuple[str, ...]], ...]

    def line(self) -> str:
        """Say it in one line."""
        said = [f"at {at}: {_some(old) or 'nothing'} became {_some(new) or 'nothing'}" for at, old, new in self.places]
        left = len(said) - MOST_PLACES
        more = f"; {left} more place{'s' if left > 1 else ''}" if left > 0 else ""
        return f"order of row {self.row}, {'; '.join(said[:MOST_PLACES])}{more}"


@dataclass(frozen=True, slots=True)
class Difference:
    """Header fields as {name: (before, after)}; directives that only one side has; rows whose order differs."""

    header: dict[str, tuple[Any, Any]]
    removed: tuple[str, ...]
    added: tuple[str, ...]
    rows: tuple[RowChange, ...]

    def __bool__(self) -> bool:
        return bool(self.header or self.removed or self.added or self.rows)

    @staticmethod
    def between(before: Strategy, after: Strategy) -> Difference:
        """Return what differs; directives are compared in canonical order, orders action by action."""
        ours, theirs = before.header.to_data(), after.header.to_data()
        header = {
            name: (ours.get(name), theirs.get(name))
            for name in {**ours, **theirs}
            if name not in RECORDED and ours.get(name) != theirs.get(name)
        }
        a, b = Counter(_texts(before.program)), Counter(_texts(after.program))
        rows_a, rows_b = _rows(before.program), _rows(after.program)
        rows = [
            RowChange(row, places)
            for row in sorted({*rows_a, *rows_b})
            if (places := _places(rows_a.get(row, ()), rows_b.get(row, ())))
        ]
        return Difference(header, tuple((a - b).elements()), tuple((b - a).elements()), tuple(rows))

    def lines(self) -> Iterator[str]:
        """Say it, a difference a line."""
        for name, (old, new) in self.header.items():
            yield f"{name}: {_value(old)} became {_value(new)}"
        yield from (f"- {text}" for text in self.removed)
        yield from (f"+ {text}" for text in self.added)
        yield from (row.line() for row in self.rows)

    def to_data(self) -> dict[str, Any]:
        """Return the record for JSON."""
        return {
            "header": {name: list(pair) for name, pair in self.header.items()},
            "removed": [json.loads(text) for text in self.removed],
            "added": [json.loads(text) for text in self.added],
            "order": [
                {"row": row.row, "places": [{"at": at, "before": old, "after": new} for at, old, new in row.places]}
                for row in self.rows
            ],
        }


def _texts(program: Program) -> list[str]:
    return [json.dumps(each.to_data()) for each in program.ordered if not (isinstance(each, Order) and each.actions)]


def _rows(program: Program) -> dict[int, tuple[str, ...]]:
    found: dict[int, tuple[str, ...]] = {}
    for directive in program.directives:
        if isinstance(directive, Order):
            found |= {row: tuple(format_slots((slot,)) for slot in slots) for row, slots in directive.actions}
    return found


def _places(old: tuple[str, ...], new: tuple[str, ...]) -> tuple[tuple[int, tuple[str, ...], tuple[str, ...]], ...]:
    matcher = SequenceMatcher(None, old, new, autojunk=False)
    return tuple((a, old[a:b], new[c:d]) for tag, a, b, c, d in matcher.get_opcodes() if tag != "equal")


def _some(words: tuple[str, ...]) -> str:
    if len(words) <= MOST_WORDS:
        return " ".join(words)
    return f"{' '.join(words[: MOST_WORDS - 1])} ... ({len(words)} actions)"


def _value(value: Any) -> str:
    return "nothing" if value is None else value if isinstance(value, str) else json.dumps(value)
