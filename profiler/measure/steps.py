"""Whole steps of strategies by the runtime, on processes of this machine, round after round.

All strategies are built first and then take turns, a burst of steps each, so that what drifts (clocks, neighbours)
meets all of them alike, and times of one round may be paired.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean, median
from time import perf_counter

import torch
import torch.distributed as dist

from piper_core.arch.record import Architecture
from piper_core.frontend.apart import apart
from piper_core.runtime.cores import bind
from piper_core.runtime.gloo import GlooCommunicator
from piper_core.runtime.groups import degrees_of
from piper_core.runtime.lowering import Lowering
from piper_core.runtime.model import ArchitectureSource
from piper_core.runtime.program import RankProgram
from piper_core.schedule.compile import Compiled
from profiler.measure.bench import DISTURBED
from profiler.measure.pace import Pace
from profiler.measure.processes import LIMIT_S, on_processes
from profiler.measure.quiet import before_others, waited_s

LEAD_IN, STEPS = 1, 2
"""Steps of a burst, one right after the other, between two meetings of all ranks: those not timed, which bring a
strategy's own values back into the caches after the others' turns, and those timed."""
WARM_UP = 2
READINGS = 3
"""Readings of the pace before the timed steps, and after."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A compiled strategy on a built-in model, to be run."""

    name: str
    compiled: Compiled
    micro_batch: int
    seq_len: int

    @property
    def ranks(self) -> int:
        return len({rank for row in self.compiled.plan.rows for rank in row})


@dataclass(frozen=True, slots=True)
class Burst:
    """Seconds a step, of the slowest rank, whether something else kept a rank waiting, and the pace of the cores
    meanwhile, in seconds of :mod:`profiler.measure.pace`."""

    seconds: float
    disturbed: bool
    pace_s: float


def measure_steps(architecture: Architecture, trials: Sequence[Trial], rounds: int, *, threads: int = 1,
                  priority: bool = False) -> list[list[Burst]]:  # fmt: skip
    """Return the bursts of every trial, one a round; strategies of fewer ranks leave the last processes idle.

    Graphs are made once, in a process apart, and shared by its forks.

    Raises:
        ConfigError: a strategy that the runtime cannot run on this model.
    """
    by_rank = apart(_prepare_and_run, architecture, list(trials), rounds, threads, priority, timeout_s=LIMIT_S)
    found = []
    for i, trial in enumerate(trials):
        turns = zip(*(answers[i] for answers in by_rank[: trial.ranks]), strict=True)
        found.append([
            Burst(max(s for s, *_ in turn), any(cut for _, cut, _ in turn), fmean(pace for *_, pace in turn))
            for turn in turns
        ])  # fmt: skip
    return found


Call = Callable[[], object]
Turns = list[tuple[float, bool, float]]
Ready = tuple[Trial, Lowering]


def _prepare_and_run(
    architecture: Architecture, trials: list[Trial], rounds: int, threads: int, priority: bool
) -> list[list[Turns]]:
    torch.set_num_threads(1)  # no thread may be there when processes fork
    sources: dict[object, ArchitectureSource] = {}
    ready: list[Ready] = []
    for trial in trials:
        degrees = degrees_of(trial.compiled.dag)
        key = (degrees, trial.micro_batch, trial.seq_len)
        if key not in sources:
            sources[key] = ArchitectureSource(architecture, trial.micro_batch, trial.seq_len, degrees)
        lowering = Lowering(trial.compiled, sources[key])
        for row in range(len(trial.compiled.plan.rows)):
            lowering.table(row)
        ready.append((trial, lowering))
    size = max(trial.ranks for trial in trials)
    return on_processes(_run, size, architecture.vocab, ready, rounds, priority, threads=threads, fork=True)


def _run(rank: int, vocab: int, ready: list[Ready], rounds: int, priority: bool) -> list[Turns]:
    communicator = GlooCommunicator()
    try:
        calls = [
            _call(rank, vocab, trial, lowering, communicator) if rank < trial.ranks else None
            for trial, lowering in ready
        ]
        bind(rank, dist.get_world_size())
        for call in calls:
            for _ in range(WARM_UP):
                dist.barrier()
                if call is not None:
                    call()
        pace = Pace()
        found: list[Turns] = [[] for _ in ready]
        for _ in range(rounds):
            for i, call in enumerate(calls):
                with before_others(priority):
                    dist.barrier()
                    if call is not None:
                        found[i].append(_burst(call, pace))
        return found
    finally:
        with suppress(RuntimeError):
            communicator.close()


def _burst(call: Call, pace: Pace) -> tuple[float, bool, float]:
    for _ in range(LEAD_IN):
        call()
    readings = [pace.read() for _ in range(READINGS)]
    before, start = waited_s(), perf_counter()
    for _ in range(STEPS):
        call()
    took, waited = perf_counter() - start, waited_s() - before
    readings += [pace.read() for _ in range(READINGS)]
    return took / STEPS, waited > DISTURBED * took, median(readings)


def _call(rank: int, vocab: int, trial: Trial, lowering: Lowering, communicator: GlooCommunicator) -> Call:
    program = RankProgram(lowering, rank, communicator)
    generator = torch.Generator().manual_seed(0)
    shape = lowering.slicing.batch, trial.seq_len
    tokens, targets = (torch.randint(0, vocab, shape, generator=generator) for _ in range(2))
    return lambda: program.step(tokens, targets)
