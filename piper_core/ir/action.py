"""Actions: what a row of a plan does, one at a time on each stream, with a text form that parses back."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from piper_core.errors import DirectiveError
from piper_core.names import Phase


class ActionKind(StrEnum):
    """Verb of an action, as it appears in text."""

    F = "F"
    B = "B"
    BI = "BI"
    BW = "BW"
    R = "R"
    SEND_F = "SEND_F"
    SEND_B = "SEND_B"
    RECV_F = "RECV_F"
    RECV_B = "RECV_B"
    ALL_GATHER = "ALL_GATHER"
    ALL_GATHER_F = "ALL_GATHER_F"
    ALL_GATHER_B = "ALL_GATHER_B"
    ALL_GATHER_BI = "ALL_GATHER_BI"
    ALL_GATHER_BW = "ALL_GATHER_BW"
    ALL_GATHER_R = "ALL_GATHER_R"
    ALL_REDUCE = "ALL_REDUCE"
    REDUCE_SCATTER = "REDUCE_SCATTER"
    ALL_TO_ALL_F = "ALL_TO_ALL_F"
    ALL_TO_ALL_B = "ALL_TO_ALL_B"
    COMM_F = "COMM_F"
    COMM_B = "COMM_B"
    NORM = "NORM"
    UPDATE = "UPDATE"
    FREE = "FREE"


COMPUTE_KINDS = (ActionKind.F, ActionKind.B, ActionKind.BI, ActionKind.BW, ActionKind.R)
PHASE_OF_KIND = {kind: Phase[kind.value] for kind in COMPUTE_KINDS}
KIND_OF_PHASE = {phase: kind for kind, phase in PHASE_OF_KIND.items()}

_VERBS = "|".join(sorted((kind.value for kind in ActionKind), key=len, reverse=True))
_ACTION = re.compile(
    rf"(?P<stage>\d+)(?:\.(?P<region>[A-Za-z_][\w.\-]*?))??(?P<kind>{_VERBS})(?P<microbatch>\d+)?(?:#(?P<bucket>\d+))?"
)
_GROUP = re.compile(r"\(([^()]*)\)|([^\s()]+)")


@dataclass(frozen=True, slots=True)
class Action:
    """One step of one row: ``stage[.region]KIND microbatch[#bucket]``, e.g. ``2F0``, ``2.L9.expertF3``,
    ``2ALL_GATHER_B3#4``, ``2UPDATE``."""

    stage: int
    kind: ActionKind
    microbatch: int | None = None
    region: str | None = None
    bucket: int | None = None

    def __str__(self) -> str:
        region = f".{self.region}" if self.region else ""
        microbatch = "" if self.microbatch is None else str(self.microbatch)
        bucket = "" if self.bucket is None else f"#{self.bucket}"
        return f"{self.stage}{region}{self.kind.value}{microbatch}{bucket}"

    @staticmethod
    def parse(text: str) -> Action:
        """Read one action.

        Raises:
            DirectiveError: the text is not an action.
        """
        match = _ACTION.fullmatch(text)
        if match is None:
            raise DirectiveError(
                f"cannot read action {text[:40]!r}",
                expected="stage, verb and microbatch such as 0F0, 2BI3 or 1B2",
            )
        part = match.groupdict()
        return Action(
            int(part["stage"]),
            ActionKind(part["kind"]),
            None if part["microbatch"] is None else int(part["microbatch"]),
            part["region"],
            None if part["bucket"] is None else int(part["bucket"]),
        )


Slot: TypeAlias = tuple[Action, ...]
"""Actions of one row that may overlap: one alone, or several in an overlap group."""


def parse_slots(text: str) -> tuple[Slot, ...]:
    """Read a row such as ``0F0 0F1 (0F2 1B0) 0BW1``: actions in order, overlap groups in parentheses.

    Raises:
        DirectiveError: an action or the parentheses cannot be read.
    """
    if re.search(r"\([^)]*(\(|$)", text) or text.count("(") != text.count(")"):
        raise DirectiveError("unbalanced parentheses in an order row", found=repr(text[:60]))
    slots: list[Slot] = []
    for group, single in _GROUP.findall(text):
        slot = tuple(Action.parse(word) for word in (group.split() if not single else [single]))
        if not slot:
            raise DirectiveError("empty overlap group () in an order row", found=repr(text[:60]))
        slots.append(slot)
    return tuple(slots)


def format_slots(slots: tuple[Slot, ...]) -> str:
    """Write a row; the inverse of :func:`parse_slots`."""
    return " ".join(str(slot[0]) if len(slot) == 1 else "(" + " ".join(map(str, slot)) + ")" for slot in slots)
