"""One callable for each macro action: the graphs of its chunks joined, gradients added up where they are made.

Inside a macro action no value has a name: chunks hand on to each other within one graph, and only what another action
reads comes out. The gradient of a parameter is added to its buffer by the graph itself, as part of the product that
makes it where that is the last operation (Megatron's gradient accumulation fusion).
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

import torch
from torch.fx import Graph, GraphModule, Node

from piper_core.frontend.capture import Boxed, boxed
from piper_core.frontend.cut import ChunkGraph, Cut, reach, root, tensors
from piper_core.frontend.placed import settle
from piper_core.frontend.recompute import kept
from piper_core.ir.dag import Policy
from piper_core.names import Phase, Recompute
from piper_core.runtime.apart import Exchange, Part, exchange
from piper_core.runtime.overlap import split, spread
from piper_core.runtime.quick import quicken

_KEEPS = {Policy.NONE: Recompute.NONE, Policy.SELECTIVE: Recompute.SELECTIVE}


@dataclass(frozen=True, slots=True)
class Unit:
    """What one chunk does in an action: its piece of the cut, the phase, the recompute policy of its forward, and where
    its exchange of tokens stands apart which of its three parts. An R ``sends`` what it hands on where the next chunk's
    R starts from that; a layer's last does not, since the next layer's input was kept."""

    piece: int
    phase: Phase
    policy: int = Policy.NONE
    part: Part = Part.WHOLE
    sends: bool = True


Spec = tuple[Unit, ...]
"""The chunks of one action in the order that they run in."""


@dataclass(frozen=True, slots=True)
class Macro:
    """A compiled action. Its arguments are in four runs, all by the names of their nodes: the buffers of gradients
    ``adds`` that are the same for every microbatch and ``fixed`` values, then ``varying`` values and the buffers
    ``adds_each``; gradients are called by their parameter's placeholder."""

    call: Boxed
    adds: tuple[str, ...]
    fixed: tuple[str, ...]
    varying: tuple[str, ...]
    adds_each: tuple[str, ...]
    outputs: tuple[str, ...]


class Macros:
    """The macro actions of one cut, each made once."""

    def __init__(self, cut: Cut, *, fuse: bool = True, device: torch.device | str = "cpu") -> None:
        """``fuse``: let products add to gradient buffers, which must then be of the products' dtype."""
        self.cut, self._fuse, self._device = cut, fuse, torch.device(device)
        self._made: dict[tuple[object, ...], Macro] = {}
        self._drafts: dict[Spec, ChunkGraph] = {}
        self._graphs: dict[Unit, ChunkGraph] = {}
        self._exchanges: dict[Unit, Exchange | None] = {}

    def draft(self, spec: Spec) -> ChunkGraph:
        """Return the joined graph of an action with all that might be read of it."""
        if spec not in self._drafts:
            self._drafts[spec] = self.joined(spec, None)
        return self._drafts[spec]

    def gradients(self, spec: Spec) -> dict[Node, str]:
        """Return the gradients that an action makes, each with its parameter's placeholder."""
        found: dict[Node, str] = {}
        for unit in spec:
            if unit.phase in (Phase.B, Phase.BI, Phase.BW):
                made = set(self.graph(unit).outputs)
                found |= {node: name for name, node in self.cut.pieces[unit.piece].gradients if node in made}
        return found

    def joined(self, spec: Spec, wanted: Container[str] | None) -> ChunkGraph:
        """Return the joined graph of an action, chunk after chunk, so that one layer's recomputed activations are used
        up before the next layer's are made; of its outputs the ``wanted`` ones and gradients."""
        graphs = [self.graph(unit) for unit in spec]
        own = {node for graph in graphs for node in graph.calls}
        gradients = self.gradients(spec)
        outputs = dict.fromkeys(node for graph in graphs for node in graph.outputs)
        rest = [n for n in outputs if n not in gradients and (wanted is None or n.name in wanted)]
        found = reach(spec[0].phase, [*rest, *gradients], own.__contains__)
        return replace(found, calls=tuple(_by_chunk(found.calls, [graph.calls for graph in graphs])))

    def graph(self, unit: Unit) -> ChunkGraph:
        """Return the graph of one chunk in one phase."""
        if unit not in self._graphs:
            self._graphs[unit] = self._graph(unit)
        return self._graphs[unit]

    def exchange(self, unit: Unit) -> Exchange | None:
        """Return how tokens are exchanged around a chunk, if that can stand apart."""
        if unit not in self._exchanges:
            piece, joint = self.cut.pieces[unit.piece], self.cut.joint
            self._exchanges[unit] = exchange(self.graph(unit), joint, {node for _, node in piece.gradients})
        return self._exchanges[unit]

    def _graph(self, unit: Unit) -> ChunkGraph:
        if unit.part is not Part.WHOLE:
            whole = self.exchange(replace(unit, part=Part.WHOLE))
            assert whole is not None, "only chunks that exchange tokens have parts"
            return whole.parts[unit.part]
        piece = self.cut.pieces[unit.piece]
        stay = None if unit.policy == Policy.NONE else kept(piece, _KEEPS.get(unit.policy, Recompute.FULL))
        match unit.phase:
            case Phase.F:
                return piece.forward if stay is None else piece.forward_keeping(stay)
            case Phase.R:
                return piece.recompute(stay or (), send=unit.sends)
            case Phase.B:
                return piece.backward
            case Phase.BI:
                return piece.backward_input
            case Phase.BW:
                return piece.backward_weight
            case Phase.NONE:
                raise AssertionError("compute has a phase")
            case _:
                assert_never(unit.phase)

    def macro(
        self, spec: Spec, wanted: Container[str], fixed: Container[str], each: Container[str] = frozenset()
    ) -> Macro:
        """Return the callable of an action.

        ``wanted`` are the outputs to hand out (of those of its draft), ``fixed`` the inputs that are the same for every
        microbatch, ``each`` the parameters whose gradient has a buffer for each microbatch.
        """
        chunk, gradients = self.joined(spec, wanted), self.gradients(spec)
        stay = tuple(node for node in chunk.inputs if node.name in fixed)
        vary = tuple(node for node in chunk.inputs if node.name not in fixed)
        every = {name: name in each for name in gradients.values()}
        outputs = tuple(node.name for node in chunk.outputs if node not in gradients)
        key = (spec, outputs, stay, tuple(every.items()))
        if key not in self._made:
            once, late = (tuple(name for name, varies in every.items() if varies == wants) for wants in (False, True))
            call = self._call(spec, replace(chunk, inputs=(*stay, *vary)), every, outputs)
            self._made[key] = Macro(call, once, _names(stay), _names(vary), late, outputs)
        return self._made[key]

    def _call(self, spec: Spec, chunk: ChunkGraph, every: dict[str, bool], outputs: tuple[str, ...]) -> Boxed:
        """Return an action's call: buffers of gradients that ``every`` has as False, the chunk's inputs, the other
        buffers -> ``outputs``."""
        unit_of = {node: i for i, unit in enumerate(spec) for node in self.graph(unit).calls}
        chunk = replace(chunk, calls=spread(chunk.calls, unit_of))
        graph = chunk.graph()
        _add_in_place(graph, chunk, self.gradients(spec), every, fuse=self._fuse)
        settle(graph, self._device)
        quicken(graph)
        split(graph)
        return boxed(GraphModule(self.cut.joint.module, graph, f"Macro{spec[0].phase.name}"))


