"""Collectives in traced graphs: which there are, as a shard contract counts them, and gathering again.

They are the operators of :mod:`piper_core.frontend.exchange` and of ring attention, whose last argument is an axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch.fx import Graph, Node

from piper_core.frontend.capture import Joint
from piper_core.frontend.cut import ChunkGraph, is_view, tensors
from piper_core.names import Axis, Collective

_KINDS = {
    "all_reduce": Collective.ALL_REDUCE,
    "all_gather": Collective.ALL_GATHER,
    "gather_rows": Collective.ALL_GATHER,
    "reduce_scatter": Collective.REDUCE_SCATTER,
    "scatter_rows": Collective.REDUCE_SCATTER,
    "all_to_all": Collective.ALL_TO_ALL,
    "dispatch": Collective.ALL_TO_ALL,
    "collect": Collective.ALL_TO_ALL,
    "ring_flash_attention": Collective.RING_EXCHANGE,
    "ring_flash_attention_backward": Collective.RING_EXCHANGE,
}
_ROWS = {"dispatch", "collect", "gather_rows", "scatter_rows"}
_AXES = {"tensor": Axis.TENSOR, "expert": Axis.EXPERT, "context": Axis.CONTEXT}


@dataclass(frozen=True, slots=True, order=True)
class Traced:
    """One collective of a graph; ``nbytes`` is the full size, as in :class:`piper_core.arch.contract.Exchange`."""

    collective: Collective
    axis: Axis
    nbytes: int


def kind_of(node: Node) -> Collective:
    """Return the kind of collective that a node is (NONE: it is none)."""
    if getattr(node.target, "namespace", "") != "piper_core":
        return Collective.NONE
    return _KINDS.get(_name(node), Collective.NONE)


def moves_rows(node: Node) -> bool:
    """Say whether a collective moves as many rows as experts are given, and brings them into another order."""
    return kind_of(node) is not Collective.NONE and _name(node) in _ROWS


def traced(graph: ChunkGraph) -> tuple[Traced, ...]:
    """Return the collectives of a graph in order; those of integers, which say how much others send, are left out."""
    found = []
    for node in graph.calls:
        kind = kind_of(node)
        if kind is Collective.NONE:
            continue
        axis = _AXES[str(node.args[-1])]
        if axis is Axis.TENSOR and kind is not Collective.ALL_REDUCE:  # as a contract calls it
            axis = Axis.SEQUENCE
        if kind is Collective.RING_EXCHANGE:
            found.append(Traced(kind, axis, _round(node)))
            continue
        whole = tensors(node if kind is Collective.ALL_GATHER else node.all_input_nodes[0])[0]
        if whole.is_floating_point():
            found.append(Traced(kind, axis, _nbytes(whole)))
    return tuple(found)


def _round(node: Node) -> int:
    """Return the full size of what a ring passes on: keys and values, and in the backward their gradients."""
    backward = "backward" in _name(node)
    key, value = (tensors(each)[0] for each in node.all_input_nodes[1 + backward : 3 + backward])
    ranks = next(each for each in node.args[::-1] if isinstance(each, int))
    return (_nbytes(key) + _nbytes(value)) * ranks * (2 if backward else 1)


def _nbytes(tensor: torch.Tensor) -> int:
    return prod(tensor.shape) * tensor.element_size()


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
        if not tensors(source)[0].is_floating_point():  # counts
            continue
        chain = _moved(source, order, backward)
        readers = [n for n in order if n in backward and any(each in chain for each in n.all_input_nodes)]
        if readers:
            _copy(graph, chain, readers)
    graph.lint()
    joint.module.recompile()
    return joint


def _moved(source: Node, order: list[Node], backward: set[Node]) -> dict[Node, None]:
    """Return what was gathered and the forward's views of it, in order."""
    chain = {source: None}
    for node in order:
        sources = node.all_input_nodes if node.op == "call_function" and node not in backward else []
        if sources and is_view(node) and all(each in chain for each in sources):
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


def _name(node: Node) -> str:
    return str(getattr(getattr(node.target, "overloadpacket", None), "__name__", ""))
