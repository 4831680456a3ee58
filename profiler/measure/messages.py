"""What a message takes on its way, and of ranks that compute meanwhile."""

from __future__ import annotations

from time import perf_counter

import torch
import torch.distributed as dist

from piper_core.runtime.communicator import Work
from profiler.measure.bench import DISTURBED, Bench, Runs, clocked
from profiler.measure.exchanges import THERE, Exchanges
from profiler.measure.quiet import before_others, waited_s

_TICK_S = 1e-6
"""What messages cost in all where noise hides it."""
MESSAGES, _MESSAGE_BYTES, _HOST_ROUNDS = 16, 1 << 17, 15
"""Messages by which the host's part is measured, one after another, their size, and how often."""
_ROWS, _PRODUCTS, _SMALL = 256, 2, 128
"""Products of ranks that compute: of this many rows, how many between two messages, and rows of small ones."""
_BEFORE, _AFTER, _ON_THEIR_WAY = 64, 16, 2
"""Small products of a rank before a message, while the other comes to wait for it, and after; and messages each way of
which one time is the mean."""


def host_runs(made: Exchanges, bench: Bench) -> Runs:
    """Time what a message costs a rank that computes: ranks exchange one before each piece of work, and wait for it
    after the next, as in a pipeline's steady state. What that takes longer than the work alone is the host's part of
    starting and finishing it, that of the communicator's threads, and what is left of waiting.
    """
    communicator, peer = made.communicator, made.communicator.rank ^ 1
    if peer >= dist.get_world_size():
        return [(0.0, False)] * _HOST_ROUNDS
    given, came = torch.ones(_MESSAGE_BYTES // 4), torch.empty(_MESSAGE_BYTES // 4)
    a = torch.randn(_ROWS, _ROWS)

    def compute() -> None:
        for _ in range(_PRODUCTS):
            torch.mm(a, a)

    last: list[Work] = []

    def wait() -> None:
        for work in last:
            work.wait()

    def alone() -> None:
        for _ in range(MESSAGES):
            compute()

    def exchanging() -> None:
        for _ in range(MESSAGES):
            now = [communicator.send(given, peer, THERE), communicator.recv(came, peer, THERE)]
            wait()
            last[:] = now
            compute()

    found: Runs = []
    for _ in range(1 + _HOST_ROUNDS):
        (took, a_cut), (both, b_cut) = (clocked(each, 1, bench, meet=True) for each in (alone, exchanging))
        wait()
        last.clear()
        found.append((max(_TICK_S, both - took) / (2 * MESSAGES), a_cut or b_cut))
    return found[1:]  # the first connects


def way_runs(made: Exchanges, size: int, bench: Bench) -> tuple[float, bool]:
    """Return the mean seconds from sending a message until a rank that waits for it has it, and whether something else
    kept this process waiting. Ranks take turns; who sends has computed and computes on, as in a pipeline, where one
    that does nothing would let its core fall asleep. Each message says when it was sent, by the machine's one clock."""
    communicator, peer = made.communicator, made.communicator.rank ^ 1
    given = torch.zeros(max(1, size // 8), dtype=torch.float64)
    came, a = torch.empty_like(given), torch.randn(_SMALL, _SMALL)

    def compute(products: int) -> None:
        for _ in range(products):
            torch.mm(a, a)

    took = 0.0
    with before_others(bench.priority):
        dist.barrier()
        before, start = waited_s(), perf_counter()
        for turn in range(2 * _ON_THEIR_WAY):
            if turn % 2 == communicator.rank:
                compute(_BEFORE)
                given[0] = perf_counter()
                sent = communicator.send(given, peer, THERE)
                compute(_AFTER)
                sent.wait()
            else:
                communicator.recv(came, peer, THERE).wait()
                took += perf_counter() - float(came[0])
        cut = waited_s() - before > DISTURBED * (perf_counter() - start)
    return took / _ON_THEIR_WAY, cut
