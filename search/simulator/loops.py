"""The inner loops: the longest path, events where compute and collectives slow each other, what waiting is due to.

They are written in the subset of Python that numba compiles; small plans run them as they are, on lists, since
importing numba takes longer than they do, and so do all where there is no numba. The numbers are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

COMPUTES, CONTENDS, FREE = 1, 2, 0
"""What a transaction is: an action of a compute stream, a collective that contends with it, anything else."""
PATIENCE, COLD = 60_000, 600_000
"""Transactions that a process runs uncompiled, half a second and five, before it imports numba, which takes half a
second, and loads the loops, or compiles them once for all runs, which takes three more."""

_spent = 0
_compiled: Loops | None = None


class Loops(NamedTuple):
    """The loops, compiled or not; the compiled ones take arrays, the others lists."""

    compiled: bool
    sort: Callable[..., int]
    longest_path: Callable[..., None]
    contended: Callable[..., None]
    exposed: Callable[..., None]


def pick(transactions: int) -> Loops:
    """Return the loops to run so many transactions with."""
    global _spent, _compiled
    _spent += transactions
    if _compiled is None and _spent > PATIENCE and (_spent > COLD or _on_disk()) and find_spec("numba"):
        try:
            _compiled = _compile(cache=True)
        except RuntimeError:  # no folder that numba may keep them in: this process compiles them for itself
            _compiled = _compile(cache=False)
    return _compiled or Loops(False, sort, longest_path, contended, exposed)


def load() -> None:
    """Load the loops at once where they were compiled before."""
    global _compiled
    if _compiled is None and _on_disk() and find_spec("numba"):
        _compiled = _compile(cache=True)


def _compile(*, cache: bool) -> Loops:
    from numba import njit

    make = njit(cache=cache)
    return Loops(True, make(sort), make(longest_path), make(contended), make(exposed))


def _on_disk() -> bool:
    """Return whether numba has compiled the loops before (where it may write beside this file)."""
    return any(Path(__file__).parent.glob("__pycache__/loops.contended-*.nbi"))


def sort(first: Any, targets: Any, degree: Any, order: Any) -> int:
    """Fill ``order`` topologically, first come first served; return how many there are before any that wait for each
    other. ``degree`` counts what each follows, and is used up."""
    count = 0
    for t in range(len(degree)):
        if degree[t] == 0:
            order[count] = t
            count += 1
    at = 0
    while at < count:
        t = order[at]
        for k in range(first[t], first[t + 1]):
            u = targets[k]
            degree[u] -= 1
            if degree[u] == 0:
                order[count] = u
                count += 1
        at += 1
    return count


def longest_path(duration: Any, first: Any, targets: Any, begin: Any, finish: Any) -> None:
    """Run one step in which nothing contends; ``begin`` holds the earliest starts, and is raised to the real ones."""
    for t in range(len(duration)):
        ended = begin[t] + duration[t]
        finish[t] = ended
        for k in range(first[t], first[t + 1]):
            if ended > begin[targets[k]]:
                begin[targets[k]] = ended


def exposed(
    floor: Any, until: Any, waiter: Any, row: Any, starts: Any, ends: Any, comm: Any, of: Any, heads: Any,
    wait_start: Any, waits: Any, member_first: Any, members: Any, kinds: int, found: Any,
) -> None:  # fmt: skip
    """Add up the seconds in which compute waits for communication, by row and kind.

    Of each idle time: from when (``floor``) until when, the transaction that it ended with (``waiter``), its row. Of
    each transaction: when it ``starts`` and ``ends``, its actions. Of each action: what communication it is (``comm``,
    -1: none), its transaction, whether it is the first of its stream, what it waits for. A transaction waited last for
    what ended as it started; of several, the first.
    """
    for i in range(len(floor)):
        since, to, t = floor[i], until[i], waiter[i]
        while to > since:
            cause = -1
            for k in range(member_first[t], member_first[t + 1]):
                a = members[k]
                if not heads[a] and ends[of[a - 1]] == starts[t] and (cause < 0 or of[a - 1] < cause):
                    cause = of[a - 1]
                for w in range(wait_start[a], wait_start[a + 1]):
                    other = of[waits[w]]
                    if ends[other] == starts[t] and (cause < 0 or other < cause):
                        cause = other
            if cause < 0 or comm[members[member_first[cause]]] < 0:
                break
            t = cause
            began = max(since, starts[t])
            if to > began:
                found[row[i] * kinds + comm[members[member_first[t]]]] += to - began
            to = began


def contended(
    size: int, steps: int, slowdown: float,
    duration: Any, kind: Any, first: Any, targets: Any, later_first: Any, later: Any, degree: Any, later_degree: Any,
    member_first: Any, members: Any,
    waiting: Any, left: Any, pace: Any, since: Any, finish: Any, begin: Any, active: Any, ready: Any,
    computing: Any, talking: Any, on_row: Any, width: int,
) -> None:  # fmt: skip
    """Run all transactions of ``steps`` steps; fill ``begin`` and ``finish``, shape (steps * size,).

    A transaction starts when all that it follows have ended, and has ``duration`` of work to do. While a compute
    action and a contending collective run on one row, each takes ``slowdown`` seconds for a second of its work; a
    collective is as slow as on its slowest row. Of transaction t, ``targets[first[t]:first[t + 1]]`` follow it in its
    step, ``later[later_first[t]:...]`` in the next one; ``members[member_first[t]:...]`` are its rows; ``degree`` and
    ``later_degree`` count what it follows. The rest is room: per transaction and step what is waited for, work left,
    pace, since when; ``active`` and ``ready`` lists of transactions; per row what computes (-1: nothing), how many
    collectives contend, and which (``on_row``, ``width`` places a row).
    """
    total = size * steps
    count = 0
    stack = 0
    for step in range(steps):
        for t in range(size):
            n = step * size + t
            waiting[n] = degree[t] + (later_degree[t] if step > 0 else 0)
    for t in range(total - 1, -1, -1):
        if waiting[t] == 0:
            ready[stack] = t
            stack += 1
    now = 0.0
    ended = -1  # what has just ended, and releases what follows it
    while True:
        if ended >= 0:
            n = ended
            t = n
            while t >= size:  # quicker than a division
                t -= size
            ended = -1
            for k in range(first[t], first[t + 1]):
                u = n - t + targets[k]
                waiting[u] -= 1
                if waiting[u] == 0:
                    ready[stack] = u
                    stack += 1
            if n + size < total:
                for k in range(later_first[t], later_first[t + 1]):
                    u = n - t + size + later[k]
                    waiting[u] -= 1
                    if waiting[u] == 0:
                        ready[stack] = u
                        stack += 1
        if stack > 0:  # start all that can
            stack -= 1
            n = ready[stack]
            t = n
            while t >= size:
                t -= size
            begin[n] = now
            work = duration[t]
            if work <= 0.0:
                finish[n] = now
                ended = n
                continue
            slow = False
            if kind[t] == 1:
                row = members[member_first[t]]
                computing[row] = n
                slow = talking[row] > 0
                for k in range(row * width, row * width + talking[row]):
                    other = on_row[k]
                    if pace[other] == 1.0:
                        left[other] -= now - since[other]
                        since[other] = now
                        pace[other] = slowdown
                        finish[other] = now + left[other] * slowdown
            elif kind[t] == 2:
                for k in range(member_first[t], member_first[t + 1]):
                    row = members[k]
                    on_row[row * width + talking[row]] = n
                    talking[row] += 1
                    other = computing[row]
                    if other >= 0:
                        slow = True
                        if pace[other] == 1.0:
                            left[other] -= now - since[other]
                            since[other] = now
                            pace[other] = slowdown
                            finish[other] = now + left[other] * slowdown
            left[n] = work
            since[n] = now
            pace[n] = slowdown if slow else 1.0
            finish[n] = now + work * pace[n]
            active[count] = n
            count += 1
            continue
        if count == 0:
            return
        at = 0
        n = active[0]
        now = finish[n]
        for k in range(1, count):  # the first to end; of several, the first in order
            other = active[k]
            ends = finish[other]
            if ends < now or (ends == now and other < n):
                at, n, now = k, other, ends
        count -= 1
        active[at] = active[count]
        ended = n
        t = n
        while t >= size:
            t -= size
        if kind[t] == 1:
            row = members[member_first[t]]
            computing[row] = -1
            for k in range(row * width, row * width + talking[row]):
                other = on_row[k]
                pressed = False
                o = other
                while o >= size:
                    o -= size
                for j in range(member_first[o], member_first[o + 1]):
                    if computing[members[j]] >= 0:
                        pressed = True
                        break
                if not pressed:
                    left[other] -= (now - since[other]) / slowdown
                    since[other] = now
                    pace[other] = 1.0
                    finish[other] = now + left[other]
        elif kind[t] == 2:
            for k in range(member_first[t], member_first[t + 1]):
                row = members[k]
                talking[row] -= 1
                last = row * width + talking[row]
                for j in range(row * width, last):
                    if on_row[j] == n:
                        on_row[j] = on_row[last]
                        break
                other = computing[row]
                if other >= 0 and talking[row] == 0:
                    left[other] -= (now - since[other]) / slowdown
                    since[other] = now
                    pace[other] = 1.0
                    finish[other] = now + left[other]
