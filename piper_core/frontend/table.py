"""The traced table of a model as plain records that go to JSON and back, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from piper_core.arch.chunk import Chunk, ModelChunks
from piper_core.names import Region

Kernels = Literal["eager", "fused"]
LAYER_MARK = "{layer}"
"""Stands for a layer's index in the names of a template's parameters."""


@dataclass(frozen=True, slots=True)
class Affine:
    """A quantity of a microbatch of b sequences: fixed + each b."""

    fixed: float = 0.0
    each: float = 0.0

    def at(self, sequences: float) -> float:
        return self.fixed + self.each * sequences


@dataclass(frozen=True, slots=True)
class PhaseTotals:
    """One phase as traced: all its calls, whatever a compiler would join; ``digest`` is the hash of its graph."""

    phase: str
    flops: Affine
    bytes_read: Affine
    bytes_written: Affine
    kernels: int
    digest: str


@dataclass(frozen=True, slots=True)
class Template:
    """Chunks that are alike: the record of one of them (names of parameters with ``{layer}``), its phases, and the
    bytes that its forward saves."""

    chunk: Chunk
    phases: tuple[PhaseTotals, ...]
    saved_bytes: Affine


@dataclass(frozen=True, slots=True)
class Instance:
    """One chunk of the model: which template, which layer, with which tags."""

    template: int
    layer: int
    tags: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """What a capture says of a model at a sequence length.

    ``affine``: costs were seen to be affine in the microbatch; else they are those of ``micro_batch`` sequences and
    only of that. ``source`` says what was traced.
    """

    name: str
    layers: int
    seq_len: int
    micro_batch: int
    affine: bool
    dtype_bytes: int
    templates: tuple[Template, ...]
    instances: tuple[Instance, ...]
    edges: tuple[tuple[int, int, float], ...]
    units: tuple[tuple[str, int], ...] = ()

    def model(self) -> ModelChunks:
        """Return the table as strategies, costs and directives read it."""
        chunks = tuple(_instance(self.templates[each.template].chunk, each) for each in self.instances)
        return ModelChunks(self.name, self.layers, self.seq_len, chunks, self.edges, self.dtype_bytes, self.units)

    def rows(self, micro_batch: int | None = None) -> list[dict[str, Any]]:
        """Return a row for each phase of each distinct chunk, at ``micro_batch`` sequences."""
        b = micro_batch or self.micro_batch
        found = []
        for index, template in enumerate(self.templates):
            members = [each for each in self.instances if each.template == index]
            first = _instance(template.chunk, members[0])
            for phase in template.phases:
                found.append({
                    "id": first.name, "region": str(first.region), "phase": phase.phase, "count": len(members),
                    "flops": phase.flops.at(b), "bytes_read": phase.bytes_read.at(b),
                    "bytes_written": phase.bytes_written.at(b), "kernels": phase.kernels,
                    "parameter_bytes": first.numel * self.dtype_bytes, "saved_bytes": template.saved_bytes.at(b),
                    "hash": phase.digest,
                })  # fmt: skip
        return found

    def of(self, micro_batch: int) -> Trace:
        """Return the same table, whose rows are of ``micro_batch`` sequences."""
        return replace(self, micro_batch=micro_batch)

    def to_data(self) -> dict[str, Any]:
        """Return the trace as JSON data."""
        return asdict(self)

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> Trace:
        """Return the trace that :meth:`to_data` described."""
        return _read(Trace, data)  # type: ignore[no-any-return]  # of the type that is asked for


def _instance(chunk: Chunk, each: Instance) -> Chunk:
    """Return a template's chunk as one of the model's; its Work and Saved records are shared."""
    named = tuple(replace(p, name=p.name.replace(LAYER_MARK, str(each.layer))) for p in chunk.parameters)
    return replace(chunk, layer=each.layer, tags=each.tags, parameters=named)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _read(kind: Any, data: Any) -> Any:
    """Build a value of ``kind`` from JSON data."""
    if is_dataclass(kind) and isinstance(kind, type):
        hints = _hints(kind)
        return kind(**{f.name: _read(hints[f.name], data[f.name]) for f in fields(kind)})
    if get_origin(kind) is tuple:
        inner = get_args(kind)
        if len(inner) == 2 and inner[1] is Ellipsis:
            return tuple(_read(inner[0], each) for each in data)
        return tuple(_read(part, each) for part, each in zip(inner, data, strict=True))
    if kind is Region:
        return Region(data)
    if isinstance(kind, UnionType):
        (some,) = (each for each in get_args(kind) if each is not NoneType)
        return None if data is None else _read(some, data)
    return float(data) if kind is float else data
