"""The common part of DualPipe and DualPipeV: two flows of microbatches that cross on every row."""

from __future__ import annotations

from collections import deque

from piper_core.ir.action import Slot
from piper_core.schedule.families.base import backwards, forwards, input_backwards, weight_backwards


class _Flow:
    """One flow on one row: its stage's actions for microbatches first, first + 1, ..., in order."""

    __slots__ = ("b", "bi", "bw", "f", "n_b", "n_f")

    def __init__(self, stage: int, first: int, n: int) -> None:
        self.f, self.b = forwards(stage, first + n), backwards(stage, first + n)
        self.bi, self.bw = input_backwards(stage, first + n), weight_backwards(stage, first + n)
        self.n_f = self.n_b = first

    def forward(self) -> Slot:
        self.n_f += 1
        return self.f[self.n_f - 1]

    def backward(self) -> Slot:
        self.n_b += 1
        return self.b[self.n_b - 1]

    def split(self) -> tuple[Slot, Slot]:
        self.n_b += 1
        return self.bi[self.n_b - 1], self.bw[self.n_b - 1]


def eight_steps(p: int, r: int, n: int, near: tuple[int, int], far: tuple[int, int]) -> list[Slot]:
    """Order the row that is r rows from where the near flow enters, p rows before the flows meet.

    ``near`` and ``far`` are (stage, first microbatch) of the flow that enters at row 0 and of the one that
    comes back; each has n >= 2p microbatches. Source: the published DualPipe schedule (github.com/deepseek-ai
    /DualPipe), whose eight steps are named in the comments: 0 is near, 1 is far.
    """
    near_flow, far_flow = _Flow(*near, n), _Flow(*far, n)
    deferred: deque[Slot] = deque()
    row: list[Slot] = []

    def split(flow: _Flow) -> None:
        bi, bw = flow.split()
        row.append(bi)
        deferred.append(bw)

    for _ in range(2 * (p - r - 1)):  # 1: F0
        row.append(near_flow.forward())
    for _ in range(r + 1):  # 2: F0 F1
        row += (near_flow.forward(), far_flow.forward())
    for _ in range(p - r - 1):  # 3: BI1 BW1 F1
        row += (*far_flow.split(), far_flow.forward())
    for i in range(n - 2 * p + r + 1):  # 4: (F0 B1) (F1 B0)
        if i == 0 and r == p - 1:  # where the flows meet, overlapping the first pair would only delay B1
            row += (near_flow.forward(), far_flow.backward())
        else:
            row.append(near_flow.forward() + far_flow.backward())
        row.append(far_flow.forward() + near_flow.backward())
    for _ in range(p - r - 1):  # 5: B1 (F1 B0)
        row += (far_flow.backward(), far_flow.forward() + near_flow.backward())
    for i in range(2 * (r + 1)):  # 6: B1 B0, the second half of them split
        flow = far_flow if i % 2 == 0 else near_flow
        if i > r:
            split(flow)
        else:
            row.append(flow.backward())
    for _ in range(p - r - 1):  # 7: BW BI0
        row.append(deferred.popleft())
        split(near_flow)
    row += deferred  # 8: BW
    return row
