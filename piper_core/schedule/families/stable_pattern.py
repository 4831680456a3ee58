"""The common part of V-Half and V-Min: a building block repeated every six units of time, then squeezed."""

from __future__ import annotations

from collections import deque

from piper_core.ir.action import Slot
from piper_core.schedule.families.base import forwards, input_backwards, weight_backwards

INTERVAL = 6  # two stages a row, each F, BI and BW of one unit, for every microbatch


def squeeze(p: int, m: int, block: list[tuple[int, int, int, int]], limit: int) -> list[list[Slot]]:
    """Repeat a building block for m microbatches and let every row run as early as it can.

    ``block[r]`` holds when row r starts F of its stage on the way down, F of that on the way up, BI up, BI
    down, for microbatch 0; microbatch j is INTERVAL * j later. Rows keep the order of these starts and are
    played in unit time; a BW fills every unit that would be idle, and goes before an F that would bring the
    row above ``limit`` stage activations. As the block holds no more than ``limit`` when each BW follows
    its BI at once, there always is a BW to do there, and nothing waits forever. Source: arXiv 2405.15362
    (building block, lifespan, repeat, squeeze; its reordering is the filling with BW here).
    """
    # Operation (row, step, j) is number (row * 4 + step) * m + j: steps 0 F down, 1 F up, 2 BI up, 3 BI down.
    orders: list[list[int]] = []
    before: list[int] = []  # operations at which each (row, step) waits, as an offset to its own number
    for r, starts in enumerate(block):
        timed = sorted((start + INTERVAL * j, step, j) for step, start in enumerate(starts) for j in range(m))
        orders.append([(r * 4 + step) * m + j for _, step, j in timed])
        for step in range(4):
            neighbour = r - 1 if step % 2 == 0 else r + 1
            if 0 <= neighbour < p:
                before.append((neighbour - r) * 4 * m)
            else:  # the turn of the V: the step before, on the same row; or no earlier one
                before.append(-m if step else 0)
    actions: list[list[tuple[Slot, ...]]] = []
    for r in range(p):
        down, up = r, 2 * p - 1 - r
        actions.append([forwards(down, m), forwards(up, m), input_backwards(up, m), input_backwards(down, m)])
    weights = [(weight_backwards(2 * p - 1 - r, m), weight_backwards(r, m)) for r in range(p)]

    finished = [0] * (4 * m * p)  # time at which an operation ends, 0 while it has not
    rows: list[list[Slot]] = [[] for _ in range(p)]
    pending: list[deque[Slot]] = [deque() for _ in range(p)]
    alive, cursor = [0] * p, [0] * p
    active = list(range(p))
    now = 0
    while active:
        for r in active:
            queue = pending[r]
            if cursor[r] < 4 * m:
                op = orders[r][cursor[r]]
                step = op // m - 4 * r
                need = op + before[4 * r + step]
                if (need == op or 0 < finished[need] <= now) and (step > 1 or alive[r] < limit):
                    cursor[r] += 1
                    finished[op] = now + 1
                    j = op % m
                    rows[r].append(actions[r][step][j])
                    if step > 1:
                        queue.append(weights[r][step - 2][j])
                    else:
                        alive[r] += 1
                    continue
            if queue:
                rows[r].append(queue.popleft())
                alive[r] -= 1
        active = [r for r in active if cursor[r] < 4 * m or pending[r]]
        now += 1
        assert now < INTERVAL * (m + 2 * p), "the building block holds more than its limit"
    return rows
