"""Macro actions whose chunks are compiled by Inductor.

Each chunk is a graph of its own, so that equal layers share one, and runs one after the other: joining the chunks of
an action before they are compiled makes it no quicker (0.98 to 1.05 of the time in five runs on a busy machine; 4
layers, hidden 512). Where nothing is computed again by the program, backwards do chains of small operations again
rather than read their results. Products that make gradients of weights stay out of the compiled graphs and add to the
gradients' buffers in place.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from piper_core.frontend.capture import Boxed, boxed, inductor
from piper_core.frontend.cut import ChunkGraph, Cut, is_view, reach
from piper_core.frontend.placed import settle
from piper_core.frontend.recompute import fused
from piper_core.frontend.run import check_compilable
from piper_core.names import Phase
from piper_core.runtime.graphs import Macros, Spec, Unit, _product


@dataclass(frozen=True, slots=True)
class _Part:
    """One chunk of an action: what it reads, what nothing reads later, what it makes, and at the end of its results the
    gradients, each for a buffer; ``True``: as the two factors of a product."""

    call: Boxed
    inputs: tuple[str, ...]
    spent: tuple[str, ...]
    outputs: tuple[str, ...]
    adds: tuple[tuple[str, bool], ...]


class CompiledMacros(Macros):
    """Macro actions by compiled chunks.

    Raises:
        ConfigError: the model has graphs that Inductor cannot compile.
    """

    def __init__(
        self, cut: Cut, *, fuse: bool = True, device: torch.device | str = "cpu", recomputes: bool = False
    ) -> None:
        """``recomputes``: the program has actions R; then backwards read what these make, and compute nothing again."""
        check_compilable(cut)
        super().__init__(cut, fuse=fuse, device=device)
        self._recomputes = recomputes
        self._calls: dict[tuple[object, ...], Boxed] = {}

    def _graph(self, unit: Unit) -> ChunkGraph:
        made, piece = super()._graph(unit), self.cut.pieces[unit.piece]
        if self._recomputes:
            return made
        return piece.forward_keeping(fused(piece)) if unit.phase is Phase.F else piece.joined(made, fused(piece))

    def joined(self, spec: Spec, wanted: Container[str] | None) -> ChunkGraph:
        chain, gradients = self._chain(spec, wanted), self.gradients(spec)
        made: set[Node] = set()
        given: dict[Node, None] = {}
        for graph in chain:
            given |= {node: None for node in graph.inputs if node not in made}
            made |= set(graph.outputs)
        outputs = dict.fromkeys(node for graph in chain for node in graph.outputs)
        rest = [n for n in outputs if n not in gradients and (wanted is None or n.name in wanted)]
        calls = tuple(node for graph in chain for node in graph.calls)
        return ChunkGraph(spec[0].phase, calls, tuple(given), (*rest, *gradients))

    def _chain(self, spec: Spec, wanted: Container[str] | None) -> list[ChunkGraph]:
        """Return each chunk's graph, without what neither the caller nor a later chunk reads."""
        gradients, later = self.gradients(spec), set[Node]()
        chain = []
        for unit in reversed(spec):
            graph = self.graph(unit)
            outputs = [n for n in graph.outputs if wanted is None or n.name in wanted or n in gradients or n in later]
            chain.append(reach(graph.phase, outputs, set(graph.calls).__contains__))
            later |= set(chain[-1].inputs)
        return chain[::-1]

    def _call(self, spec: Spec, chunk: ChunkGraph, every: dict[str, bool], outputs: tuple[str, ...]) -> Boxed:
        once, late = ([_total(name) for name, varies in every.items() if varies == wants] for wants in (False, True))
        given = (*once, *(node.name for node in chunk.inputs), *late)
        return _in_turn(given, self._parts(spec, outputs), outputs)

    def _parts(self, spec: Spec, handed: tuple[str, ...]) -> list[_Part]:
        gradients, chain = self.gradients(spec), self._chain(spec, handed)
        last = {node.name: i for i, graph in enumerate(chain) for node in graph.inputs}
        parts = []
        for i, graph in enumerate(chain):
            call, factors = self._compiled(graph, tuple(node in gradients for node in graph.outputs))
            names = tuple(node.name for node in graph.inputs)
            totals = [_total(gradients[node]) for node in graph.outputs if node in gradients]
            parts.append(
                _Part(
                    call,
                    names,
                    tuple(n for n in dict.fromkeys(names) if last[n] == i and n not in handed),
                    tuple(node.name for node in graph.outputs if node not in gradients),
                    tuple(zip(totals, factors, strict=True)),
                )
            )
        return parts

    def _compiled(self, chunk: ChunkGraph, summed: tuple[bool, ...]) -> tuple[Boxed, tuple[bool, ...]]:
        """Return a chunk compiled, and which of its gradients (outputs that are ``summed``) it hands out as factors.

        Gradients come last. Equal graphs share a callable; constants that a graph reads make it its own.
        """
        graph = chunk.graph(in_place=False)
        output = next(iter(reversed(graph.nodes)))
        values: list[Node] = list(output.args[0])
        plain = [value for value, late in zip(values, summed, strict=True) if not late]
        factors = []
        for node, value, late in zip(chunk.outputs, values, summed, strict=True):
            if not late:
                continue
            product = _product(node, value) if self._fuse else None
            factors.append(product is not None)
            plain += [value] if product is None else [each for each in product.args if isinstance(each, Node)]
        output.args = (tuple(plain),)
        graph.eliminate_dead_code()
        constants = tuple(str(node.target) for node in chunk.calls if node.op == "get_attr")
        key = (chunk.digest(), summed, constants)
        if key not in self._calls:
            settle(graph, self._device)
            module = GraphModule(self.cut.joint.module, graph, f"Compiled{chunk.phase.name}")
            left = {node.name for node in graph.nodes if node.op == "call_function"}
            works = any(node.name in left and not is_view(node) for node in chunk.calls)
            examples = [node.meta["val"] for node in chunk.inputs]
            self._calls[key] = inductor(module, examples, self._device) if works else boxed(module)
        return self._calls[key], tuple(factors)


def _total(parameter: str) -> str:
    return f"+{parameter}"


def _in_turn(names: tuple[str, ...], parts: Sequence[_Part], results: tuple[str, ...]) -> Boxed:
    """Return a call of all parts; ``names`` are those of its arguments."""

    def call(arguments: list[Tensor]) -> Sequence[Tensor]:
        values = dict(zip(names, arguments, strict=True))
        arguments.clear()
        for part in parts:
            given = [values[name] for name in part.inputs]
            for name in part.spent:
                del values[name]
            made = list(part.call(given))
            for total, product in reversed(part.adds):
                if product:
                    second, first = made.pop(), made.pop()
                    values[total].addmm_(first, second)
                else:
                    values[total].add_(made.pop())
            values.update(zip(part.outputs, made, strict=True))
        return tuple(values[name] for name in results)

    return call
