"""A step as it was: when each action of each stream ran, and how much memory the tensors of a rank took at most.

A step is measured for time or for memory, not for both: to follow memory every operation is looked at.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from piper_core.ir.timeline import Event, Lane, Timeline
from piper_core.runtime.program import RankProgram
from piper_core.runtime.slices import Slice
from piper_core.runtime.steps import Do

Calls = Sequence[Callable[[], object]]


@dataclass(frozen=True, slots=True)
class Recorded:
    """One rank's step; ``began_s`` and times are of the machine's monotonic clock, which its processes share.

    What communicates lasts from its start until a rank has waited for it, which is later than its end where that rank
    was busy.
    """

    rank: int
    loss: Tensor
    began_s: float
    lanes: tuple[Lane, ...]


@dataclass(frozen=True, slots=True)
class Peaks:
    """Bytes of a rank's tensors: the most at any time in a step, what it keeps between steps, and the most in each
    action by its text. Freed buffers that it keeps for the next use count."""

    rank: int
    loss: Tensor
    peak_bytes: int
    kept_bytes: int
    by_action: Mapping[str, int]


def record(program: RankProgram, slices: Mapping[int, Slice]) -> Recorded:
    """Run one step and say when everything was."""
    times: list[tuple[float, float]] = []

    def around(calls: Calls) -> None:
        for at, call in enumerate(calls):
            program.at = at
            start = perf_counter()
            call()
            times.append((start, perf_counter()))

    began = perf_counter()
    loss = program.run(slices, around)
    spans: dict[int, tuple[float, float]] = {}
    for (action, do, _), (start, end) in zip(program.code, times, strict=True):
        low, high = spans.get(action, (start, end))
        spans[action] = (low, high if do is Do.START else end)
    plan, lanes = program.plan, []
    starts = plan.start.tolist()
    streams = [(i, stream) for i, stream in enumerate(plan.streams) if stream.row == program.row]
    for i, stream in streams:
        events = tuple(
            Event(spans[a][0], spans[a][1], str(plan.action(a)), plan.action(a).kind)
            for a in range(starts[i], starts[i + 1])
            if a in spans
        )
        lanes.append(Lane(program.row, stream.name, events))
    return Recorded(program.rank, loss, began, tuple(lanes))


def joined(steps: Iterable[Recorded]) -> Timeline:
    """Return one timeline of the rows of a step, from one rank of each row (the first that is given), from 0 on."""
    found: dict[int, Recorded] = {}
    for each in steps:
        if each.lanes:
            found.setdefault(each.lanes[0].row, each)
    zero = min((each.began_s for each in found.values()), default=0.0)
    lanes = tuple(lane for row in sorted(found) for lane in found[row].lanes)
    return Timeline(lanes).shifted(-zero)


def peaks(program: RankProgram, slices: Mapping[int, Slice], limit_bytes: float = inf) -> Peaks:
    """Run one step and say how much memory it took.

    Raises:
        torch.OutOfMemoryError: more than ``limit_bytes``.
    """
    kept = _storages(_held(program))
    meter = Meter(sum(kept.values()), set(kept), limit_bytes=limit_bytes)
    by_action: dict[str, int] = {}
    most = meter.now

    def around(calls: Calls) -> None:
        nonlocal most
        for at, call in enumerate(calls):
            program.at = at
            meter.peak = meter.now
            call()
            text = str(program.plan.action(program.code[at][0]))
            by_action[text] = max(by_action.get(text, 0), meter.peak)
            most = max(most, meter.peak)

    with meter:
        loss = program.run(slices, around)
    return Peaks(program.rank, loss, most, sum(_storages(_held(program)).values()), by_action)


def _held(program: RankProgram) -> list[Tensor]:
    """Return every tensor that a rank keeps between steps."""
    found = program.sync.arena.tensors
    for stage in program.sync.stages.values():
        found += stage.buffers.values()
        found += [each for run in stage.runs for each in run.tensors]
    for optimizer in program.sync.optimizers.values():
        found += [each for state in optimizer.states for each in state.values()]
    return found


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    storages = [each.untyped_storage() for each in tensors]
    return {each.data_ptr(): each.nbytes() for each in storages}


@dataclass
class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own class has no annotations
    """Counts the bytes of storages that operations make, until they are freed."""

    now: int
    known: set[int] = field(default_factory=set)
    peak: int = 0
    limit_bytes: float = inf

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor):
                self._add(each.untyped_storage())
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage.data_ptr(), storage.nbytes()
        if not size or key in self.known:
            return
        self.known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        if self.now > self.limit_bytes:
            raise torch.OutOfMemoryError(
                f"its tensors take {self.now:,} bytes, and {self.limit_bytes:,.0f} is the limit"
            )
        weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size
