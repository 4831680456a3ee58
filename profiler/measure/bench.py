"""Where transfers are timed, and how one run of calls is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist

from profiler.measure.quiet import before_others, waited_s

DISTURBED = 0.02
"""Part of a run for which a thread was kept waiting by something else, from which the run is left out."""

Runs = list[tuple[float, bool]]
"""Seconds a call of every run, and whether the process was interrupted meanwhile."""


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


def clocked(call: Callable[[], object], times: int, bench: Bench, *, meet: bool = False) -> tuple[float, bool]:
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
