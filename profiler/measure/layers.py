"""One layer of each kind with embedding and head: its chunk graphs in each phase, and real values to run them on.

Graphs are the runtime's own macro actions of one chunk: gradients are added to their buffers, and small operations are
as quick as there. Values are those of a real step on random tokens, so that routing and norms are what they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from piper_core.arch.record import Architecture
from piper_core.frontend.capture import Boxed, boxed
from piper_core.frontend.communicator import communicating
from piper_core.frontend.cut import ChunkGraph, Cut
from piper_core.frontend.degrees import Degrees
from piper_core.frontend.rank_graphs import rank_graphs, rank_module
from piper_core.frontend.recompute import kept
from piper_core.ir.dag import Policy
from piper_core.models.stage import Part
from piper_core.names import Phase, Recompute, Region
from piper_core.runtime.graphs import Macros, Unit
from piper_core.runtime.tables import constant_names
from profiler.measure.alone import groups_alone
from profiler.record import Site, shared

TURNS_BYTES = 64 << 20
"""What is passed through between two calls on the same values, at most: more than caches hold."""
PHASES = (
    (Phase.F, Recompute.NONE), (Phase.B, Recompute.NONE), (Phase.BI, Recompute.NONE), (Phase.BW, Recompute.NONE),
    (Phase.R, Recompute.FULL), (Phase.R, Recompute.SELECTIVE),
)  # fmt: skip
_INSIDE = (Region.ATTENTION, Region.ROUTER)
"""Regions whose full recompute makes what the next one's starts from; of the last of a layer, and with selective
recompute, the next one's input was kept."""


def one_of_each(architecture: Architecture) -> Part:
    """Return the part of a model that has each kind of layer once."""
    first = max(0, architecture.dense_layers - 1) if architecture.experts else 0
    last = architecture.dense_layers + 1 if architecture.experts else 1
    return Part(first, last, embed=True, head=True)


@dataclass(frozen=True, slots=True)
class Bound:
    """A chunk's graph and what it is given every time."""

    graph: Boxed
    given: list[Tensor]

    def __call__(self) -> object:
        return self.graph([*self.given])


@dataclass
class Turns:
    """Calls of a chunk's graph as the layers of a step make them, one after another: on weights, gradients and kept
    values of its own each time, and with results that stay until as many calls later. Caches hold no more of them than
    in a step, and new results take new memory."""

    graph: Boxed
    given: list[list[Tensor]]
    stays: bool

    def __post_init__(self) -> None:
        self._at, self._held = 0, deque[object](maxlen=len(self.given))

    def __call__(self) -> object:
        made = self.graph([*self.given[self._at]])
        self._at = (self._at + 1) % len(self.given)
        if self.stays:
            self._held.append(made)
        return None


