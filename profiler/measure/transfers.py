"""Collectives and messages by size, and work beside them, between processes of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median

import torch
import torch.distributed as dist

from piper_core.frontend.apart import apart
from profiler.measure.bench import Bench, Runs, clocked
from profiler.measure.exchanges import KINDS, Exchanges, exchanges
from profiler.measure.messages import host_runs, way_runs
from profiler.measure.processes import on_processes
from profiler.record import SEND, Meeting, Overlap, Sample, Transfer

SIZES = (1 << 10, 1 << 13, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
"""Bytes: latency alone up to bandwidth alone."""
LEAST = 5
COMPUTE_AND_COMPUTE, COMPUTE_AND_TRANSFER = "compute and compute", "compute and transfer"
_ROWS, _PRODUCTS, _TOGETHER = 256, 40, 20
RUN_S, PASSES = 8e-3, 3
"""Seconds of calls in a row that one time is the mean of: by far more than ranks are apart when they start; and how
often all kinds and sizes take turns, so that what drifts meets all of them."""
MEETINGS = ((2, 32), (8, 32), (16, 24), (32, 16), (128, 8))
"""Small products between two exchanges, and exchanges in a row: many, since a step pays for their mean."""
_MEETING_ROWS, _MEETING_BYTES, _MEETING_ROUNDS = 128, 1 << 16, 20


@dataclass(frozen=True, slots=True)
class Measurements:
    """Times of every kind and size; how much computing ranks slow each other, and compute and a transfer; what starting
    and finishing a message takes of the thread that computes (None: not measured); what ranks lose that exchange after
    computing. All but the times are there only where each rank has a core or a device of its own."""

    transfers: tuple[Transfer, ...]
    overlaps: tuple[Overlap, ...] = ()
    host: Sample | None = None
    meetings: tuple[Meeting, ...] = ()


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
    return Measurements(
        tuple(
            Transfer(each, ranks, 1, size, _slowest([rank.times[i] for rank in by_rank]))
            for i, (each, size) in enumerate(cases)
        ),
        tuple(Overlap(what, _slowest([rank.overlaps[what] for rank in by_rank])) for what in by_rank[0].overlaps),
        _slowest([rank.host for rank in by_rank]) if all(rank.host for rank in by_rank) else None,
        tuple(
            Meeting(
                median(rank.meetings[i][0] for rank in by_rank), _slowest([rank.meetings[i][1] for rank in by_rank])
            )
            for i in range(len(by_rank[0].meetings))
        ),
    )


def _slowest(by_rank: list[Runs]) -> Sample:
    """Return the time of the slowest rank in each run; runs that were interrupted anywhere are left out, if some are
    not."""
    together = list(zip(*by_rank, strict=True))
    times = [max(seconds for seconds, _ in each) for each in together]
    clean = [t for t, each in zip(times, together, strict=True) if not any(cut for _, cut in each)]
    return Sample(tuple(clean), len(times) - len(clean)) if len(clean) >= LEAST else Sample(tuple(times))


# --- in the processes ---


@dataclass(frozen=True, slots=True)
class Rank:
    """What one rank timed; a meeting is the seconds of computing alone, and factors."""

    times: list[Runs]
    overlaps: dict[str, Runs]
    host: Runs
    meetings: list[tuple[float, Runs]]


def _all(rank: int, cases: list[tuple[str, int]], bench: Bench, alone: bool) -> Rank:
    with exchanges(bench.kind) as made:
        times = _times_of_all(made, cases, bench)
        if not alone:
            return Rank(times, {}, [], [])
        hosts = bench.kind == "cpu"
        meetings = [_meeting(made, bench, *each) for each in MEETINGS] if hosts else []
        return Rank(times, _overlaps(rank, bench), host_runs(made, bench) if hosts else [], meetings)


def _times_of_all(made: Exchanges, cases: list[tuple[str, int]], bench: Bench) -> list[Runs]:
    calls, rows, found = [], [], []
    for each, size in cases:
        call = made.call(each, size)
        call()
        once = _agreed(clocked(call, 3, bench)[0], bench)
        inner = max(1, min(200, ceil(RUN_S / once)))
        calls.append(call)
        rows.append((inner, max(LEAST, min(40, int(bench.seconds / (once * inner))))))
        found.append(Runs())
    for turn in range(PASSES):
        for i, (inner, runs) in enumerate(rows):
            sends = cases[i][0] == SEND
            for _ in range(turn, runs, PASSES):
                if sends and bench.kind == "cpu":
                    found[i].append(way_runs(made, cases[i][1], bench))
                    continue
                took, cut = clocked(calls[i], inner, bench, meet=True)
                found[i].append((took / (2 if sends else 1), cut))  # there and back
    return found


def _meeting(made: Exchanges, bench: Bench, products: int, times: int) -> tuple[float, Runs]:
    """Return seconds of computing alone, and by which factor it is longer where an exchange follows each time, the
    exchange's own seconds left out."""
    a = torch.randn(_MEETING_ROWS, _MEETING_ROWS, device=made.device)
    exchange = made.call("all_reduce", _MEETING_BYTES)

    def compute() -> None:
        for _ in range(products):
            torch.mm(a, a)

    def both() -> None:
        compute()
        exchange()

    found: list[tuple[float, float, float, bool]] = []
    for _ in range(_MEETING_ROUNDS):
        (alone, a_cut), (row, b_cut), (together, c_cut) = (
            clocked(each, times, bench, meet=True) for each in (compute, exchange, both)
        )
        found.append((alone, row, together, a_cut or b_cut or c_cut))
    alone_s, row_s = (median(each[i] for each in found) for i in (0, 1))
    return alone_s, [(max(alone_s, together - row_s) / alone_s, cut) for _, _, together, cut in found]


