"""One sitting: measure what a profile lacks, within a budget, and keep it as it goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter

import torch

from piper_core.arch.record import Architecture
from piper_core.errors import ConfigError
from piper_core.frontend.heap import keep_heap
from profiler.fingerprint import Conditions, Machine, conditions, machine
from profiler.measure.bench import Bench
from profiler.measure.chunks import Shape, Subject, by_layers, drop, measure, measure_in_turn, subjects
from profiler.measure.clock import clock_of
from profiler.measure.pace import Pace
from profiler.measure.quiet import check_priority
from profiler.measure.repeat import LEAST, MOST, Effort
from profiler.measure.transfers import measure_groups
from profiler.measure.updates import measure_updates
from profiler.record import ChunkTime, Profile
from profiler.store import add, model_digest

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
START_S, GROUP_S = 6.0, 9.0
"""What starting processes for transfers takes, and each size of group among them."""
MOST_RANKS = 8
"""Ranks of a CPU host beyond which transfers are not measured: they share cores more and more."""
UPDATES_S = 1.5
MOST_S, LEAST_S = 0.4, 0.01
"""Seconds that one chunk may have, with all the time in the world and with the least budget."""
TURNS = 5
"""How often all chunks take turns on a CPU, so that what drifts (clocks, neighbours) meets all of them."""
OVERHEAD = 1.15
"""Seconds of a chunk's measuring for one second of its calls: graphs and memory."""

Report = Callable[[str, int, int], None]
"""Told of what is done: words, how many of how many."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to measure: shapes of chunks on a device, and transfers among up to ``ranks`` processes (0: none)."""

    shapes: tuple[Shape, ...]
    device: str = "cpu"
    dtype: str = "float32"
    ranks: int = 0
    threads: int = 1
    priority: bool = False