@dataclass(frozen=True)
class Layers:
    """The layers of a model as one rank has them, for one size of microbatch."""

    architecture: Architecture
    micro_batch: int
    seq_len: int
    degrees: Degrees = field(default_factory=Degrees)
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    @cached_property
    def cut(self) -> Cut:
        part = one_of_each(self.architecture)
        return rank_graphs(
            self.architecture, self.degrees, part, micro_batch=self.micro_batch, seq_len=self.seq_len, dtype=self.dtype
        )

    @cached_property
    def macros(self) -> Macros:
        return Macros(self.cut, fuse=self.dtype is torch.float32, device=self.device)

    def units(self) -> Iterator[tuple[Site, Unit, ChunkGraph]]:
        """Yield every chunk in every phase in which it does anything; of equal regions the last layer's."""
        piece_of = {piece.site.region: i for i, piece in enumerate(self.cut.pieces)}
        for region, index in piece_of.items():
            for phase, policy in PHASES:
                if phase is Phase.R and region in (Region.EMBED, Region.HEAD):
                    continue  # the runtime never does these again
                sends = phase is not Phase.R or (policy is Recompute.FULL and region in _INSIDE)
                unit = Unit(index, phase, Policy.OF[policy], sends=sends)
                graph = self.macros.graph(unit)
                if graph.calls and graph.outputs:
                    degrees = shared(region, self.degrees)
                    yield Site(region, phase, self.micro_batch, self.seq_len, degrees, policy), unit, graph

    def call(self, unit: Unit) -> Bound:
        """Return a call that runs a chunk as the runtime does."""
        bound, _ = self._bound(unit)
        return bound

    def turns(self, unit: Unit, most_bytes: int = TURNS_BYTES) -> Turns:
        """Return calls that run a chunk as often as a step has it, on other values each time, up to ``most_bytes`` of
        them. What the chunk before has just made is the same each time, as it is in a cache then."""
        bound, fresh = self._bound(unit)
        others = [each for each, new in zip(bound.given, fresh, strict=True) if not new]
        size = sum(each.nbytes for each in others)
        times = max(1, min(self.architecture.layers, most_bytes // max(1, size)))
        given = [bound.given] + [
            [each if new else each.clone() for each, new in zip(bound.given, fresh, strict=True)]
            for _ in range(times - 1)
        ]
        return Turns(bound.graph, given, stays=unit.phase in (Phase.F, Phase.R))

    def _bound(self, unit: Unit) -> tuple[Bound, list[bool]]:
        """Return a call, and whether each of its values is fresh from the chunk before: an activation in F and R, a
        gradient in the others."""
        names = {node.name for node in self.macros.draft((unit,)).outputs}
        macro = self.macros.macro((unit,), names, constant_names(self.cut))
        values = self.values
        totals = [torch.zeros_like(values[name], dtype=_gradient_dtype(values[name])) for name in macro.adds]
        forwards = unit.phase in (Phase.F, Phase.R)
        fresh = [forwards or name not in self._forward for name in macro.varying]
        given = [*totals, *(values[name] for name in (*macro.fixed, *macro.varying))]
        return Bound(macro.call, given), [False] * (len(given) - len(fresh)) + fresh

    @cached_property
    def _forward(self) -> frozenset[str]:
        """Names of all that is there when a backward begins."""
        pieces, joint = self.cut.pieces, self.cut.joint
        made = {node.name for piece in pieces for node in piece.forward.outputs}
        return frozenset(made | set(joint.inputs) | {node.name for node in self.cut.prelude.outputs})

    def saved_bytes(self, region: Region) -> int:
        """Return the bytes of storages that the forward of a region leaves for its backward, parameters left out."""
        found = {}
        for piece in self.cut.pieces:
            if piece.site.region is region:
                made = {node.name for node in piece.forward.outputs}
                storages = [self.values[n.name].untyped_storage() for n in piece.saved if n.name in made]
                found = {each.data_ptr(): each.nbytes() for each in storages}
        return sum(found.values())

    def inside(self) -> AbstractContextManager[None]:
        """Return the context in which calls run."""
        return communicating(groups_alone(self.degrees))

    @cached_property
    def values(self) -> dict[str, Tensor]:
        """Every value of one step by name."""
        cut, joint = self.cut, self.cut.joint
        part = one_of_each(self.architecture)
        module = rank_module(self.architecture, self.degrees, None, part, device=self.device, dtype=self.dtype, seed=0)
        parameters = dict(module.named_parameters(remove_duplicate=False))
        buffers = dict(module.named_buffers(remove_duplicate=False))
        values = {name: parameters[full].detach() for name, full in joint.parameters.items()}
        values |= {name: buffers[full] for name, full in joint.buffers.items()}
        generator = torch.Generator().manual_seed(0)
        examples = {node.name: node.meta["val"] for node in joint.nodes if node.op == "placeholder"}
        for name in joint.inputs:
            shape = tuple(examples[name].shape)
            tokens = torch.randint(0, self.architecture.vocab, shape, generator=generator)
            values[name] = tokens.to(self.device)
        for name in joint.tangents:
            values[name] = torch.ones(tuple(examples[name].shape), dtype=examples[name].dtype, device=self.device)
        with torch.no_grad(), self.inside():
            self._run(cut.prelude, values)
            for piece in cut.pieces:
                self._run(piece.forward, values)
                for policy in (Recompute.FULL, Recompute.SELECTIVE):  # R may start from more than B reads
                    self._run(piece.forward_keeping(kept(piece, policy)), values)
            for piece in reversed(cut.pieces):
                self._run(piece.backward, values)
                self._run(piece.backward_input, values)
                self._run(piece.backward_weight, values)
        return values

    def _run(self, graph: ChunkGraph, values: dict[str, Tensor]) -> None:
        if graph.outputs:
            call = boxed(graph.module(self.cut.joint.module, device=self.device))
            made = call([values[node.name] for node in graph.inputs])
            values.update(zip((node.name for node in graph.outputs), made, strict=True))


def _gradient_dtype(parameter: Tensor) -> torch.dtype:
    return torch.float64 if parameter.dtype is torch.float64 else torch.float32
