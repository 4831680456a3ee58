"""Collectives in traced graphs: which there are, as a shard contract counts them; gathering again; binding groups.

Relies on the operators of ``torch.ops._c10d_functional``, whose last argument is the name of a process group.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch.fx import Graph, Node

from piper_core.frontend.capture import Joint
from piper_core.frontend.cut import ChunkGraph, is_view, tensors
from piper_core.names import Axis, Collective

_KINDS = {
    "all_reduce": Collective.ALL_REDUCE,
    "all_gather_into_tensor": Collective.ALL_GATHER,
    "reduce_scatter_tensor": Collective.REDUCE_SCATTER,
    "all_to_all_single": Collective.ALL_TO_ALL,
    "ring_flash_attention": Collective.RING_EXCHANGE,
    "ring_flash_attention_backward": Collective.RING_EXCHANGE,
}
_MOVES = {"wait_tensor", "split", "split_with_sizes", "cat", "clone", "chunk"}
"""Operations that only move what was gathered to its place."""


@dataclass(frozen=True, slots=True, order=True)
class Traced:
    """One collective of a graph; ``nbytes`` is the full size, as in :class:`piper_core.arch.contract.Exchange`."""

    collective: Collective
    axis: Axis
    nbytes: int


def kind_of(node: Node) -> Collective:
    """Return the kind of collective that a node starts (NONE: it starts none)."""
    name = _name(node) if getattr(node.target, "namespace", "") in ("_c10d_functional", "piper_core") else ""
    return _KINDS.get(name, Collective.NONE)


def traced(graph: ChunkGraph, all_to_all: Axis = Axis.EXPERT) -> tuple[Traced, ...]:
    """Return the collectives of a graph in order; those of integers, which say how much others send, are left out.

    ``all_to_all`` says which axis those of that kind are of: expert or context.
    """
    axes = {Collective.ALL_REDUCE: Axis.TENSOR, Collective.ALL_TO_ALL: all_to_all}
    found = []
    for node in graph.calls:
        kind = kind_of(node)
        if kind is Collective.NONE:
            continue
        if kind is Collective.RING_EXCHANGE:
            found.append(Traced(kind, Axis.CONTEXT, _round(node)))
            continue
        whole = tensors(node if kind is Collective.ALL_GATHER else node.all_input_nodes[0])[0]
        if whole.is_floating_point():
            found.append(Traced(kind, axes.get(kind, Axis.SEQUENCE), _nbytes(whole)))
    return tuple(found)


def _round(node: Node) -> int:
    """Return the full size of what a ring passes on: keys and values, and in the backward their gradients."""
    backward = "backward" in _name(node)
    key, value = (tensors(each)[0] for each in node.all_input_nodes[1 + backward : 3 + backward])
    ranks = next(each for each in node.args[::-1] if isinstance(each, int))
    return (_nbytes(key) + _nbytes(value)) * ranks * (2 if backward else 1)


def _nbytes(tensor: torch.Tensor) -> int:
    return prod(tensor.shape) * tensor.element_size()


def settled(joint: Joint, *, regather: bool = False) -> Joint:
    """Return the joint graph of one rank, changed so that waiting is a view, as at run time: it makes no new tensor.

    ``regather``: see :func:`gathered_again`.
    """
    for node in joint.nodes:
        if _name(node) == "wait_tensor" and kind_of(node.all_input_nodes[0]) is not Collective.NONE:
            node.all_input_nodes[0].meta["val"] = node.meta["val"]
    return gathered_again(joint) if regather else joint


def gathered_again(joint: Joint) -> Joint:
    """Return ``joint``, changed so that the backward gathers again what the forward gathered.

    Kept for the backward is then the rank's own part (Korthikanti 2022, arXiv 2205.05198, section 4.2.2).
    """
    graph = joint.module.graph
    order = list(graph.nodes)
    backward = {n for n in order if n.meta.get("partitioner_tag") == "is_backward"}
    for source in order:
        if kind_of(source) is not Collective.ALL_GATHER or source in backward:
            continue
        chain = _moved(source, order, backward)
        readers = [n for n in order if n in backward and any(each in chain for each in n.all_input_nodes)]
        if readers:
            _copy(graph, chain, readers)
    graph.lint()
    joint.module.recompile()
    return joint


def _moved(source: Node, order: list[Node], backward: set[Node]) -> dict[Node, None]:
    """Return the forward nodes that hold nothing but what was gathered, in order."""
    chain = {source: None}
    for node in order:
        if node.op != "call_function" or node in backward or not node.all_input_nodes:
            continue
        if _name(node) == "index_select":  # sorting; the order itself is kept
            moves = node.args[0] in chain
        else:
            moves = (is_view(node) or _name(node) in _MOVES) and all(each in chain for each in node.all_input_nodes)
        if moves:
            chain[node] = None
    return chain


def _copy(graph: Graph, chain: dict[Node, None], readers: list[Node]) -> None:
    """Copy what ``readers`` need of a chain in front of the first of them, and let them read that."""
    needed: set[Node] = set()
    waiting = [each for reader in readers for each in reader.all_input_nodes if each in chain]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting.extend(each for each in node.all_input_nodes if each in chain)
    copies: dict[Node, Node] = {}
    with graph.inserting_before(readers[0]):
        for node in chain:
            if node in needed:
                copies[node] = graph.node_copy(node, lambda each: copies.get(each, each))
                copies[node].meta = {**node.meta, "partitioner_tag": "is_backward"}
    for reader in readers:
        for node, copied in copies.items():
            reader.replace_input_with(node, copied)


def bind(graph: torch.fx.GraphModule, groups: Mapping[str, str]) -> torch.fx.GraphModule:
    """Return ``graph``, changed so that its collectives run in other groups: name as traced -> name."""
    for node in graph.graph.nodes:
        if kind_of(node) is not Collective.NONE:
            node.args = tuple(groups.get(each, each) if isinstance(each, str) else each for each in node.args)
    graph.recompile()
    return graph


def _name(node: Node) -> str:
    if node.target is operator.getitem:
        return "getitem"
    return str(getattr(getattr(node.target, "overloadpacket", None), "__name__", ""))