def _agreed(value: float, bench: Bench) -> float:
    """Return the largest of all ranks' values."""
    made = torch.tensor([value], dtype=torch.float64, device=bench.device)
    dist.all_reduce(made, dist.ReduceOp.MAX)
    return float(made)


def _overlaps(rank: int, bench: Bench) -> dict[str, Runs]:
    """Time work beside other work over the longer alone, both in one round, so that other programs slow both alike."""
    a = torch.randn(_ROWS, _ROWS, device=bench.device)
    buffer = torch.ones(1 << 20, device=bench.device)

    def compute() -> None:
        for _ in range(_PRODUCTS):
            torch.mm(a, a)

    def transfers(times: int) -> list[dist.Work]:
        works = [dist.all_reduce(buffer, async_op=True) for _ in range(times)]
        return [work for work in works if work is not None]

    def alone_s() -> float:
        """Rank 0 computes, and the others wait in the reduction."""
        return _agreed(clocked(compute, 1, bench)[0] if rank == 0 else 0.0, bench)

    def wait(works: list[dist.Work]) -> None:
        for work in works:
            work.wait()

    def both() -> None:
        works = transfers(times)
        compute()
        wait(works)

    clocked(compute, 2, bench)
    least = min(alone_s() for _ in range(3))
    one = _agreed(min(clocked(lambda: wait(transfers(1)), 1, bench, meet=True)[0] for _ in range(3)), bench)
    times = max(1, round(least / one))
    beside, crossed = [], []
    for _ in range(_TOGETHER):
        alone = alone_s()
        took, cut = clocked(compute, 1, bench, meet=True)
        beside.append((took / alone, cut))
        moved = _agreed(clocked(lambda: wait(transfers(times)), 1, bench, meet=True)[0], bench)
        took, cut = clocked(both, 1, bench, meet=True)
        crossed.append((took / max(alone, moved), cut))
    return {COMPUTE_AND_COMPUTE: beside, COMPUTE_AND_TRANSFER: crossed}
