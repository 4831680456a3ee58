"""Whole steps of strategies by the runtime, on processes of this machine, round after round.

All strategies are built first and then take turns, a burst of steps each, so that what drifts (clocks, neighbours)
meets all of them alike, and times of one round may be paired.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter

import torch
import torch.distributed as dist

from piper_core.arch.record import Architecture
from piper_core.errors import ConfigError
from piper_core.runtime.gloo import GlooCommunicator
from piper_core.runtime.groups import degrees_of
from piper_core.runtime.lowering import Lowering
from piper_core.runtime.model import ArchitectureSource
from piper_core.runtime.program import RankProgram
from piper_core.schedule.compile import Compiled
from profiler.measure.processes import on_processes
from profiler.measure.quiet import before_others, waited_s
from profiler.measure.transfers import DISTURBED

STEPS = 1
"""Steps of a burst, one right after the other, between two meetings of all ranks."""
WARM_UP = 2


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
    """Seconds a step, of the slowest rank, and whether something else kept a rank waiting."""

    seconds: float
    disturbed: bool


def measure_steps(architecture: Architecture, trials: Sequence[Trial], rounds: int, *, threads: int = 1,
                  priority: bool = False) -> list[list[Burst]]:  # fmt: skip
    """Return the bursts of every trial, one a round; strategies of fewer ranks leave the last processes idle.

    Raises:
        ConfigError: a strategy that the runtime cannot run on this model.
    """
    size = max(trial.ranks for trial in trials)
    by_rank = on_processes(_run, size, architecture, list(trials), rounds, priority, threads=threads)
    found = []
    for i, trial in enumerate(trials):
        turns = zip(*(answers[i] for answers in by_rank[: trial.ranks]), strict=True)
        found.append([Burst(max(s for s, _ in turn), any(cut for _, cut in turn)) for turn in turns])
    return found


def _run(rank: int, architecture: Architecture, trials: list[Trial], rounds: int,
         priority: bool) -> list[list[tuple[float, bool]]]:  # fmt: skip
    communicator = GlooCommunicator()
    sources: dict[object, ArchitectureSource] = {}
    calls: list[Callable[[], object] | None] = []
    try:
        for trial in trials:
            calls.append(_call(rank, architecture, trial, communicator, sources) if rank < trial.ranks else None)
        for call in calls:
            for _ in range(WARM_UP):
                dist.barrier()
                if call is not None:
                    call()
        found: list[list[tuple[float, bool]]] = [[] for _ in trials]
        for _ in range(rounds):
            for i, call in enumerate(calls):
                with before_others(priority):
                    dist.barrier()
                    if call is not None:
                        found[i].append(_burst(call))
        return found
    finally:
        with suppress(RuntimeError):
            communicator.close()


def _burst(call: Callable[[], object]) -> tuple[float, bool]:
    before, start = waited_s(), perf_counter()
    for _ in range(STEPS):
        call()
    took = perf_counter() - start
    return took / STEPS, waited_s() - before > DISTURBED * took


def _call(rank: int, architecture: Architecture, trial: Trial, communicator: GlooCommunicator,
          sources: dict[object, ArchitectureSource]) -> Callable[[], object]:  # fmt: skip
    degrees = degrees_of(trial.compiled.dag)
    key = (degrees, trial.micro_batch, trial.seq_len)
    if key not in sources:
        sources[key] = ArchitectureSource(architecture, trial.micro_batch, trial.seq_len, degrees)
    program = RankProgram(Lowering(trial.compiled, sources[key]), rank, communicator)
    batch = program.lowering.slicing.batch
    if batch < 1:
        raise ConfigError(f"{trial.name}: a batch of nothing")
    generator = torch.Generator().manual_seed(0)
    tokens, targets = (
        torch.randint(0, architecture.vocab, (batch, trial.seq_len), generator=generator) for _ in range(2)
    )
    return lambda: program.step(tokens, targets)
