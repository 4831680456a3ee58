"""A plan as the verifier reads it: columns as lists, actions by what they do, and the text of a fault."""

from __future__ import annotations

from collections.abc import Sequence

from piper_core.errors import PlanError
from piper_core.ir.action import ActionKind
from piper_core.schedule.plan import CODE, KINDS, Communicator, Part, Plan, StreamKind

F, B, BI, BW, R = (CODE[ActionKind(word)] for word in ("F", "B", "BI", "BW", "R"))
COMPUTE = frozenset((F, B, BI, BW, R))
SENDS = {CODE[ActionKind.SEND_F]: True, CODE[ActionKind.SEND_B]: False}
RECVS = {CODE[ActionKind.RECV_F]: True, CODE[ActionKind.RECV_B]: False}
GATHERS = {
    CODE[ActionKind.ALL_GATHER]: None,
    CODE[ActionKind.ALL_GATHER_F]: True,
    CODE[ActionKind.ALL_GATHER_B]: False,
}
"""Gathers by what they serve: forward, backward, or (None) the whole step."""
REDUCES = frozenset((CODE[ActionKind.REDUCE_SCATTER], CODE[ActionKind.ALL_REDUCE]))
INNER = frozenset(CODE[ActionKind(word)] for word in ("ALL_TO_ALL_F", "ALL_TO_ALL_B", "COMM_F", "COMM_B"))
UPDATE, NORM, FREE = CODE[ActionKind.UPDATE], CODE[ActionKind.NORM], CODE[ActionKind.FREE]


class PlanTable:
    """Columns of a plan, and where to find each action.

    ``at[lane, stage, kind, microbatch]`` are the compute pieces in order, ``variant`` the cut that an opened macro
    follows and ``members`` its pieces in that order; ``inner`` are the inner collectives by (row, stage, microbatch)
    and label; ``recv``, ``gather``, ``reduce``, ``tie``, ``norm`` and ``update`` say which actions move data, by row
    and by what they move.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.kind, self.stage = plan.kind.tolist(), plan.stage.tolist()
        self.microbatch, self.bucket = plan.microbatch.tolist(), plan.bucket.tolist()
        self.label, self.line = plan.label.tolist(), plan.line.tolist()
        self.stream = plan.stream_of().tolist()
        self.start = plan.start.tolist()
        row_of_stream = [stream.row for stream in plan.streams]
        self.row = [row_of_stream[s] for s in self.stream]
        self.lane = [plan.lanes[row] for row in self.row] if plan.lanes else [0] * len(self.row)
        self.outputs: list[list[int]] = [[] for _ in plan.inputs]
        for stage, before in enumerate(plan.inputs):
            for source in before:
                self.outputs[source].append(stage)
        self.variants: dict[tuple[int, int], tuple[tuple[Part, ...], ...]] = {
            (stage, CODE[ActionKind(kind)]): variants for stage, kind, variants in plan.parts
        }
        self.at: dict[tuple[int, int, int, int], list[int]] = {}
        self.inner: dict[tuple[int, int, int], dict[int, int]] = {}
        self.variant: dict[tuple[int, int, int, int], tuple[Part, ...]] = {}
        self.members: dict[tuple[int, int, int, int], list[int]] = {}
        self.recv: dict[tuple[int, bool, int, int], list[int]] = {}
        self.gather: dict[tuple[int, bool | None, int, int], int] = {}
        self.reduce: dict[tuple[int, int, int], int] = {}
        self.tie: dict[tuple[int, int], list[int]] = {}
        self.update: dict[tuple[int, int], int] = {}
        self.norm: dict[int, int] = {}

    def is_tie(self, i: int) -> bool:
        """Return whether a reduction sums copies of a tied parameter over stages."""
        line = self.plan.lines[self.line[i]] if self.line[i] >= 0 else None
        return isinstance(line, Communicator) and line.label == "tie"

    def on_compute(self, i: int) -> bool:
        """Return whether an action is on its row's compute stream."""
        return self.plan.streams[self.stream[i]].kind is StreamKind.COMPUTE

    def last(self, row: int) -> list[int]:
        """Return the last action of a row's compute stream, or of the row."""
        mine = [i for i, r in enumerate(self.row) if r == row]
        return ([i for i in mine if self.on_compute(i)] or mine)[-1:]

    def name(self, i: int) -> str:
        """Return the text of an action."""
        return str(self.plan.action(i))

    def error(self, reason: str, what: str, at: Sequence[int] = ()) -> PlanError:
        """Return the error with the grid around the actions to look at."""
        return PlanError(reason, what, context=context(self.plan, at))


def word(stage: int, kind: int, microbatch: int) -> str:
    """Return the text of a compute action that may not exist."""
    return f"{stage}{KINDS[kind].value}{microbatch}"


def context(plan: Plan, at: Sequence[int], lines: int = 10, around: int = 5) -> str:
    """Return at most ``lines`` lines of the grid: the stream around each of the given actions, marked."""
    shown: list[str] = []
    stream_of = plan.stream_of()
    for i in dict.fromkeys(at):
        s = int(stream_of[i])
        low = max(int(plan.start[s]), i - around)
        high = min(int(plan.start[s + 1]), i + around + 1)
        words = [f"[{plan.action(k)}]" if k == i else str(plan.action(k)) for k in range(low, high)]
        head = "... " if low > plan.start[s] else ""
        tail = " ..." if high < plan.start[s + 1] else ""
        stream = plan.streams[s]
        shown.append(f"row {stream.row} {stream.name}: {head}{' '.join(words)}{tail}  <-- here")
    return "\n".join(shown[:lines])
