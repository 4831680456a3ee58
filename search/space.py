"""The space of configurations: every field of a strategy but the order, its domains, and the constraints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cache
from itertools import product
from typing import NamedTuple, TypeAlias

from piper_core.arch.contract import legal_degrees
from piper_core.arch.record import Architecture
from piper_core.errors import ConfigError
from piper_core.names import Recompute, ShardKind
from piper_core.program.strategy import MAX_GPUS
from piper_core.schedule.families import FAMILIES
from piper_core.schedule.grid import Layout

Fine: TypeAlias = tuple[int, int, str]
"""Bucket, prefetch, streams."""
CUTS = ("balanced", "even")
OUTERS = ("pp", "dp")
BUCKETS = (1, 2, 4, 0)
PREFETCHES = (1, 2, 3)
STREAMS = ("own", "data", "all")
SOME = "some"
"""In a partial assignment: some layers of each stage are recomputed."""
USUAL = BUCKETS[0], PREFETCHES[0], STREAMS[0]
"""Bucket, prefetch and streams that a configuration has unless it says otherwise."""


@cache
def layout_of(schedule: str) -> Layout:
    """Return how a family lays stages on rows."""
    return FAMILIES[schedule].layout


@dataclass(frozen=True, slots=True, order=True)
class Configuration:
    """One point of the space. ``dp`` counts every rank that divides the batch (experts lie inside it);
    ``cuts`` is how layers fall on stages: ``balanced`` by time with embedding and head, or ``even``. ``recompute`` is
    none, selective, full, or how many layers of each stage, the first ones, are fully recomputed. ``outer`` is the
    outermost axis of the mesh on the topology, pp or dp: neighbours along it are farthest apart. ``bucket`` is how many
    layers' parameters a bucket holds (0: a whole stage's), ``prefetch`` how many gathers may run ahead of compute;
    ``streams`` is which collectives beside compute share a stream: each kind its own, those of ``data`` parallelism, or
    ``all``. ``order`` is who orders compute: the schedule's family, or the list scheduler within its layout; it is no
    axis of the space, whose configurations stand for all their orders."""

    pp: int
    tp: int
    dp: int
    ep: int
    schedule: str
    virtual_stages: int
    zero: int
    micro_batch: int
    num_microbatches: int
    recompute: str
    sequence_parallel: bool
    cuts: str
    cp: int = 1
    outer: str = "pp"
    bucket: int = 1
    prefetch: int = 1
    streams: str = "own"
    order: str = "family"

    @property
    def row_size(self) -> int:
        """Ranks of a pipeline row."""
        return self.dp * self.cp * self.tp

    @property
    def layout(self) -> Layout:
        """How stages lie on rows."""
        return layout_of(self.schedule)

    @property
    def plain(self) -> Configuration:
        """The same with the family's order, and the usual bucket, prefetch and streams."""
        bucket, prefetch, streams = USUAL
        return replace(self, bucket=bucket, prefetch=prefetch, streams=streams, order="family")

    @property
    def unusual(self) -> int:
        """How many of order, bucket, prefetch, streams and mesh order are not as usual: of equals, fewest is best."""
        mine = (self.bucket, self.prefetch, self.streams, self.order, self.outer)
        return sum(a != b for a, b in zip(mine, (*USUAL, "family", OUTERS[0]), strict=True))

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return self.pp * (1 if self.layout is Layout.BIDIRECTIONAL else self.virtual_stages)

    def __str__(self) -> str:
        degrees = f"pp={self.pp} tp={self.tp} dp={self.dp} ep={self.ep}" + (f" cp={self.cp}" if self.cp > 1 else "")
        degrees += f" outer={self.outer}" if self.outer != OUTERS[0] else ""
        if not self.micro_batch:
            return degrees
        if not self.cuts:  # a partial assignment: any schedule, ZeRO stage and cut
            return f"{degrees} b={self.micro_batch} m={self.num_microbatches} recompute={self.recompute}"
        fine = ("bucket", self.bucket), ("prefetch", self.prefetch), ("streams", self.streams), ("order", self.order)
        usual = dict(zip(("bucket", "prefetch", "streams", "order"), (*USUAL, "family"), strict=True))
        return (
            f"{degrees} {self.schedule} v={self.virtual_stages} zero={self.zero} b={self.micro_batch} "
            f"m={self.num_microbatches} recompute={self.recompute} sp={'on' if self.sequence_parallel else 'off'} "
            f"cuts={self.cuts}" + "".join(f" {name}={value}" for name, value in fine if value != usual[name])
        )


