"""One protocol over CUDA events and the monotonic clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from resource import RUSAGE_THREAD, getrusage
from time import perf_counter, thread_time
from typing import Protocol

import torch

from piper_core.errors import ConfigError
from profiler.measure.quiet import before_others


@dataclass(frozen=True, slots=True)
class Timing:
    """``seconds`` of some calls; ``wall_s`` passed meanwhile; ``interrupted``: something else took the processor."""

    seconds: float
    wall_s: float
    interrupted: bool = False


class Clock(Protocol):
    """Times calls in a row."""

    def time(self, call: Callable[[], object], times: int) -> Timing:
        """Time ``times`` calls, one after another, with everything that they start."""
        ...


class MonotonicClock:
    """The CPU's own.

    The kernel counts how often this thread had to give up its core. Where it had to, its processor time counts instead,
    if all of the work is its own (``threads`` 1): it is the same but for what the caches lost.
    """

    def __init__(self, threads: int = 1, *, priority: bool = False) -> None:
        self._alone, self._priority = threads == 1, priority

    def time(self, call: Callable[[], object], times: int) -> Timing:
        with before_others(self._priority):
            before = getrusage(RUSAGE_THREAD).ru_nivcsw
            start, used = perf_counter(), thread_time()
            for _ in range(times):
                call()
            used, wall = thread_time() - used, perf_counter() - start
            interrupted = getrusage(RUSAGE_THREAD).ru_nivcsw != before
        return Timing(min(used, wall) if interrupted and self._alone else wall, wall, interrupted)


class CudaClock:
    """CUDA events on the current stream."""

    def time(self, call: Callable[[], object], times: int) -> Timing:
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
        start.record()
        for _ in range(times):
            call()
        end.record()
        end.synchronize()
        took = float(start.elapsed_time(end)) / 1e3
        return Timing(took, took)


def clock_of(kind: str, threads: int = 1, *, priority: bool = False) -> Clock:
    """Return the clock of a kind of device.

    Raises:
        ConfigError: torch has no such device here.
    """
    if kind == "cpu":
        return MonotonicClock(threads, priority=priority)
    if not torch.cuda.is_available():
        raise ConfigError(f"this torch ({torch.__version__}) has no CUDA device; use --device cpu")
    return CudaClock()
