"""What there is to time for the shapes asked: each distinct chunk graph once, wherever it occurs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from piper_core.arch.contract import legal_degrees
from piper_core.arch.record import Architecture
from piper_core.frontend.degrees import Degrees
from piper_core.names import Phase, ShardKind
from piper_core.runtime.graphs import Unit
from piper_core.runtime.measure import Meter
from profiler.measure.clock import Clock
from profiler.measure.layers import TURNS_BYTES, Bound, Layers
from profiler.measure.pace import Pace
from profiler.measure.repeat import Effort, in_turn, out_of_memory, sample
from profiler.record import OUT_OF_MEMORY, ChunkTime, Sample, Site


@dataclass(frozen=True, slots=True)
class Shape:
    """What a search may ask: how chunks are divided, and for how many sequences of which length."""

    degrees: Degrees
    micro_batch: int
    seq_len: int

    def __str__(self) -> str:
        d = self.degrees
        ways = [f"{name}{n}" for name, n in (("tp", d.tensor), ("ep", d.expert), ("cp", d.context)) if n > 1]
        return " ".join([f"b{self.micro_batch} s{self.seq_len}", *ways, *(["sp"] if d.sequence else [])])


@dataclass
class Subject:
    """A distinct chunk graph and the sites that are it."""

    digest: str
    layers: Layers
    unit: Unit
    sites: list[Site] = field(default_factory=list)


def shapes(
    architecture: Architecture, seq_len: int, *, tensor: Iterable[int] = (1,), expert: Iterable[int] = (1,),
    context: Iterable[int] = (1,), micro_batch: Iterable[int] = (1,), sequence: bool = True,
) -> list[Shape]:  # fmt: skip
    """Return every combination that the model allows: tensor parallelism with and without sequence parallelism.

    Raises:
        ConfigError: a degree that the model does not allow; says which would do.
    """
    made: list[Degrees] = []
    for tp in tensor:
        for ep in expert:
            for cp in context:
                made.append(Degrees(tp, expert=ep, context=cp))
                if tp > 1 and sequence and seq_len % (tp * cp) == 0:
                    made.append(Degrees(tp, sequence=True, expert=ep, context=cp))
    for each in made:
        each.check(architecture, seq_len)
    return [Shape(degrees, b, seq_len) for degrees in made for b in micro_batch]


def legal(architecture: Architecture, seq_len: int, ranks: int) -> dict[str, list[int]]:
    """Return the degrees that a search over ``ranks`` may ask for, by axis."""
    ways = {"tensor": ShardKind.TENSOR, "expert": ShardKind.EXPERT}
    return {
        name: [d for d in legal_degrees(architecture, kind, seq_len) if d <= ranks and ranks % d == 0]
        for name, kind in ways.items()
    }


def subjects(architecture: Architecture, wanted: Iterable[Shape], dtype: torch.dtype, device: str) -> list[Subject]:
    """Trace the shapes and return what there is to time."""
    found: dict[str, Subject] = {}
    for shape in wanted:
        layers = Layers(architecture, shape.micro_batch, shape.seq_len, shape.degrees, dtype, device)
        for site, unit, graph in layers.units():
            adds = site.phase in (Phase.B, Phase.BW)
            digest = hashlib.sha256(f"{graph.digest()} {adds} {dtype}".encode()).hexdigest()[:16]
            found.setdefault(digest, Subject(digest, layers, unit)).sites.append(site)
    return list(found.values())


def by_layers(found: Iterable[Subject]) -> Iterator[list[Subject]]:
    """Yield subjects that share values together, so that only those of one shape are in memory at a time."""
    groups: dict[int, list[Subject]] = {}
    for each in found:
        groups.setdefault(id(each.layers), []).append(each)
    yield from groups.values()


def measure(subject: Subject, clock: Clock, effort: Effort) -> ChunkTime:
    """Time a chunk by itself and look at its memory; out of memory is an answer too."""
    layers = subject.layers
    try:
        with torch.no_grad(), layers.inside():
            return _with_memory(subject, sample(layers.turns(subject.unit), clock, effort))
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        _let_go(layers)
        return ChunkTime(None, failed=OUT_OF_MEMORY)


def measure_in_turn(
    group: list[Subject], clock: Clock, effort: Effort, pace: Pace | None = None
) -> dict[str, ChunkTime]:
    """Time the chunks of one shape in turn, phase after phase as in a step, and return each by its digest.

    A chunk that is called again and again finds its code and its dispatch in the core's caches: those of tiny models
    take 5 to 15 % longer in a step.
    """
    phases = list(Phase)
    ordered = sorted(group, key=lambda each: phases.index(each.unit.phase))
    found = {each.digest: ChunkTime(None, failed=OUT_OF_MEMORY) for each in group}
    calls: dict[str, Callable[[], object]] = {}
    with torch.no_grad(), group[0].layers.inside():
        for each in ordered:
            with suppress_out_of_memory():
                calls[each.digest] = each.layers.turns(each.unit, TURNS_BYTES // len(group))
        times = in_turn(calls, clock, effort, pace)
        for each in ordered:
            with suppress_out_of_memory():
                if each.digest in times:
                    found[each.digest] = _with_memory(each, times[each.digest])
    return found


@contextmanager
def suppress_out_of_memory() -> Iterator[None]:
    """Go on after what a device has no memory for."""
    try:
        yield
    except RuntimeError as error:
        if not out_of_memory(error):
            raise


def _with_memory(subject: Subject, taken: Sample) -> ChunkTime:
    layers = subject.layers
    peak = _peak_bytes(layers.call(subject.unit), layers.device)
    saved = layers.saved_bytes(subject.sites[0].region) if subject.sites[0].phase is Phase.F else 0
    return ChunkTime(taken, peak, saved)


def _peak_bytes(call: Bound, device: str) -> int:
    if device == "cpu":
        meter = Meter(0, {each.untyped_storage().data_ptr() for each in call.given})
        with meter:
            call()
        return meter.peak
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated()) - int(before)


def _let_go(layers: Layers) -> None:
    layers.__dict__.pop("values", None)
    if layers.device != "cpu":
        torch.cuda.empty_cache()


def drop(group: list[Subject]) -> None:
    """Free the values of subjects that were measured."""
    _let_go(group[0].layers)