def _names(nodes: Sequence[Node]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes)


def _by_chunk(calls: Sequence[Node], chunks: Sequence[Sequence[Node]]) -> Iterator[Node]:
    """Yield calls chunk after chunk; what a chunk needs of later ones, such as the last layer's output that the head's
    backward reads and that layer's R makes again, comes before it."""
    left = set(calls)
    for chunk in chunks:
        need: set[Node] = set()
        waiting = [node for node in chunk if node in left]
        while waiting:
            node = waiting.pop()
            if node in left and node not in need:
                need.add(node)
                waiting += node.all_input_nodes
        left -= need
        yield from sorted(need)


def _add_in_place(
    graph: Graph, chunk: ChunkGraph, gradients: dict[Node, str], every: dict[str, bool], *, fuse: bool
) -> None:
    """Let ``graph`` add gradients to buffers instead of handing them out: those of one for each microbatch are its last
    arguments, the others its first."""
    last = next(iter(reversed(graph.nodes)))
    results = list(last.args[0])
    first, first_call = next(iter(graph.nodes)), next((n for n in graph.nodes if n.op != "placeholder"), last)
    buffers: dict[str, Node] = {}
    for name, vary in every.items():
        with graph.inserting_before(first_call if vary else first):
            buffers[name] = graph.placeholder(f"total_{name}")
    for node, value in zip(chunk.outputs, results, strict=True):
        if node not in gradients:
            continue
        buffer = buffers[gradients[node]]
        product = _product(node, value) if fuse else None
        if product is not None:
            product.args = (buffer, *product.args)
            product.target = torch.ops.aten.addmm_.default
        else:
            with graph.inserting_before(first_call) if value.op == "placeholder" else graph.inserting_after(value):
                graph.call_function(torch.ops.aten.add_.Tensor, (buffer, value))
    last.args = (tuple(v for node, v in zip(chunk.outputs, results, strict=True) if node not in gradients),)


def _product(node: Node, value: Node) -> Node | None:
    """Return the copied product that makes a gradient and nothing else, if only views of it lie in between."""
    source = root(node)
    if source.target is not torch.ops.aten.mm.default:
        return None
    made, given = tensors(source)[0], tensors(node)[0]
    if made.shape != given.shape or made.stride() != given.stride() or made.dtype != given.dtype:
        return None
    while value.target is torch.ops.aten.t.default:
        if len(value.users) != 1:
            return None
        value = value.all_input_nodes[0]
    return value if value.target is torch.ops.aten.mm.default and len(value.users) == 1 else None