@dataclass
class Sitting:
    """A model, what is wanted, and the profile in ``path`` that it goes into (None: nothing is kept on disk)."""

    architecture: Architecture
    wanted: Wanted
    path: Path | None
    machine: Machine = field(init=False)
    found: Profile = field(init=False)

    def __post_init__(self) -> None:
        clock_of(self.wanted.device)  # refuses what is not there
        if self.wanted.priority:
            check_priority()
        self.machine = machine(self.wanted.device, self.wanted.threads)
        self.found = self._empty()
        if self.path is not None and self.path.exists():
            self.found = add(self.found, self.path)  # refuses what is not the same

    def _empty(self, **parts: object) -> Profile:
        name, digest = self.architecture.name, model_digest(self.architecture)
        return Profile(self.machine, name, digest, self.wanted.dtype, **parts)  # type: ignore[arg-type]  # fields by name

    def trace(self) -> list[Subject]:
        """Return every distinct chunk of the shapes; those that the profile has are among them."""
        torch.set_num_threads(self.wanted.threads)
        return subjects(self.architecture, self.wanted.shapes, DTYPES[self.wanted.dtype], self.wanted.device)

    def missing(self, traced: list[Subject]) -> list[Subject]:
        return [each for each in traced if each.digest not in self.found.chunks]

    @property
    def group_sizes(self) -> list[int]:
        """Sizes of groups that transfers are lacking for: powers of two, as many as devices; CPU ranks may share cores,
        as they do when they train."""
        have = {t.ranks for t in self.found.transfers}
        most = max(MOST_RANKS, self.machine.count) if self.wanted.device == "cpu" else self.machine.count
        sizes = [2**i for i in range(1, 6) if 2**i <= min(self.wanted.ranks, most)]
        return [n for n in sizes if n not in have]

    def fixed_s(self) -> float:
        """Return what all but chunks takes."""
        sizes = self.group_sizes
        transfers_s = START_S + GROUP_S * len(sizes) if sizes else 0.0
        return transfers_s + (0.0 if self.found.updates else UPDATES_S)

    def effort(self, left_s: float, count: int, turns: int = 1) -> Effort:
        """Return what each of ``count`` chunks may take of the time left, a chunk that has its turn ``turns`` times as
        often."""
        seconds = max(LEAST_S, min(MOST_S, turns * left_s / OVERHEAD / max(1, count))) / turns
        return Effort(least=max(2, -(-LEAST // turns)), most=MOST // turns, seconds=seconds)

    def run(self, traced: list[Subject], deadline_s: float, report: Report) -> Profile:
        """Measure until all is done or ``deadline_s`` (of ``perf_counter``) has passed; return the whole profile.

        Ctrl-C leaves with KeyboardInterrupt; what was measured is in the file by then.

        Raises:
            ConfigError: a budget that nothing can be measured in.
        """
        todo = self.missing(traced)
        now = perf_counter()
        if todo and deadline_s - now < LEAST_S * len(todo):
            raise ConfigError(
                f"the budget was gone when {len(traced)} chunks had been traced, so nothing could be measured; give "
                f"{_words(now - deadline_s + self.fixed_s() + len(todo) * 0.1)} more, or fewer shapes"
            )
        sites = {site: each.digest for each in traced for site in each.sites}
        self._keep(sites={s: d for s, d in sites.items() if d in self.found.chunks})
        clock = clock_of(self.wanted.device, self.wanted.threads, priority=self.wanted.priority)
        if self.wanted.device == "cpu":
            keep_heap()  # as ranks do that train
        if not self.found.updates:
            report("optimiser", 0, len(todo))
            self._keep(updates=measure_updates(clock, Effort(seconds=0.2), self.wanted.device))
        cpu = self.wanted.device == "cpu"
        turns = TURNS if cpu else 1
        pace = Pace(self.found.pace_s) if cpu and todo else None
        done, whole = 0, turns * len(todo)
        if todo and self.fixed_s() < (deadline_s - perf_counter()) / 2:  # few transfers are in every strategy
            self._transfers(report, (0, len(todo)))
        for group in [each for _ in range(turns) for each in by_layers(todo)]:
            made: dict[str, ChunkTime] = {}
            try:
                for part in [group] if cpu else [[subject] for subject in group]:
                    left = deadline_s - perf_counter()
                    if left <= 0:
                        break
                    report(_what(part), done // turns, len(todo))
                    effort = self.effort(left, whole - done, turns)
                    timed = (
                        measure_in_turn(part, clock, effort, pace)
                        if cpu
                        else {part[0].digest: measure(part[0], clock, effort)}
                    )
                    made |= {digest: each.joined(self.found.chunks.get(digest)) for digest, each in timed.items()}
                    done += len(part)
            finally:
                self._keep(
                    chunks=made, sites={s: d for s, d in sites.items() if d in made},
                    pace_s=0.0 if pace is None else pace.base_s,
                )  # fmt: skip
                drop(group)
        if pace is not None and pace.seen:
            self._settle(pace, todo)
        if self.fixed_s() < deadline_s - perf_counter():
            self._transfers(report, (done // turns, len(todo)))
        report("done", done // turns, len(todo))
        return self.found

    def _settle(self, pace: Pace, todo: list[Subject]) -> None:
        """Bring the chunks of a first sitting to the pace that the machine had in the middle of it."""
        if len(todo) < len(self.found.chunks):
            return  # others are at the base already
        base_s = median(pace.seen)
        chunks = {digest: each.scaled(base_s / pace.base_s) for digest, each in self.found.chunks.items()}
        self._keep(chunks=chunks, pace_s=base_s)

    def _transfers(self, report: Report, count: tuple[int, int]) -> None:
        sizes = self.group_sizes
        if not sizes:
            return
        report(f"transfers among {' and '.join(map(str, sizes))}", *count)
        bench = Bench(self.wanted.device, self.wanted.threads, priority=self.wanted.priority)
        for each in measure_groups(sizes, bench, self.machine.count):
            self._keep(transfers=each.transfers, overlaps=each.overlaps, dispatch=each.host, meetings=each.meetings)

    def _keep(self, **parts: object) -> None:
        """Join parts to the profile, on disk too."""
        now: tuple[Conditions, ...] = (self._conditions,)
        new = self._empty(**parts, conditions=now)
        self.found = self.found.merged(new) if self.path is None else add(new, self.path)

    @property
    def _conditions(self) -> Conditions:
        if not hasattr(self, "_began"):
            self._began = conditions(self.wanted.device)
        return self._began


def _what(part: list[Subject]) -> str:
    if len(part) == 1:
        return str(part[0].sites[0])
    layers = part[0].layers
    return f"{len(part)} chunks of {Shape(layers.degrees, layers.micro_batch, layers.seq_len)}"


def _words(seconds: float) -> str:
    return f"{max(1.0, seconds):.0f} s"
