"""What a chunk keeps under each recompute policy, and what R then does again."""

from __future__ import annotations

from typing import assert_never

import torch
from torch.fx import Node

from piper_core.frontend.cut import Piece, is_view, tensors
from piper_core.frontend.operations import is_attention, is_product
from piper_core.names import Recompute


def kept(piece: Piece, policy: Recompute) -> tuple[Node, ...]:
    """Return the values of the forward that stay for the backward beside what the site received.

    NONE: all that the backward reads. FULL: none. SELECTIVE: results of products with weights and of attention kernels,
    and whatever is not smaller kept so; norms, activations, and an attention that is written out, are computed again.
    """
    forward = set(piece.forward.calls)
    match policy:
        case Recompute.NONE:
            return tuple(node for node in piece.saved if node in forward)
        case Recompute.FULL:
            return ()
        case Recompute.SELECTIVE:
            return _selective(piece, forward)
        case _:
            assert_never(policy)


def _selective(piece: Piece, forward: set[Node]) -> tuple[Node, ...]:
    """Keep heavy results; a light value is computed again where that keeps fewer bytes than keeping it."""
    heavy = {node for node in forward if is_heavy(node)}
    stay = {node: None for node in piece.saved if node in heavy}
    for value in piece.saved:
        if value not in forward or value in heavy:
            continue
        sources = _sources(value, forward, heavy, set(stay))
        if sources and _nbytes(sources) >= _nbytes({value}):
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
    """Say whether selective recompute keeps a node's result: a product with a weight, an attention kernel."""
    if node.op != "call_function":
        return False
    if node.target is torch.ops.aten.detach.default or not tensors(node):
        return False
    if is_view(node) and isinstance(node.args[0], Node) and not isinstance(node.args[0].meta.get("val"), torch.Tensor):
        return is_heavy_call(node.args[0])  # one of several results
    return isinstance(node.meta.get("val"), torch.Tensor) and is_heavy_call(node)


def is_heavy_call(node: Node) -> bool:
    """Say whether a call is an attention kernel or a product of which one side is a weight."""
    return is_attention(node) or (is_product(node) and any(_is_weight(n) for n in node.all_input_nodes))


def _is_weight(node: Node) -> bool:
    """Say whether a value is a parameter, or a view or a cast of one."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        if not is_view(node) and node.target is not torch.ops.aten._to_copy.default:
            return False
        node = node.all_input_nodes[0]
    return node.op == "placeholder" and type(node.meta.get("desc")).__name__ == "ParamAOTInput"


def _nbytes(nodes: set[Node]) -> int:
    return sum(t.numel() * t.element_size() for node in nodes for t in tensors(node))
