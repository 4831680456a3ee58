"""The rendezvous rules by an event loop with explicit heads of streams: slow, plain, independent of the simulator."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

from piper_core.schedule.plan import KINDS, Channel, Plan

Key = tuple[int, int]
"""(step, action)."""


def run(plan: Plan, seconds: list[float], steps: int) -> tuple[dict[Key, float], dict[Key, float]]:
    """Return when each (step, action) starts and ends when streams run on from step to step."""
    queues = [
        deque((step, i) for step in range(steps) for i in range(plan.start[s], plan.start[s + 1]))
        for s in range(len(plan.streams))
    ]
    row = {i: stream.row for s, stream in enumerate(plan.streams) for i in range(plan.start[s], plan.start[s + 1])}
    update = {(row[i], int(plan.stage[i])): i for i in row if KINDS[plan.kind[i]].value == "UPDATE"}

    def waits(key: Key) -> list[Key]:
        step, i = key
        found = [(step, int(w)) for w in plan.waits[plan.wait_start[i] : plan.wait_start[i + 1]]]
        if step and KINDS[plan.kind[i]].value.startswith("ALL_GATHER"):
            found += [(step - 1, update[row[i], int(plan.stage[i])])]
        return found

    start: dict[Key, float] = {}
    end: dict[Key, float] = {}
    done: set[Key] = set()
    busy = [False] * len(queues)
    running: list[tuple[float, list[tuple[int, Key]]]] = []
    now = 0.0

    def heads() -> dict[int, Key]:
        return {s: q[0] for s, q in enumerate(queues) if q and not busy[s] and all(w in done for w in waits(q[0]))}

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
            until = now + max(seconds[key[1]] for _, key in members)
            for s, key in members:
                start[key], end[key], busy[s] = now, until, True
            heappush(running, (until, members))
        if not running:
            assert not any(queues), "the plan does not run"
            return start, end
        now, members = heappop(running)
        for s, key in members:
            queues[s].popleft()
            busy[s] = False
            done.add(key)
