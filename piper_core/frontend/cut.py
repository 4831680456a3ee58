"""Cut a joint graph into chunks: F, B, BI, BW and R of each region of each layer.

All five are found by one rule, reachability: a graph is what its outputs need of the nodes that are its own, and what
those need from elsewhere are its inputs.

======  ==============================  =======================================================
phase   its own nodes                   its outputs
======  ==============================  =======================================================
F       forward of the site             what other sites use (``sent``), what backwards use
R       forward, less what is kept      what backwards use and was not kept
B       backward of the site            gradients for other sites and of parameters
BI      backward of the site            gradients for other sites; what BW uses of its nodes
BW      backward, less what BI is       gradients of parameters
======  ==============================  =======================================================

Views of parameters cost nothing and are repeated where they are used, so that they never cross. A parameter that
several sites use has one gradient from each, which whoever runs the graphs adds up.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from piper_core.frontend.assign import Assignment, Site, assign
from piper_core.frontend.capture import Joint
from piper_core.frontend.parcel import pack, unpack
from piper_core.frontend.placed import settle
from piper_core.names import Phase


@dataclass(frozen=True, slots=True)
class ChunkGraph:
    """One phase of one site: calls in order, values that come in, values that go out. Nodes are those of the joint
    graph, whose names name the values everywhere."""

    phase: Phase
    calls: tuple[Node, ...]
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]

    def graph(self, *, in_place: bool = True) -> Graph:
        """Return a graph of its own: inputs in order are its placeholders, outputs a tuple.

        ``in_place`` adds gradients up where the first of them is, if nobody else has it, as autograd does.
        """
        made, own = Graph(), set(self.calls)
        copies: dict[Node, Node] = {}
        for node in self.inputs:
            copies[node] = made.placeholder(node.name)
            copies[node].meta["val"] = node.meta.get("val")
        for node in self.calls:
            if node.target is torch.ops.aten.detach.default:  # without autograd it only renames
                copies[node] = copies[node.all_input_nodes[0]]
                continue
            copies[node] = made.node_copy(node, lambda each: copies[each])
            if in_place and self._adds_up(node, own):
                copies[node].target = torch.ops.aten.add_.Tensor
        made.output(tuple(copies[node] for node in self.outputs))
        return made

    def _adds_up(self, node: Node, own: set[Node]) -> bool:
        """Say whether a call accumulates gradients and may overwrite its first operand."""
        if node.target is not torch.ops.aten.add.Tensor or node.meta.get("custom"):
            return False
        first, second = node.args[:2]
        if not (isinstance(first, Node) and isinstance(second, Node)) or first is second or first not in own:
            return False
        (mine,), (other,) = tensors(first), tensors(second)
        return list(first.users) == [node] and not is_view(first) and first not in self.outputs and (
            mine.shape == other.shape and mine.dtype == other.dtype
        )  # fmt: skip

    def module(self, root: GraphModule, *, in_place: bool = True, device: torch.device | str = "cpu") -> GraphModule:
        """Return the graph as a module for ``device``; ``root`` (``Joint.module``) holds the constants it reads."""
        graph = self.graph(in_place=in_place)
        settle(graph, torch.device(device))
        return GraphModule(root, graph, f"Chunk{self.phase.name}")

    def digest(self) -> str:
        """Return a hash of the structure: operations, constants, shapes, strides, dtypes, whatever the names."""
        place: dict[Node, str] = {}
        text = []
        for node in self.inputs:
            text.append(_shapes(node))
            place[node] = f"%{len(place)}"
        for node in self.calls:
            text.append(f"{node.target}{_named(node.args, place)}{_named(node.kwargs, place)}{_shapes(node)}")
            place[node] = f"%{len(place)}"
        text.append(str([place[node] for node in self.outputs]))
        return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Piece:
    """All that the capture says of one site.

    ``received`` and ``sent`` are activations from and to other sites, or the model's inputs and outputs; ``saved`` is
    what the backward reads of the forward (of values in one storage all are listed), ``stash`` what BW reads that
    is neither parameter nor buffer. ``gradients`` are (parameter, its gradient or this site's part of it),
    ``parameters`` names of the placeholders.
    """

    site: Site
    parameters: tuple[str, ...]
    received: tuple[Node, ...]
    sent: tuple[Node, ...]
    saved: tuple[Node, ...]
    stash: tuple[Node, ...]
    gradients: tuple[tuple[str, Node], ...]
    forward: ChunkGraph
    backward: ChunkGraph
    backward_input: ChunkGraph
    backward_weight: ChunkGraph

    def recompute(self, kept: Iterable[Node] = (), *, send: bool = False) -> ChunkGraph:
        """Return R: what computes the saved values again from the received ones and ``kept``.

        With ``send`` also the activations sent, which the recompute of the next region of the layer starts from.
        """
        forward, held = set(self.forward.calls), set(kept)
        wanted = [node for node in self.saved if node in forward and node not in held]
        wanted += [node for node in self.sent if send and node not in wanted and node not in held]
        own = forward - held
        return reach(Phase.R, wanted, lambda node: node in own)

    def forward_keeping(self, kept: Iterable[Node]) -> ChunkGraph:
        """Return F that hands out what is sent and ``kept``, and forgets what else the backward reads."""
        forward = set(self.forward.calls)
        wanted = [*self.sent, *(node for node in kept if node in forward)]
        return reach(Phase.F, _unique(wanted), lambda node: node in forward)

    def joined(self, backward: ChunkGraph, kept: Iterable[Node]) -> ChunkGraph:
        """Return B, BI or BW that computes for itself what it reads of the forward and was not ``kept``."""
        own = {*backward.calls, *self.recompute(kept).calls}
        return reach(backward.phase, list(backward.outputs), lambda node: node in own)


@dataclass(frozen=True, slots=True)
class Cut:
    """The pieces in forward order, and the graph that is run once beforehand; ``edges`` are (from, to, values)."""

    joint: Joint
    pieces: tuple[Piece, ...]
    prelude: ChunkGraph
    edges: tuple[tuple[int, int, tuple[Node, ...]], ...]

    def __reduce__(self) -> tuple[Callable[[bytes], Cut], tuple[bytes]]:
        parts = (self.joint, self.pieces, self.prelude, self.edges)
        return _unpacked, (pack(self.joint.module, parts),)


def _unpacked(data: bytes) -> Cut:
    return Cut(*unpack(data))


def cut(joint: Joint, layers: int | None = None) -> Cut:
    """Cut ``joint`` by region and phase; ``layers`` as in :func:`assign`."""
    made = assign(joint, layers)
    given = {node.name: node for node in joint.nodes if node.op == "placeholder"}
    prelude = set(made.prelude)
    fixed = {given[name] for name in (*joint.parameters, *joint.buffers)} | prelude
    free = _free(joint, fixed - prelude)
    parts = _parts(joint, made)
    users = _users(made)
    count = len(made.sites)
    targets: list[list[Node]] = [[] for _ in range(count)]  # gradients that leave each site
    results = {node for name, node in joint.gradients if name not in joint.parameters}
    for node in joint.nodes:
        site = made.site_of.get(node)
        if site is not None and node in made.backward and (users[node] - {site} or node in results):
            targets[site].append(node)

    def own(site: int, backward: bool) -> Callable[[Node], bool]:
        return lambda n: n in free or (made.site_of.get(n) == site and (n in made.backward) == backward)

    whole = [
        reach(Phase.B, _unique([*targets[s], *(n for _, n in parts.get(s, ()))]), own(s, True)) for s in range(count)
    ]
    read: set[Node] = {node for graph in whole for node in graph.inputs}
    read |= {node for graph in whole for node in graph.outputs if node not in made.backward}
    outputs = set(joint.outputs)
    pieces = []
    for s, place in enumerate(made.sites):
        gradients = tuple(parts.get(s, ()))
        mine = [node for node in joint.nodes if made.site_of.get(node) == s and node not in made.backward]
        mine = [node for node in mine if node not in free]
        sent = [node for node in mine if node in outputs or any(u != s for u in _forward_users(node, made))]
        forward = reach(Phase.F, _unique([*sent, *(node for node in mine if node in read)]), own(s, False))
        first, second = _split(whole[s], targets[s], gradients, own(s, True))
        held = [node for node in whole[s].inputs if node not in fixed]
        varying = [node for node in second.inputs if node not in fixed]
        used = {node for graph in (forward, whole[s]) for node in graph.inputs}
        pieces.append(
            Piece(
                site=place,
                parameters=tuple(name for name in joint.parameters if given[name] in used),
                received=tuple(node for node in forward.inputs if node not in fixed),
                sent=tuple(sent),
                saved=tuple(n for n in held if n not in made.backward and n.name not in joint.tangents),
                stash=tuple(varying),
                gradients=gradients,
                forward=forward,
                backward=whole[s],
                backward_input=first,
                backward_weight=second,
            )
        )
    graphs = [graph for piece in pieces for graph in (piece.forward, piece.backward)]
    wanted = _unique(node for graph in graphs for node in graph.inputs if node in prelude)
    edges = _edges(pieces, made)
    return Cut(joint, tuple(pieces), reach(Phase.NONE, wanted, lambda n: n in prelude or n in free), edges)


def reach(phase: Phase, outputs: list[Node], own: Callable[[Node], bool]) -> ChunkGraph:
    """Return the graph of ``outputs``: the own nodes that they need in the joint graph's order, inputs by first use."""
    calls: set[Node] = set()
    others: set[Node] = set()
    waiting = list(outputs)
    while waiting:
        node = waiting.pop()
        if node in calls or node in others:
            continue
        if node.op != "placeholder" and own(node):
            calls.add(node)
            waiting.extend(node.all_input_nodes)
        else:
            others.add(node)
    ordered = sorted(calls)
    inputs = _unique(n for node in (*ordered, None) for n in (node.all_input_nodes if node else outputs) if n in others)
    return ChunkGraph(phase, tuple(ordered), tuple(inputs), tuple(outputs))


def _split(
    whole: ChunkGraph, leaving: list[Node], gradients: tuple[tuple[str, Node], ...], own: Callable[[Node], bool]
) -> tuple[ChunkGraph, ChunkGraph]:
    """Return BI and BW of a whole backward."""
    first = set(reach(Phase.BI, leaving, own).calls)
    late = [node for _, node in gradients if node not in first]
    early = [node for _, node in gradients if node in first]
    second = reach(Phase.BW, _unique(late), lambda node: node not in first and own(node))
    crossing = [node for node in second.inputs if node in first]
    return reach(Phase.BI, _unique([*leaving, *early, *crossing]), own), second


def _parts(joint: Joint, made: Assignment) -> dict[int, list[tuple[str, Node]]]:
    """Return each site's parts of parameters' gradients: sums over several sites are taken apart."""
    parts: dict[int, list[tuple[str, Node]]] = {}
    for name, total in joint.gradients:
        if name not in joint.parameters:
            continue
        waiting = [total]
        while waiting:
            node = waiting.pop()
            sites = {made.site_of[n] for n in node.all_input_nodes if n in made.backward}
            if len(sites) > 1 and not node.meta.get("custom") and node.target is torch.ops.aten.add.Tensor:
                waiting.extend(reversed(node.all_input_nodes))
                made.site_of.pop(node, None)
            else:
                parts.setdefault(made.site_of[node], []).append((name, node))
    return parts


def _users(made: Assignment) -> dict[Node, set[int]]:
    """Return the sites whose backward uses each backward node."""
    return {
        node: {made.site_of[user] for user in node.users if user in made.site_of and user in made.backward}
        for node in made.backward
    }


def _forward_users(node: Node, made: Assignment) -> list[int]:
    return [made.site_of[user] for user in node.users if user in made.site_of and user not in made.backward]


def _edges(pieces: list[Piece], made: Assignment) -> tuple[tuple[int, int, tuple[Node, ...]], ...]:
    """Return the forward edges between sites."""
    found: dict[tuple[int, int], list[Node]] = {}
    for to, piece in enumerate(pieces):
        for node in piece.received:
            source = made.site_of.get(node)
            if source is not None:
                found.setdefault((source, to), []).append(node)
    return tuple((source, to, tuple(nodes)) for (source, to), nodes in sorted(found.items()))


def _free(joint: Joint, fixed: set[Node]) -> set[Node]:
    """Return constants and the views of parameters and buffers."""
    free: set[Node] = set()
    for node in joint.nodes:
        if node.op == "get_attr" or (
            node.op == "call_function"
            and node.all_input_nodes
            and all(n in free or n in fixed for n in node.all_input_nodes)
            and is_view(node)
        ):
            free.add(node)
    return free


def is_view(node: Node) -> bool:
    """Say whether a call only names a part of a storage again (it moves no bytes)."""
    if node.target is operator.getitem:
        return True
    made = storages(node)
    return bool(made) and made <= {key for n in node.all_input_nodes for key in storages(n)}


def root(node: Node) -> Node:
    """Return the value that a chain of views starts from."""
    while node.op == "call_function" and is_view(node):
        node = node.all_input_nodes[0]
    return node


def storages(node: Node) -> set[int]:
    """Return the identities of the storages that a node's value lies in."""
    return {tensor.untyped_storage()._cdata for tensor in tensors(node)}


def tensors(node: Node) -> tuple[torch.Tensor, ...]:
    """Return the fake tensors that a node's value is made of."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return (value,)
    return tuple(v for v in value if isinstance(v, torch.Tensor)) if isinstance(value, tuple | list) else ()


def _unique(nodes: Iterable[Node]) -> list[Node]:
    return list(dict.fromkeys(nodes))


def _named(value: Any, place: dict[Node, str]) -> Any:
    return torch.fx.node.map_arg(value, lambda node: place[node])


def _shapes(node: Node) -> str:
    return ";".join(f"{each.dtype}{tuple(each.shape)}{each.stride()}" for each in tensors(node))
