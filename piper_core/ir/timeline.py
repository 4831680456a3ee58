"""Timeline: when each action of each stream ran, whether a simulator predicted it or a run measured it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from piper_core.ir.action import COMPUTE_KINDS, Action, ActionKind


@dataclass(frozen=True, slots=True)
class Event:
    """One action from ``start_s`` to ``end_s``, seconds since the start of the step."""

    start_s: float
    end_s: float
    text: str
    kind: ActionKind

    @property
    def seconds(self) -> float:
        """How long it lasted."""
        return self.end_s - self.start_s

    @property
    def action(self) -> Action:
        """The action that ``text`` names."""
        return Action.parse(self.text)

    @property
    def computes(self) -> bool:
        """Whether it is model compute or an optimiser update."""
        return self.kind in COMPUTE_KINDS or self.kind is ActionKind.UPDATE


@dataclass(frozen=True, slots=True)
class Lane:
    """The events of one stream of one row, in order."""

    row: int
    stream: str
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Lanes by row, the compute stream of a row first."""

    lanes: tuple[Lane, ...]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return max((lane.row for lane in self.lanes), default=-1) + 1

    @property
    def end_s(self) -> float:
        """When the last event ends."""
        return max((event.end_s for lane in self.lanes for event in lane.events), default=0.0)

    def row(self, row: int) -> tuple[Lane, ...]:
        """Return the lanes of one row."""
        return tuple(lane for lane in self.lanes if lane.row == row)

    def events(self) -> Iterator[tuple[Lane, Event]]:
        """Yield every event with its lane."""
        return ((lane, event) for lane in self.lanes for event in lane.events)

    def busy_s(self, row: int) -> float:
        """Return how long a row spends on compute actions."""
        return sum(event.seconds for lane in self.row(row) for event in lane.events if event.computes)

    def shifted(self, seconds: float) -> Timeline:
        """Return the same events, ``seconds`` later."""
        return Timeline(
            tuple(
                replace(
                    lane,
                    events=tuple(replace(e, start_s=e.start_s + seconds, end_s=e.end_s + seconds) for e in lane.events),
                )
                for lane in self.lanes
            )
        )

    def picture(self, width: int = 100) -> str:
        """Return one line a row, ``width`` columns for the whole time.

        F is the last digit of its microbatch, B and BI the letter a-j at that digit, BW the letter A-J, R ``r``, an
        update ``=``, and no compute ``.``.
        """
        step = self.end_s / width if self.end_s else 1.0
        lines = []
        for row in range(self.rows):
            cells = ["."] * width
            for lane in self.row(row):
                for event in lane.events:
                    if event.computes and event.end_s > event.start_s:
                        low = max(0, round(event.start_s / step))
                        high = min(width, round(event.end_s / step))
                        cells[low:high] = [_mark(event)] * max(0, high - low)
            lines.append(f"{row:>3} {''.join(cells)}")
        return "\n".join(lines)

    def to_data(self) -> list[dict[str, Any]]:
        """Return plain lists and numbers for JSON; :meth:`from_data` reads them back."""
        return [
            {"row": lane.row, "stream": lane.stream, "events": [[e.start_s, e.end_s, e.text] for e in lane.events]}
            for lane in self.lanes
        ]

    @staticmethod
    def from_data(data: Sequence[Mapping[str, Any]]) -> Timeline:
        """Read what :meth:`to_data` wrote.

        Raises:
            DirectiveError: a text is not an action.
        """
        return Timeline(
            tuple(
                Lane(
                    int(lane["row"]),
                    str(lane["stream"]),
                    tuple(Event(float(a), float(b), text, Action.parse(text).kind) for a, b, text in lane["events"]),
                )
                for lane in data
            )
        )


def _mark(event: Event) -> str:
    digit = (event.action.microbatch or 0) % 10
    match event.kind:
        case ActionKind.F:
            return str(digit)
        case ActionKind.B | ActionKind.BI:
            return "abcdefghij"[digit]
        case ActionKind.BW:
            return "ABCDEFGHIJ"[digit]
        case ActionKind.R:
            return "r"
        case _:
            return "="
