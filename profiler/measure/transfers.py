"""Collectives and messages by size, and work beside them, between processes of this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from piper_core.frontend.apart import apart
from piper_core.runtime.gloo import GlooCommunicator
from profiler.measure.processes import on_processes
from profiler.measure.quiet import before_others, waited_s
from profiler.record import SEND, Overlap, Sample, Transfer

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "ring_exchange", SEND)
SIZES = (1 << 10, 1 << 13, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
"""Bytes: latency alone up to bandwidth alone."""
LEAST = 5
DISTURBED = 0.02
"""Part of a run for which a thread was kept waiting by something else, from which the run is left out."""
# Names since torch 2.13, and those before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
COMPUTE_AND_COMPUTE, COMPUTE_AND_TRANSFER = "compute and compute", "compute and transfer"
_ROWS, _PRODUCTS = 256, 40
MESSAGES = 60
"""Messages by which the host's part is measured."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Where transfers run: processes of one machine, about ``seconds`` for each kind and size, before other programs of
    the machine with ``priority``."""

    kind: str = "cpu"
    threads: int = 1
    seconds: float = 0.15
    priority: bool = False

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device()) if self.kind == "cuda" else torch.device("cpu")


Measurements: TypeAlias = tuple[tuple[Transfer, ...], tuple[Overlap, ...], Sample | None]
"""Times of every kind and size; how much computing ranks slow each other, and compute and a transfer (nothing where
ranks share cores or devices); what starting and finishing a message takes of the thread that computes (None: not
measured)."""


def measure_groups(sizes: Sequence[int], bench: Bench, own: int) -> list[Measurements]:
    """Return the measurements among each number of processes; up to ``own`` have a core or a device each. On the CPU
    all are forks of one process, so that torch is imported once."""
    if bench.kind == "cpu":
        return apart(_forked, tuple(sizes), bench, own)
    return [measure_transfers(size, bench, alone=size <= own) for size in sizes]


def _forked(sizes: Sequence[int], bench: Bench, own: int) -> list[Measurements]:
    torch.set_num_threads(1)  # no thread may be there when processes fork
    return [measure_transfers(size, bench, alone=size <= own, fork=True) for size in sizes]


def measure_transfers(ranks: int, bench: Bench, *, alone: bool = True, fork: bool = False) -> Measurements:
    """Return the measurements among ``ranks`` processes; ``alone`` where each has a core or a device of its own."""
    cases = [(each, size) for each in KINDS for size in SIZES if each != SEND or ranks == 2]
    by_rank = on_processes(_all, ranks, cases, bench, alone, kind=bench.kind, threads=bench.threads, fork=fork)
    transfers = tuple(
        Transfer(each, ranks, 1, size, _slowest([times[i] for times, _, _ in by_rank]))
        for i, (each, size) in enumerate(cases)
    )
    overlaps = tuple(Overlap(what, _slowest([factors[what] for _, factors, _ in by_rank])) for what in by_rank[0][1])
    hosts = [host for _, _, host in by_rank]
    return transfers, overlaps, _slowest(hosts) if all(hosts) else None


Runs = list[tuple[float, bool]]
"""Seconds a call of every run, and whether the process was interrupted meanwhile."""


def _slowest(by_rank: list[Runs]) -> Sample:
    """Return the time of the slowest rank in each run; runs that were interrupted anywhere are left out, if some are
    not."""
    together = list(zip(*by_rank, strict=True))
    times = [max(seconds for seconds, _ in each) for each in together]
    clean = [t for t, each in zip(times, together, strict=True) if not any(cut for _, cut in each)]
    return Sample(tuple(clean), len(times) - len(clean)) if len(clean) >= LEAST else Sample(tuple(times))


# --- in the processes ---


def _all(
    rank: int, cases: list[tuple[str, int]], bench: Bench, alone: bool
) -> tuple[list[Runs], dict[str, Runs], Runs]:  # fmt: skip
    times = _times_of_all(rank, cases, bench)
    if not alone:
        return times, {}, []
    return times, _overlaps(rank, bench), _host(rank, bench) if bench.kind == "cpu" else []


def _host(rank: int, bench: Bench) -> Runs:
    """Time what the runtime's own communicator does on the thread that calls it, for a message there and one back.

    Never before other programs: the communicator's threads must get their turn.
    """
    communicator, peer = GlooCommunicator(), rank ^ 1
    if peer >= dist.get_world_size():
        return [(0.0, False)] * MESSAGES
    given, came = torch.ones(256), torch.empty(256)
    found: Runs = []
    for _ in range(MESSAGES):
        dist.barrier()
        before, start = waited_s(), perf_counter()
        sent, received = communicator.send(given, peer, 1), communicator.recv(came, peer, 1)
        begun = perf_counter() - start
        sleep(2e-3)  # by now both are over
        start = perf_counter()
        sent.wait()
        received.wait()
        took = begun + perf_counter() - start
        found.append((took / 2, waited_s() - before > DISTURBED * took))
    communicator.close()
    return found


def _times_of_all(rank: int, cases: list[tuple[str, int]], bench: Bench) -> list[Runs]:
    found = []
    for each, size in cases:
        runs = _times(_call(each, size, rank, bench.device), bench)
        messages = 2 if each == SEND else 1  # there and back
        found.append([(took / messages, cut) for took, cut in runs])
    return found


def _call(what: str, size: int, rank: int, device: torch.device) -> Callable[[], object]:
    """Return one transfer of ``size`` bytes, as the runtime makes it."""
    members = dist.get_world_size()
    elements = max(members, size // 4 // members * members)
    whole = torch.ones(elements, device=device)
    part = torch.ones(elements // members, device=device)
    peer, before = (rank + 1) % members, (rank - 1) % members
    match what:
        case "all_reduce":
            return lambda: dist.all_reduce(whole)
        case "all_gather":
            return lambda: _all_gather(whole, part)
        case "reduce_scatter":
            return lambda: _reduce_scatter(part, whole)
        case "all_to_all":
            out = torch.empty_like(whole)
            return lambda: dist.all_to_all_single(out, whole)
        case "ring_exchange":
            came = torch.empty_like(part)
            return lambda: _go_round(part, came, peer, before)
        case "send":
            return lambda: _there_and_back(whole, rank, peer)
        case _:
            raise AssertionError(what)


def _go_round(part: Tensor, came: Tensor, to: int, source: int) -> None:
    for _ in range(dist.get_world_size() - 1):
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, part, to), dist.P2POp(dist.irecv, came, source)])
        for work in works:
            work.wait()


def _there_and_back(tensor: Tensor, rank: int, peer: int) -> None:
    """Send to the other rank and have it sent back: two messages."""
    if rank == 0:
        dist.send(tensor, peer)
        dist.recv(tensor, peer)
    else:
        dist.recv(tensor, peer)
        dist.send(tensor, peer)


def _times(call: Callable[[], object], bench: Bench) -> Runs:
    """Time runs of a call that all ranks make, as many on every rank."""
    call()
    once = _agreed(_clocked(call, 3, bench)[0], bench)
    inner = max(1, min(200, int(1e-3 / once)))
    runs = max(LEAST, min(40, int(bench.seconds / (once * inner))))
    found = []
    for _ in range(runs):
        found.append(_clocked(call, inner, bench, meet=True))
    return found


def _clocked(call: Callable[[], object], times: int, bench: Bench, *, meet: bool = False) -> tuple[float, bool]:
    """Return seconds a call, and whether something else kept this process waiting; all ranks begin when they have met,
    if they are to."""
    with before_others(bench.priority):
        if meet:
            dist.barrier()
        before = waited_s()
        start = perf_counter()
        for _ in range(times):
            call()
        if bench.kind == "cuda":
            torch.cuda.synchronize()
        took = perf_counter() - start
    return took / times, waited_s() - before > DISTURBED * took


def _agreed(value: float, bench: Bench) -> float:
    """Return the largest of all ranks' values."""
    made = torch.tensor([value], dtype=torch.float64, device=bench.device)
    dist.all_reduce(made, dist.ReduceOp.MAX)
    return float(made)


