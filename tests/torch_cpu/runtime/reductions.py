"""Reductions on three real gloo processes."""

from __future__ import annotations

import torch

from piper_core.runtime.gloo import SMALL_BYTES, GlooCommunicator
from profiler.measure.processes import on_processes

Reduced = list[tuple[str, int, str, list[float], bool]]
SIZES = (1, 7, SMALL_BYTES // 4 + 2)


def reduced(rank: int) -> Reduced:
    """Reduce tensors of several sizes, two at a time, and return what came: operation, elements, dtype, its first
    values, and whether all are as they are to be."""
    communicator, found = GlooCommunicator(), []
    group = communicator.group((0, 1, 2), "test")
    try:
        for dtype in (torch.float32, torch.float64, torch.int64):
            for operation, whole in (("sum", 3), ("max", 2), ("min", 0)):
                for numel in SIZES:
                    given = [torch.full((numel, 1), rank + shift, dtype=dtype) for shift in (0, 10)]
                    works = [communicator.all_reduce(each, group, operation) for each in given]
                    for work in reversed(works):
                        work.wait()
                        work.wait()
                    wanted = [whole, whole + (30 if operation == "sum" else 10)]
                    same = all(bool((g == w).all()) for g, w in zip(given, wanted, strict=True))
                    found.append((operation, numel, str(dtype), [float(g[0]) for g in given], same))
    finally:
        communicator.close()
    return found


def in_forks() -> list[Reduced]:
    """Return what each rank has; call it in a process apart."""
    torch.set_num_threads(1)
    return on_processes(reduced, 3, fork=True, timeout_s=60.0)