FIXABLE = tuple(f.name for f in fields(Configuration) if f.name != "order")
_WORDS = {
    "schedule": tuple(FAMILIES),
    "zero": ("0", "1", "2", "3"),
    "recompute": tuple(map(str, Recompute)),
    "sequence_parallel": ("on", "off"),
    "cuts": CUTS,
    "outer": OUTERS,
    "bucket": tuple(map(str, BUCKETS)),
    "prefetch": tuple(map(str, PREFETCHES)),
    "streams": STREAMS,
}
"""Values of the axes that do not count."""
_SHORT = {"b": "micro_batch", "m": "num_microbatches", "v": "virtual_stages", "sp": "sequence_parallel"}


class Degrees(NamedTuple):
    """How GPUs are divided, and which axis is outermost on the topology."""

    pp: int
    tp: int
    dp: int
    ep: int
    cp: int
    outer: str


@dataclass(frozen=True, slots=True)
class Space:
    """All configurations of a model on a number of GPUs.

    Constraints, stated once: pp x tp x cp x dp is the number of GPUs; tp divides heads, key heads, widths and
    vocabulary and stays inside a node; cp divides half the sequence; dp divides the global batch; ep divides dp and the
    experts; stages do not outnumber layers; the schedule accepts (pp, v, m); ZeRO-2/3, and tied parameters, need each
    stage on one row; ZeRO needs dp x cp > 1; sequence parallelism needs tp > 1 and a sequence that tp x cp divides.
    Fewer layers of a stage are recomputed than its share of all layers (that many and more is ``full``). Without a
    pipeline (pp = 1) every family is plain gradient accumulation, written 1f1b; where pp or dp / ep is 1 (ranks that
    share experts are next to each other in either), or all GPUs are in one node, either mesh order is the same, written
    pp. What is not replicated has no buckets, ZeRO-3 alone gathers ahead, and streams can be shared where two kinds of
    collectives run beside compute. ``fix`` narrows an axis to some values, ``forbid`` takes some away.
    """

    architecture: Architecture
    gpus: int
    gpus_per_node: int
    global_batch: int
    seq_len: int
    fix: Mapping[str, tuple[str, ...]]
    forbid: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def check(self) -> None:
        """Refuse numbers that no configuration can meet.

        Raises:
            ConfigError: with what would do.
        """
        if self.gpus < 1:
            raise ConfigError(f"--gpus must be at least 1, found {self.gpus}")
        if self.gpus > MAX_GPUS:
            raise ConfigError(f"--gpus {self.gpus} is more than a strategy may have: at most {MAX_GPUS}")
        if self.global_batch < 1 or self.seq_len < 1:
            raise ConfigError("--global-batch and --seq-len must be at least 1, "
                              f"found {self.global_batch} and {self.seq_len}")  # fmt: skip

    def degrees(self) -> Iterator[Degrees]:
        """Yield the degrees, smallest pp first."""
        tensor, context, experts = (
            [d for d in legal_degrees(self.architecture, kind, self.seq_len, limit=limit) if self._keeps(axis, d)]
            for axis, kind, limit in (
                ("tp", ShardKind.TENSOR, self.gpus_per_node),
                ("cp", ShardKind.CONTEXT, self.gpus),
                ("ep", ShardKind.EXPERT, self.gpus),
            )
        )
        for pp in divisors(self.gpus):
            if pp > self.architecture.layers or not self._keeps("pp", pp):
                continue
            for tp, cp in product(tensor, context):
                if self.gpus % (pp * tp * cp):
                    continue
                dp = self.gpus // (pp * tp * cp)
                if self.global_batch % dp or not self._keeps("dp", dp):
                    continue
                for ep, outer in product(experts, OUTERS):
                    differs = pp > 1 and dp > ep and self.gpus > self.gpus_per_node
                    if dp % ep == 0 and (differs or outer == OUTERS[0]) and self._keeps("outer", outer):
                        yield Degrees(pp, tp, dp, ep, cp, outer)

    def schedules(self, pp: int) -> Iterator[tuple[str, int]]:
        """Yield (family, virtual stages) legal on pp rows."""
        for name in FAMILIES:
            if not self._keeps("schedule", name) or (pp == 1 and name != "1f1b"):
                continue
            family = FAMILIES[name]
            if pp not in family.degrees() or (self.architecture.tied and family.layout is Layout.BIDIRECTIONAL):
                continue
            for v in family.virtual_stages(pp):
                if pp * v > self.architecture.layers:
                    break
                if self._keeps("virtual_stages", v):
                    yield name, v

    def zeros(self, replicas: int, schedule: str) -> list[int]:
        """Return the legal ZeRO stages with so many ranks (dp x cp) that hold the same parameters."""
        one_row = FAMILIES[schedule].layout is not Layout.BIDIRECTIONAL
        legal = [0] if replicas == 1 and one_row else [0, 1, 2, 3] if one_row else [0, 1]
        return [zero for zero in legal if self._keeps("zero", zero)]

    def batches(self, dp: int) -> list[tuple[int, int]]:
        """Return the legal (micro_batch, num_microbatches)."""
        share = self.global_batch // dp
        return [
            (b, share // b)
            for b in divisors(share)
            if self._keeps("micro_batch", b) and self._keeps("num_microbatches", share // b)
        ]

    def recomputes(self) -> list[str]:
        """Return the policies that do not count layers."""
        return [r for r in map(str, Recompute) if self._keeps("recompute", r)]

    def counts(self, stages: int) -> list[str]:
        """Return how many layers of each stage may be recomputed, where it is neither none nor all."""
        most = -(-self.architecture.layers // stages)
        return [str(n) for n in range(1, most) if self._keeps("recompute", n)]

    def sequence(self, tp: int, cp: int = 1) -> list[bool]:
        """Return whether activations may be divided along the sequence too (Megatron sequence parallelism)."""
        legal = [False, True] if tp > 1 and self.seq_len % (tp * cp) == 0 else [False]
        return [s for s in legal if self._keeps("sequence_parallel", "on" if s else "off")]

    def cuts(self, stages: int) -> list[str]:
        """Return the ways to cut layers into stages: one where there is nothing to cut."""
        return [c for c in CUTS[: 1 if stages == 1 else None] if self._keeps("cuts", c)]

    def fine(self, replicas: int, zero: int, ep: int, layout: Layout) -> list[Fine]:
        """Return the legal (bucket, prefetch, streams), the usual one first."""
        replicated = replicas > 1 or layout is Layout.BIDIRECTIONAL
        buckets = [n for n in (BUCKETS if replicated else BUCKETS[:1]) if self._keeps("bucket", n)]
        ahead = [n for n in (PREFETCHES if zero == 3 else PREFETCHES[:1]) if self._keeps("prefetch", n)]
        shared = [True, replicated and zero > 0, replicated and ep > 1]
        streams = [s for s, legal in zip(STREAMS, shared, strict=True) if legal and self._keeps("streams", s)]
        return list(product(buckets, ahead, streams))

    def _keeps(self, axis: str, value: object) -> bool:
        text = str(value)
        return text not in self.forbid.get(axis, ()) and (axis not in self.fix or text in self.fix[axis])

    def axes(self) -> dict[str, list[object]]:
        """Return the values of each axis that occur in some configuration, for the report."""
        found: dict[str, set[object]] = {name: set() for name in FIXABLE}
        recomputes = self.recomputes()
        shapes = {(d.pp, d.dp * d.cp, d.ep): d for d in self.degrees()}
        for pp, tp, dp, ep, cp, outer in self.degrees():
            first = shapes[pp, dp * cp, ep] == (pp, tp, dp, ep, cp, outer)
            batches, sequence = self.batches(dp), ["on" if s else "off" for s in self.sequence(tp, cp)]
            for schedule, v in self.schedules(pp):
                family = FAMILIES[schedule]
                counts = family.microbatches(pp, v)
                legal = [(b, m) for b, m in batches if m in counts]
                stages = pp * (1 if family.layout is Layout.BIDIRECTIONAL else v)
                zeros = self.zeros(dp * cp, schedule)
                fine = [each for zero in zeros for each in self.fine(dp * cp, zero, ep, family.layout)] if first else ()
                cuts, again = self.cuts(stages), [*recomputes, *self.counts(stages)]
                several: tuple[Sequence[object], ...] = (
                    [pp], [tp], [dp], [ep], [schedule], [v], zeros, [b for b, _ in legal],
                    [m for _, m in legal], again, sequence, cuts, [cp], [outer],
                )  # fmt: skip
                if all(several):
                    several += tuple([each[i] for each in fine] for i in range(3))
                    for values, some in zip(found.values(), several, strict=True):
                        values.update(some)
        return {name: sorted(values, key=_rank) for name, values in found.items()}

    def values(self, axis: str) -> list[object]:
        """Return the values of one axis that occur in some configuration."""
        return self.axes()[axis]


def _rank(value: object) -> tuple[bool, int, str]:
    """Numbers first, in their order, then words."""
    text = str(value)
    return (False, int(text), "") if text.isdecimal() else (True, 0, text)


def parse_fix(texts: Sequence[str], option: str = "--fix") -> dict[str, tuple[str, ...]]:
    """Read ``--fix axis=value[,value]``, or ``--forbid``.

    Raises:
        ConfigError: not of that form, an unknown axis, the same axis twice, or a value that the axis cannot take.
    """
    fixed: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = _SHORT.get(name.strip().replace("-", "_"), name.strip().replace("-", "_"))
        said = f"{option} {text!r}"
        if not equals or not value.strip():
            raise ConfigError(f"{said} is not of the form axis=value, such as pp=4 or schedule=1f1b,zbv")
        if name not in FIXABLE:
            near = get_close_matches(name, FIXABLE, n=2)
            raise ConfigError(f"{option} names no axis {name!r}; " + (f"did you mean {' or '.join(near)}?" if near
                              else "axes are " + ", ".join(FIXABLE)))  # fmt: skip
        if name in fixed:
            raise ConfigError(f"{option} gives {name} twice: {','.join(fixed[name])} and {value}")
        fixed[name] = tuple(_value(said, name, part.strip()) for part in value.split(","))
    return fixed


def _value(said: str, name: str, part: str) -> str:
    """Return a value of an axis as the space writes it.

    Raises:
        ConfigError: no value that the axis can take.
    """
    if not part:
        raise ConfigError(f"{said} is not of the form axis=value, such as pp=4 or schedule=1f1b,zbv")
    legal = _WORDS.get(name)
    counts = legal is None or name == "recompute"
    if counts and part.isascii() and part.isdecimal() and len(part) < 10 and int(part) >= 1:
        return str(int(part))
    if legal is None:
        raise ConfigError(f"{said}: {name} takes an integer of at least 1, found {part!r}")
    if part not in legal:
        near = get_close_matches(part, legal, n=1)
        more = " or a number of layers" if counts else ""
        raise ConfigError(f"{said}: {name} takes {', '.join(legal)}{more}; found {part!r}"
                          + (f", did you mean {near[0]}?" if near else ""))  # fmt: skip
    return part


def divisors(n: int) -> list[int]:
    """Return the divisors of n, smallest first."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]
