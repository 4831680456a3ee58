"""Collectives inside the graph of an action: begun where their input is there, waited for where their result is read.

What needs neither runs in between: gradients of weights while an input's gradient is summed over tensor ranks or goes
back to the tokens' ranks, shared experts while tokens are under way. ``spread`` orders the calls of a chunk so, before
anything in the graph writes in place; ``split`` makes two calls of each collective, when nothing moves any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from piper_core.frontend.communicator import communicator
from piper_core.frontend.cut import tensors
from piper_core.frontend.exchange import by_expert, rows_by_rank, unsorted
from piper_core.runtime.groups import Arrived, AxisGroups


def spread(calls: Sequence[Node], unit_of: Mapping[Node, int]) -> tuple[Node, ...]:
    """Return the calls in another order that their data allows; only calls of one unit change places, so that no more
    values live than those of one chunk."""
    return tuple(node for _, run in groupby(calls, unit_of.__getitem__) for node in _spread(list(run)))


def _spread(calls: list[Node]) -> Iterator[Node]:
    """Yield calls in turns: what leads to collectives, up to those that can begin; then the rest that waits for none of
    them, unless a larger collective is still to come that it could run behind."""
    needed: set[Node] = set()
    for node in reversed(calls):
        if node.target in _BEGIN or node in needed:
            needed |= {node, *node.all_input_nodes}
    left = calls
    while left:
        under_way: set[Node] = set()
        for rest in (False, True):
            size = max(map(_numel, under_way), default=0)
            if rest and any(node.target in _BEGIN and _numel(node) > size for node in left):
                break
            later: list[Node] = []
            waits = set(under_way)
            for node in left:
                if not (rest or node in needed) or not waits.isdisjoint(node.all_input_nodes):
                    later.append(node)
                    waits.add(node)
                    continue
                if node.target in _BEGIN:
                    under_way.add(node)
                    waits.add(node)
                yield node
            left = later


def _numel(node: Node) -> int:
    """Return how many elements a collective takes or makes, whichever is more."""
    return max(value.numel() for each in (node, *node.all_input_nodes) for value in tensors(each))


def split(graph: Graph) -> None:
    """Begin each collective where it stands, and finish it before its first reader."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        begin = _BEGIN.get(node.target)
        if begin is None or not node.users:
            continue
        with graph.inserting_before(node):
            begun = graph.call_function(begin, node.args, node.kwargs)
        with graph.inserting_before(min(node.users, key=place.__getitem__)):
            result = graph.call_function(_finish, (begun,))
        node.replace_all_uses_with(result)
        graph.erase_node(node)


def begins(target: Any) -> Callable[..., Arrived]:
    """Return what begins an operator."""
    return _BEGIN[target]


def _finish(arrived: Arrived) -> Tensor:
    return arrived()


def _ours() -> AxisGroups:
    found = communicator()
    assert isinstance(found, AxisGroups), "graphs of macro actions run on a rank's own groups"
    return found


def _all_reduce(x: Tensor, operation: str, axis: str) -> Arrived:
    return _ours().begin_all_reduce(x.contiguous(), operation, axis)


def _all_gather(x: Tensor, dim: int, ranks: int, axis: str) -> Arrived:
    arrived, shape = _ours().begin_all_gather(x.contiguous(), axis), x.shape
    return lambda: arrived().view(ranks, *shape).movedim(0, dim).flatten(dim, dim + 1).contiguous()


def _reduce_scatter(x: Tensor, dim: int, ranks: int, axis: str) -> Arrived:
    return _ours().begin_reduce_scatter(torch.cat(x.chunk(ranks, dim)), axis)


def _all_to_all(x: Tensor, axis: str) -> Arrived:
    even = [1] * len(x)
    return _ours().begin_all_to_all(x.contiguous(), even, even, axis)


def _dispatch(rows: Tensor, counts: Tensor, arriving: Tensor, axis: str) -> Arrived:
    leave, arrive = rows_by_rank(counts, arriving)
    arrived = _ours().begin_all_to_all(rows.contiguous(), arrive, leave, axis)
    return lambda: arrived().index_select(0, by_expert(arriving))


def _collect(rows: Tensor, counts: Tensor, arriving: Tensor, axis: str) -> Arrived:
    leave, arrive = rows_by_rank(counts, arriving)
    return _ours().begin_all_to_all(unsorted(rows, arriving), leave, arrive, axis)


_BEGIN: Mapping[Any, Callable[..., Arrived]] = {
    torch.ops.piper_core.all_reduce.default: _all_reduce,
    torch.ops.piper_core.all_gather.default: _all_gather,
    torch.ops.piper_core.reduce_scatter.default: _reduce_scatter,
    torch.ops.piper_core.all_to_all.default: _all_to_all,
    torch.ops.piper_core.dispatch.default: _dispatch,
    torch.ops.piper_core.collect.default: _collect,
}
"""What begins each operator of :mod:`piper_core.frontend.exchange`; ``gather_rows`` and ``scatter_rows``, of experts
under tensor parallelism, stay one call."""
