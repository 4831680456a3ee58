"""The space of configurations: every field of a strategy but the order, its domains, and the constraints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches

from piper_core.arch.contract import legal_degrees
from piper_core.arch.record import Architecture
from piper_core.errors import ConfigError, InfeasibleError
from piper_core.names import Recompute, ShardKind
from piper_core.schedule.families import FAMILIES
from piper_core.schedule.grid import Layout

CUTS = ("balanced", "even")


@dataclass(frozen=True, slots=True, order=True)
class Configuration:
    """One point of the space. ``dp`` counts every rank that divides the batch (experts lie inside it);
    ``cuts`` is how layers fall on stages: ``balanced`` by time with embedding and head, or ``even``. ``recompute`` is
    none, selective, full, or how many layers of each stage, the first ones, are fully recomputed. ``outer`` is the
    outermost axis of the mesh on the topology, pp or dp: neighbours along it are farthest apart. ``bucket`` is how many
    layers' parameters a bucket holds (0: a whole stage's), ``prefetch`` how many gathers may run ahead of compute;
    ``streams`` is which collectives beside compute share a stream: each kind its own, those of ``data`` parallelism, or
    ``all``."""

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

    @property
    def row_size(self) -> int:
        """Ranks of a pipeline row."""
        return self.dp * self.cp * self.tp

    @property
    def layout(self) -> Layout:
        """How stages lie on rows."""
        return FAMILIES[self.schedule].layout

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return self.pp * (1 if self.layout is Layout.BIDIRECTIONAL else self.virtual_stages)

    def __str__(self) -> str:
        context = f" cp={self.cp}" if self.cp > 1 else ""
        if not self.cuts:  # a partial assignment: any schedule, ZeRO stage and cut
            return (
                f"pp={self.pp} tp={self.tp} dp={self.dp} ep={self.ep}{context} b={self.micro_batch} "
                f"m={self.num_microbatches} recompute={self.recompute}"
            )
        return (
            f"pp={self.pp} tp={self.tp} dp={self.dp} ep={self.ep}{context} {self.schedule} v={self.virtual_stages} "
            f"zero={self.zero} b={self.micro_batch} m={self.num_microbatches} recompute={self.recompute} "
            f"sp={'on' if self.sequence_parallel else 'off'} cuts={self.cuts}"
        )


FIXABLE = tuple(f.name for f in fields(Configuration) if f.name != "cp")
_WORDS = {
    "schedule": tuple(FAMILIES),
    "zero": ("0", "1", "2", "3"),
    "recompute": (str(Recompute.NONE), str(Recompute.FULL)),
    "sequence_parallel": ("on", "off"),
    "cuts": CUTS,
}
"""Values of the axes that do not count."""
_SHORT = {"b": "micro_batch", "m": "num_microbatches", "v": "virtual_stages", "sp": "sequence_parallel"}


@dataclass(frozen=True, slots=True)
class Space:
    """All configurations of a model on a number of GPUs.

    Constraints, stated once: pp x tp x dp is the number of GPUs; tp divides heads, key heads, widths and
    vocabulary and stays inside a node; dp divides the global batch; ep divides dp and the experts; stages do not
    outnumber layers; the schedule accepts (pp, v, m); ZeRO-2/3, and tied parameters, need each stage on one
    row; ZeRO needs dp > 1; sequence parallelism needs tp > 1 and a sequence that tp divides. Without a pipeline
    (pp = 1) every family is plain gradient accumulation, written 1f1b. ``fix`` narrows an axis to some values.
    """

    architecture: Architecture
    gpus: int
    gpus_per_node: int
    global_batch: int
    seq_len: int
    fix: Mapping[str, tuple[str, ...]]

    def check(self) -> None:
        """Refuse numbers that no configuration can meet.

        Raises:
            ConfigError: with what would do.
        """
        if self.gpus < 1:
            raise ConfigError(f"--gpus must be at least 1, found {self.gpus}")
        if self.global_batch < 1 or self.seq_len < 1:
            raise ConfigError("--global-batch and --seq-len must be at least 1, "
                              f"found {self.global_batch} and {self.seq_len}")  # fmt: skip

    def degrees(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield (pp, tp, dp, ep), smallest pp first."""
        tensor = [t for t in legal_degrees(self.architecture, ShardKind.TENSOR, self.seq_len, limit=self.gpus_per_node)
                  if self._keeps("tp", t)]  # fmt: skip
        experts = legal_degrees(self.architecture, ShardKind.EXPERT, self.seq_len)
        for pp in divisors(self.gpus):
            if pp > self.architecture.layers or not self._keeps("pp", pp):
                continue
            for tp in tensor:
                if self.gpus % (pp * tp):
                    continue
                dp = self.gpus // (pp * tp)
                if self.global_batch % dp or not self._keeps("dp", dp):
                    continue
                for ep in experts:
                    if dp % ep == 0 and self._keeps("ep", ep):
                        yield pp, tp, dp, ep

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

    def zeros(self, dp: int, schedule: str) -> list[int]:
        """Return the legal ZeRO stages."""
        one_row = FAMILIES[schedule].layout is not Layout.BIDIRECTIONAL
        legal = [0] if dp == 1 and one_row else [0, 1, 2, 3] if one_row else [0, 1]
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
        return [r for r in (str(Recompute.NONE), str(Recompute.FULL)) if self._keeps("recompute", r)]

    def sequence(self, tp: int) -> list[bool]:
        """Return whether activations may be divided along the sequence too (Megatron sequence parallelism)."""
        legal = [False, True] if tp > 1 and self.seq_len % tp == 0 else [False]
        return [s for s in legal if self._keeps("sequence_parallel", "on" if s else "off")]

    def cuts(self, stages: int) -> list[str]:
        """Return the ways to cut layers into stages: one where there is nothing to cut."""
        return [c for c in CUTS[: 1 if stages == 1 else None] if self._keeps("cuts", c)]

    def _keeps(self, axis: str, value: object) -> bool:
        return axis not in self.fix or str(value) in self.fix[axis]

    def axes(self) -> dict[str, list[object]]:
        """Return the values of each axis that occur in some configuration, for the report."""
        found: dict[str, set[object]] = {name: set() for name in FIXABLE}
        recomputes = self.recomputes()
        for pp, tp, dp, ep in self.degrees():
            batches, sequence = self.batches(dp), ["on" if s else "off" for s in self.sequence(tp)]
            for schedule, v in self.schedules(pp):
                family = FAMILIES[schedule]
                counts = family.microbatches(pp, v)
                legal = [(b, m) for b, m in batches if m in counts]
                cuts = self.cuts(pp * (1 if family.layout is Layout.BIDIRECTIONAL else v))
                several: tuple[Sequence[object], ...] = (
                    [pp], [tp], [dp], [ep], [schedule], [v], self.zeros(dp, schedule), [b for b, _ in legal],
                    [m for _, m in legal], recomputes, sequence, cuts,
                )  # fmt: skip
                if all(several):
                    for values, some in zip(found.values(), several, strict=True):
                        values.update(some)
        return {name: sorted(values, key=lambda v: (isinstance(v, str), v)) for name, values in found.items()}

    def values(self, axis: str) -> list[object]:
        """Return the values of one axis that occur in some configuration."""
        return self.axes()[axis]