def _overlaps(rank: int, bench: Bench) -> dict[str, Runs]:
    a = torch.randn(_ROWS, _ROWS, device=bench.device)
    buffer = torch.ones(1 << 20, device=bench.device)

    def compute() -> None:
        for _ in range(_PRODUCTS):
            torch.mm(a, a)

    _clocked(compute, 2, bench)
    alone = _agreed(_best(compute, bench) if rank == 0 else 0.0, bench)  # the others wait in the reduction
    dist.barrier()
    one = _agreed(_best(lambda: dist.all_reduce(buffer), bench, meet=True), bench)
    times = max(1, round(alone / one))

    def both() -> None:
        works = [dist.all_reduce(buffer, async_op=True) for _ in range(times)]
        compute()
        for work in works:
            assert work is not None
            work.wait()

    beside, crossed = [], []
    for _ in range(20):
        took, cut = _clocked(compute, 1, bench, meet=True)
        beside.append((took / alone, cut))
        took, cut = _clocked(both, 1, bench, meet=True)
        crossed.append((took / max(alone, one * times), cut))
    return {COMPUTE_AND_COMPUTE: beside, COMPUTE_AND_TRANSFER: crossed}


def _best(call: Callable[[], object], bench: Bench, *, meet: bool = False) -> float:
    return min(_clocked(call, 1, bench, meet=meet)[0] for _ in range(10))
