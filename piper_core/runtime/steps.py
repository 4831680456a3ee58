"""The steps of one row: streams become one list that one thread can run.

Compute keeps its order. What communicates *starts* as soon as all compute that it waits for has run, in the order of
its stream, and is *waited for* just before the first compute that needs it. Where communication waits for
communication (a reduction for that of a tied parameter, the norm for the reductions), it starts as late as it can,
before whatever waits for it; the plan has put these at the end of a step.

Collectives inside chunks are run by the graphs and over at once, but for those of overlap groups that stand *apart*
(:mod:`piper_core.runtime.apart`): they start and are waited for as any other, and what waits for one starts when one
action of compute has run beside it.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from enum import Enum, auto

from piper_core.ir.action import ActionKind
from piper_core.schedule.plan import KINDS, Plan, StreamKind

SENDS = (ActionKind.SEND_F, ActionKind.SEND_B)
RECVS = (ActionKind.RECV_F, ActionKind.RECV_B)
INNER = (ActionKind.ALL_TO_ALL_F, ActionKind.ALL_TO_ALL_B, ActionKind.COMM_F, ActionKind.COMM_B)
"""Collectives inside chunks: but for those apart the graphs run them, and as actions of their own they are over at
once."""


class Do(Enum):
    """What a step does with its action: run it, start it, or wait until it is over."""

    RUN = auto()
    START = auto()
    WAIT = auto()


Step = tuple[Do, int]


def flatten(plan: Plan, row: int, apart: Container[int] = frozenset()) -> Iterator[Step]:
    """Yield the steps of a row, see the module's docstring; ``apart`` are the inner collectives that are real steps."""
    streams = [i for i, stream in enumerate(plan.streams) if stream.row == row]
    (compute,) = (i for i in streams if plan.streams[i].kind is StreamKind.COMPUTE)
    stream_of = plan.stream_of().tolist()
    start, wait_start, waits = plan.start.tolist(), plan.wait_start.tolist(), plan.waits.tolist()
    heads = {s: start[s] for s in streams if s != compute}
    waited = {s: start[s] for s in streams if s != compute}  # actions before it have been waited for
    ran = start[compute]
    began: dict[int, int] = {}  # of collectives apart: how far compute was

    inner = {s for s in heads if any(KINDS[k] in INNER for k in plan.kind[start[s] : start[s + 1]].tolist())}

    def over(action: int) -> bool:
        """Say whether an action is over by now, whatever other rows do."""
        s = stream_of[action]
        if s == compute:
            return bool(action < ran)
        return bool(action < waited[s] if action in apart else s in inner and action < heads[s])

    def begin(*, blocks: bool = False) -> Iterator[Step]:
        more = True
        while more:
            more = False
            for s in heads:
                while heads[s] < start[s + 1]:
                    needs = waits[wait_start[heads[s]] : wait_start[heads[s] + 1]]
                    for w in needs:  # had its time beside compute, or would hold up what others wait for
                        if w in began and not over(w) and (blocks or began[w] < ran):
                            yield from finish(w)
                    if not all(map(over, needs)):
                        break
                    yield from head(s)
                    more = bool(inner)

    def head(s: int) -> Iterator[Step]:
        if heads[s] in apart:
            began[heads[s]] = ran
        yield Do.START, heads[s]
        heads[s] += 1

    def finish(action: int) -> Iterator[Step]:
        """Wait for an action on another stream and all before it there, having started what was left for late."""
        s = stream_of[action]
        while heads[s] <= action:
            for w in waits[wait_start[heads[s]] : wait_start[heads[s] + 1]]:
                if stream_of[w] != compute:
                    yield from finish(w)
                else:
                    assert w < ran, "a verified plan has no cycle"
            yield from head(s)
        while waited[s] <= action:
            yield Do.WAIT, waited[s]
            waited[s] += 1

    yield from begin()
    for action in range(start[compute], start[compute + 1]):
        needs = waits[wait_start[action] : wait_start[action + 1]]
        if any(s != compute and w not in apart and waited[s] <= w for w in needs for s in (stream_of[w],)):
            yield from begin(blocks=True)
        for w in needs:
            yield from finish(w)
        yield Do.RUN, action
        ran = action + 1
        yield from begin()
    for s in heads:
        if start[s + 1] > start[s]:
            yield from finish(start[s + 1] - 1)
