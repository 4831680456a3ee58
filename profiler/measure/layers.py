"""One layer of each kind with embedding and head: its chunk graphs in each phase, and real values to run them on.

Graphs are the runtime's own macro actions of one chunk: gradients are added to their buffers, and small operations are
as quick as there. Values are those of a real step on random tokens, so that routing and norms are what they are.
"""

from __future__ import annotations

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

PHASES = (
    (Phase.F, Recompute.NONE), (Phase.B, Recompute.NONE), (Phase.BI, Recompute.NONE), (Phase.BW, Recompute.NONE),
    (Phase.R, Recompute.FULL), (Phase.R, Recompute.SELECTIVE),
)  # fmt: skip


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
                unit = Unit(index, phase, Policy.OF[policy])
                graph = self.macros.graph(unit)
                if graph.calls and graph.outputs:
                    degrees = shared(region, self.degrees)
                    yield Site(region, phase, self.micro_batch, self.seq_len, degrees, policy), unit, graph

    def call(self, unit: Unit) -> Bound:
        """Return a call that runs a chunk as the runtime does."""
        names = {node.name for node in self.macros.draft((unit,)).outputs}
        macro = self.macros.macro((unit,), names, constant_names(self.cut))
        values = self.values
        totals = [torch.zeros_like(values[name], dtype=_gradient_dtype(values[name])) for name in macro.adds]
        return Bound(macro.call, [*totals, *(values[name] for name in (*macro.fixed, *macro.varying))])

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