def parse_fix(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Read ``--fix axis=value[,value]``.

    Raises:
        ConfigError: not of that form, an unknown axis, the same axis twice, or a value that the axis cannot take.
    """
    fixed: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = _SHORT.get(name.strip().replace("-", "_"), name.strip().replace("-", "_"))
        if not equals or not value.strip():
            raise ConfigError(f"--fix {text!r} is not of the form axis=value, such as pp=4 or schedule=1f1b,zbv")
        if name not in FIXABLE:
            near = get_close_matches(name, FIXABLE, n=2)
            raise ConfigError(f"--fix names no axis {name!r}; " + (f"did you mean {' or '.join(near)}?" if near
                              else "axes are " + ", ".join(FIXABLE)))  # fmt: skip
        if name in fixed:
            raise ConfigError(f"--fix gives {name} twice: {','.join(fixed[name])} and {value}")
        fixed[name] = tuple(_value(text, name, part.strip()) for part in value.split(","))
    return fixed


def _value(text: str, name: str, part: str) -> str:
    """Return a value of an axis as the space writes it.

    Raises:
        ConfigError: no value that the axis can take.
    """
    if not part:
        raise ConfigError(f"--fix {text!r} is not of the form axis=value, such as pp=4 or schedule=1f1b,zbv")
    legal = _WORDS.get(name)
    if legal is None:
        if part.isdecimal() and len(part) < 10 and int(part) >= 1:
            return str(int(part))
        raise ConfigError(f"--fix {text!r}: {name} takes an integer of at least 1, found {part!r}")
    if part not in legal:
        near = get_close_matches(part, legal, n=1)
        raise ConfigError(f"--fix {text!r}: {name} takes {', '.join(legal)}; found {part!r}"
                          + (f", did you mean {near[0]}?" if near else ""))  # fmt: skip
    return part


def why_empty(space: Space) -> InfeasibleError:
    """Say which constraint leaves the space empty: what each fixed axis could be with the others as they are or, where
    that is nothing, with nothing else fixed."""
    free = replace(space, fix={})
    legal = {axis: free.values(axis) for axis in space.fix}
    if not space.fix or not all(legal.values()):
        batch = [g for g in divisors(space.gpus) if space.global_batch % g == 0]
        return InfeasibleError(
            f"no pp x tp x dp makes {space.gpus} GPUs for {space.architecture.name} with global batch "
            f"{space.global_batch}: dp must divide the batch, pp may be at most {space.architecture.layers}, "
            f"tp at most {space.gpus_per_node}; dp could be {', '.join(map(str, batch[:8]))}"
        )
    fixed = " ".join(f"{axis}={','.join(values)}" for axis, values in space.fix.items())
    said = f"--fix {fixed} leaves no configuration on {space.gpus} GPUs with global batch {space.global_batch}"
    held = {axis: {name: values for name, values in space.fix.items() if name != axis} for axis in space.fix}
    relaxed = {axis: replace(space, fix=others).values(axis) for axis, others in held.items()}
    if len(space.fix) == 1:
        return InfeasibleError(f"{said}; {_could_be(legal)}")
    if any(relaxed.values()):
        return InfeasibleError(f"{said}; with the others as they are, {_could_be(relaxed)}")
    return InfeasibleError(f"{said}, and changing one of them is not enough; each alone, {_could_be(legal)}")


def _could_be(values: Mapping[str, Sequence[object]]) -> str:
    return "; ".join(f"{axis} could be {_listed(list(map(str, some)))}" for axis, some in values.items() if some)


def _listed(values: Sequence[str], most: int = 12) -> str:
    return ", ".join(values if len(values) <= most else [*values[: most - 2], "...", values[-1]])


def divisors(n: int) -> list[int]:
    """Return the divisors of n, smallest first."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]
