"""What a chunk keeps under each recompute policy, and what R then does again."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import assert_never

import torch
from torch.fx import Node

from piper_core.frontend.collectives import kind_of
from piper_core.frontend.cut import Piece, is_view, root, storages, tensors
from piper_core.frontend.operations import is_attention, is_fusable, product_weight
from piper_core.names import Collective, Recompute


def kept(piece: Piece, policy: Recompute) -> tuple[Node, ...]:
    """Return the values of the forward that stay for the backward beside what the site received.

    NONE: all that the backward reads. FULL: none. SELECTIVE: results of products with weights and of attention kernels,
    and whatever is not smaller kept so; norms, activations, and an attention that is written out, are computed again.
    What was decided (:func:`decided`) is never decided again.
    """
    forward = set(piece.forward.calls)
    match policy:
        case Recompute.NONE:
            return tuple(node for node in piece.saved if node in forward)
        case Recompute.FULL:
            return decided(piece)
        case Recompute.SELECTIVE:
            return _selective(piece, forward)
        case _:
            assert_never(policy)


def _selective(piece: Piece, forward: set[Node]) -> tuple[Node, ...]:
    heavy = _with_views({node for node in forward if is_heavy(node)}, forward)
    return lean(piece, heavy | set(decided(piece)))


def decided(piece: Piece) -> tuple[Node, ...]:
    """Return the whole numbers that R starts from: those that came from values (a router's choice of experts, where
    rounding could choose otherwise the second time) or from other ranks (how many rows arrive)."""
    forward = set(piece.forward.calls)
    found = {_smallest(node, forward): None for node in piece.forward.calls if _decides(node)}
    read = {*piece.recompute(found, send=True).inputs, *piece.saved}
    return tuple(node for node in found if node in read)


def _decides(node: Node) -> bool:
    if not _is_whole(node):
        return False
    call = node.all_input_nodes[0] if node.target is operator.getitem else node
    given = [tensor for each in call.all_input_nodes for tensor in tensors(each)]
    return kind_of(call) is not Collective.NONE or any(each.is_floating_point() for each in given)


def _smallest(node: Node, forward: set[Node]) -> Node:
    """Return what alone is read of a decision (of a sort, the first few), where that is smaller."""
    users = [user for user in node.users if user in forward]
    while len(users) == 1 and _is_whole(users[0]) and users[0].all_input_nodes == [node]:
        node = users[0]
        users = [user for user in node.users if user in forward]
    return node


def _is_whole(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.int32)


def fused(piece: Piece) -> tuple[Node, ...]:
    """Return what stays where chains of small operations (norm, activation and product) are one kernel each.

    What a chain computes in between, its backward computes again from what the chain read.
    """
    forward, backward = set(piece.forward.calls), set(piece.backward.calls)
    barriers = _with_views({node for node in forward if not is_view(node) and not is_fusable(node)}, forward)
    pinned = {node for node in piece.saved if any(not is_fusable(user) for user in _readers(node, backward))}
    return lean(piece, barriers, pinned)


def _with_views(calls: set[Node], forward: set[Node]) -> set[Node]:
    """Return the tensors that calls make and the views of them."""
    found = calls | {node for node in forward if is_view(node) and root(node) in calls}
    return {node for node in found if isinstance(node.meta.get("val"), torch.Tensor)}


def _readers(node: Node, calls: set[Node]) -> set[Node]:
    """Return the calls that read a value, itself or through views."""
    found: set[Node] = set()
    for user in node.users:
        if user in calls:
            found |= _readers(user, calls) if is_view(user) else {user}
    return found


def lean(piece: Piece, heavy: set[Node], pinned: Iterable[Node] = ()) -> tuple[Node, ...]:
    """Keep ``pinned`` and heavy saved values; any other is computed again where that keeps fewer bytes."""
    forward, pins = set(piece.forward.calls), set(pinned)
    stay = {node: None for node in piece.saved if node in forward and (node in heavy or node in pins)}
    for value in sorted(
        piece.saved, key=lambda node: -_nbytes({node}, set())
    ):  # what the largest needs, others may use
        if value not in forward or value in stay:
            continue
        sources = _sources(value, forward, heavy, set(stay))
        there = {key for node in stay for key in storages(node)}
        if sources and _nbytes(sources, there) >= _nbytes({value}, there):
            stay[value] = None
        else:
            stay.update(dict.fromkeys(sorted(sources)))
    return tuple(stay)


def _sources(value: Node, forward: set[Node], heavy: set[Node], stay: set[Node]) -> set[Node]:
    """Return the heavy results, not kept so far, that a light value is computed from."""
    found, seen, waiting = set(), set(), [value]
    while waiting:
        for node in waiting.pop().all_input_nodes:
            if node in seen or node not in forward or node in stay:
                continue
            seen.add(node)
            if node in heavy:
                found.add(node)
            else:
                waiting.append(node)
    return found


def is_heavy(node: Node) -> bool:
    """Say whether a call is an attention kernel or a product of which one side is a weight."""
    return is_attention(node) or product_weight(node) is not None


def _nbytes(nodes: set[Node], there: set[int]) -> int:
    """Return the bytes of the storages that values lie in, without those that are ``there`` already."""
    found = {t.untyped_storage()._cdata: int(t.untyped_storage().nbytes()) for node in nodes for t in tensors(node)}
    return sum(size for key, size in found.items() if key not in there)
