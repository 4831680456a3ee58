"""What a profile holds: raw times and what they are of. ``profiler/form.py`` is its text form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, isfinite, sqrt

from piper_core.frontend.degrees import Degrees
from piper_core.names import Collective, Phase, Recompute, Region
from profiler.fingerprint import Conditions, Machine

OUT_OF_MEMORY = "out of memory"
WIDE = 0.1
"""Relative half-width of an interval from which a measurement counts as noisy, and is warned of."""
SEND = "send"
"""Kind of a point-to-point message in :class:`Transfer`; the others are names of collectives."""
TRANSFERS = (*(each.name.lower() for each in Collective if each is not Collective.NONE), SEND)
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
"""Bytes of an element."""


@dataclass(frozen=True)
class Sample:
    """Raw seconds of one call, each the mean of a short run of calls; knows its own doubt.

    ``interrupted`` counts times that were left out because the system ran something else in between.
    """

    times_s: tuple[float, ...]
    interrupted: int = 0

    def __post_init__(self) -> None:
        if not self.times_s or not all(isfinite(t) and t > 0 for t in self.times_s):
            raise ValueError("a sample has at least one time, and all are positive and finite")

    def scaled(self, factor: float) -> Sample:
        return Sample(tuple(each * factor for each in self.times_s), self.interrupted)

    @cached_property
    def sorted_s(self) -> tuple[float, ...]:
        return tuple(sorted(self.times_s))

    @property
    def median_s(self) -> float:
        times, half = self.sorted_s, len(self.times_s) // 2
        return times[half] if len(times) % 2 else (times[half - 1] + times[half]) / 2

    @property
    def interval_s(self) -> tuple[float, float]:
        """The 95 % interval of the median by order statistics (normal approximation of the binomial); below six times
        it is from the least to the most."""
        n = len(self.times_s)
        k = max(0, ceil((n - 1.96 * sqrt(n)) / 2) - 1) if n >= 6 else 0
        return self.sorted_s[k], self.sorted_s[n - 1 - k]

    @property
    def doubt(self) -> float:
        """Half of the interval, relative to the median; infinite for a single time."""
        low, high = self.interval_s
        if len(self.times_s) < 2:
            return float("inf")
        return (high - low) / 2 / self.median_s

    @property
    def spread(self) -> float:
        """Distance of the quartiles, relative to the median."""
        times, n = self.sorted_s, len(self.times_s)
        return (times[(3 * n) // 4 - (n > 3 and n % 4 == 0)] - times[n // 4]) / self.median_s


@dataclass(frozen=True, slots=True)
class Site:
    """Where in a model a chunk is, and how it is divided: what a search asks by.

    ``policy`` says what R repeats; it is ``none`` for the other phases. One site stands for a region of every layer.
    """

    region: Region
    phase: Phase
    micro_batch: int
    seq_len: int
    degrees: Degrees = field(default_factory=Degrees)
    policy: Recompute = Recompute.NONE

    def __str__(self) -> str:
        d = self.degrees
        ways = [("tp", d.tensor), ("ep", d.expert), ("cp", d.context)]
        parts = [f"{name}{n}" for name, n in ways if n > 1] + (["sp"] if d.sequence else [])
        again = f" {self.policy}" if self.phase is Phase.R else ""
        return " ".join([f"{self.region} {self.phase.name}{again} b{self.micro_batch} s{self.seq_len}", *parts])


def shared(region: Region, degrees: Degrees) -> Degrees:
    """Return what of ``degrees`` divides a region: expert parallelism leaves all but experts as they are."""
    return degrees if region is Region.EXPERT else replace(degrees, expert=1)


@dataclass(frozen=True, slots=True)
class ChunkTime:
    """One distinct chunk graph in one phase. ``sample`` is None where it ``failed``, for the reason given;
    ``peak_bytes`` is the most it holds beside its arguments, ``saved_bytes`` what its forward leaves behind."""

    sample: Sample | None
    peak_bytes: int = 0
    saved_bytes: int = 0
    failed: str = ""

    def joined(self, before: ChunkTime | None) -> ChunkTime:
        """Return this with the times of ``before`` too; what failed once is left as it is."""
        if before is None or before.sample is None or self.sample is None:
            return self
        times = before.sample.times_s + self.sample.times_s
        return replace(self, sample=Sample(times, before.sample.interrupted + self.sample.interrupted))

    def scaled(self, factor: float) -> ChunkTime:
        """Return this with its times multiplied."""
        if self.sample is None:
            return self
        return replace(self, sample=self.sample.scaled(factor))


@dataclass(frozen=True, slots=True)
class Transfer:
    """A collective or a message of ``bytes`` (sizes as ``search.cost.base.CostModel`` counts them) between ``ranks``
    processes on ``nodes`` nodes, each alone on the machine."""

    kind: str
    ranks: int
    nodes: int
    bytes: int
    sample: Sample

    def __post_init__(self) -> None:
        if self.kind not in TRANSFERS or self.ranks < 2 or self.nodes < 1 or self.bytes < 1:
            raise ValueError(f"a transfer {self.kind!r} of {self.bytes} bytes among {self.ranks} ranks is none")


@dataclass(frozen=True, slots=True)
class UpdateTime:
    """What one step does to ``numel`` parameters of a rank beside chunks: clear gradients, norm, optimiser."""

    numel: int
    sample: Sample


@dataclass(frozen=True, slots=True)
class Overlap:
    """Two kinds of work at once: ``factors`` are seconds of both together over those of the longer one alone."""

    what: str
    factors: Sample


@dataclass(frozen=True, slots=True)
class Meeting:
    """Ranks that compute for ``compute_s``, all at once, and then exchange: ``factors`` are seconds of both, those of
    the exchange alone left out, over ``compute_s``. Ranks are never quite equally fast, and each waits for the
    slowest."""

    compute_s: float
    factors: Sample


@dataclass(frozen=True, slots=True)
class Run:
    """A measured step: the strategy by its short text and a digest of its directives, times, and what was predicted.

    ``features`` are shares of the predicted step that the residual model looks at. ``when`` is ISO 8601, UTC.
    """

    strategy: str
    digest: str
    when: str
    step: Sample
    predicted_s: float
    features: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Profile:
    """All that was measured of one model on one kind of machine; tuples are in the order they were measured in.

    ``chunks`` is by structural digest, ``sites`` says which chunk each site is; ``dispatch`` is what starting and
    finishing a message takes of the thread that computes. Chunks were timed while a fixed piece of work took
    ``pace_s`` (:mod:`profiler.measure.pace`; 0: unknown).
    """

    machine: Machine
    model: str
    model_digest: str
    dtype: str
    chunks: dict[str, ChunkTime] = field(default_factory=dict)
    sites: dict[Site, str] = field(default_factory=dict)
    transfers: tuple[Transfer, ...] = ()
    updates: tuple[UpdateTime, ...] = ()
    overlaps: tuple[Overlap, ...] = ()
    dispatch: Sample | None = None
    runs: tuple[Run, ...] = ()
    conditions: tuple[Conditions, ...] = ()
    meetings: tuple[Meeting, ...] = ()
    pace_s: float = 0.0

    @property
    def dtype_bytes(self) -> int:
        return DTYPES[self.dtype]

    @cached_property
    def by_site(self) -> dict[Site, ChunkTime]:
        return {site: self.chunks[digest] for site, digest in self.sites.items() if digest in self.chunks}

    @property
    def noisy(self) -> list[str]:
        """What was measured with a wide interval, as text."""
        found = [str(s) for s, each in self.by_site.items() if each.sample is not None and each.sample.doubt > WIDE]
        found += [f"{t.kind} of {t.bytes} bytes" for t in self.transfers if t.sample.doubt > WIDE]
        return found + [f"update of {u.numel} parameters" for u in self.updates if u.sample.doubt > WIDE]

    def merged(self, other: Profile) -> Profile:
        """Return both together; of what both have, ``other`` counts (runs are kept from both)."""
        transfers = {(t.kind, t.ranks, t.nodes, t.bytes): t for t in (*self.transfers, *other.transfers)}
        updates = {u.numel: u for u in (*self.updates, *other.updates)}
        overlaps = {o.what: o for o in (*self.overlaps, *other.overlaps)}
        runs = {(r.digest, r.when): r for r in (*self.runs, *other.runs)}
        seen = dict.fromkeys((*self.conditions, *other.conditions))
        return replace(
            self, chunks=self.chunks | other.chunks, sites=self.sites | other.sites,
            transfers=tuple(transfers.values()), updates=tuple(updates.values()), overlaps=tuple(overlaps.values()),
            dispatch=other.dispatch or self.dispatch, meetings=other.meetings or self.meetings,
            runs=tuple(runs.values()), conditions=tuple(seen), pace_s=other.pace_s or self.pace_s,
        )  # fmt: skip
