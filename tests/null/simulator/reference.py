"""The rendezvous rules by an event loop with explicit heads of streams: slow, plain, independent of the simulator."""

from __future__ import annotations

from collections import deque
from itertools import chain

from piper_core.schedule.plan import KINDS, Channel, Plan, StreamKind

Key = tuple[int, int]
"""(step, action)."""
Members = tuple[tuple[int, Key], ...]
MESSAGES = ("SEND", "RECV", "NORM")
"""Communication that contends with nothing: messages, and the norm."""


def run(
    plan: Plan, seconds: list[float], steps: int, slowdown: float = 1.0
) -> tuple[dict[Key, float], dict[Key, float]]:
    """Return when each (step, action) starts and ends when streams run on from step to step.

    Time goes from one end of an action to the next. Before each, all that runs is given its pace: 1, or ``slowdown``
    for compute on a row where a collective runs, and for a collective where one of its rows computes.
    """
    queues = [
        deque((step, i) for step in range(steps) for i in range(plan.start[s], plan.start[s + 1]))
        for s in range(len(plan.streams))
    ]
    row = {i: stream.row for s, stream in enumerate(plan.streams) for i in range(plan.start[s], plan.start[s + 1])}
    kind = {i: KINDS[plan.kind[i]].value for i in row}
    update = {(row[i], int(plan.stage[i])): i for i in row if kind[i] == "UPDATE"}

    def waits(key: Key) -> list[Key]:
        step, i = key
        found = [(step, int(w)) for w in plan.waits[plan.wait_start[i] : plan.wait_start[i + 1]]]
        if step and kind[i].startswith("ALL_GATHER"):
            found += [(step - 1, update[row[i], int(plan.stage[i])])]
        return found

    start: dict[Key, float] = {}
    end: dict[Key, float] = {}
    running: dict[Members, tuple[float, float, float]] = {}
    """Since when at this pace, work left then, pace; by the (stream, action) that run together."""
    now = 0.0

    def heads() -> dict[int, Key]:
        busy = {s for s, _ in chain.from_iterable(running)}
        return {
            s: q[0] for s, q in enumerate(queues) if q and s not in busy and all(w in end for w in waits(q[0]))
        }  # fmt: skip

    def computes(members: Members) -> bool:
        (s, (_, i)) = members[0]
        return plan.streams[s].kind is StreamKind.COMPUTE and plan.line[i] < 0

    def collective(members: Members) -> bool:
        (s, (_, i)) = members[0]
        return plan.streams[s].kind is not StreamKind.COMPUTE and not kind[i].startswith(MESSAGES)

    def rows_of(members: Members) -> set[int]:
        return {row[i] for _, (_, i) in members}

    def adjust() -> None:
        computing = {r for members in running if computes(members) for r in rows_of(members)}
        talking = {r for members in running if collective(members) for r in rows_of(members)}
        for members, (since, left, pace) in running.items():
            against = talking if computes(members) else computing if collective(members) else set()
            wanted = slowdown if rows_of(members) & against else 1.0
            if wanted != pace:
                running[members] = now, left - (now - since) / pace, wanted

    while True:
        ready = heads()
        meetings: dict[int, list[tuple[int, Key]]] = {}
        groups: list[list[tuple[int, Key]]] = []
        for s, key in ready.items():
            line = int(plan.line[key[1]])
            if line < 0:
                groups.append([(s, key)])
            else:
                meetings.setdefault(line, []).append((s, key))
        for index, members in meetings.items():
            meeting = plan.lines[index]
            rows = (meeting.source, meeting.destination) if isinstance(meeting, Channel) else meeting.rows
            if {row[key[1]] for _, key in members} == set(rows):
                groups.append(members)
        for members in groups:
            running[tuple(members)] = now, max(seconds[key[1]] for _, key in members), 1.0
            start.update((key, now) for _, key in members)
        if not running:
            assert not any(queues), "the plan does not run"
            return start, end
        adjust()
        now, first = min((since + left * pace, members) for members, (since, left, pace) in running.items())
        del running[first]
        for s, key in first:
            queues[s].popleft()
            end[key] = now
