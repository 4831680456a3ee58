"""What single operations do: products, attention kernels, bytes that they read and write."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.fx import Node

from piper_core.frontend.collectives import kind_of, moves_rows
from piper_core.frontend.cut import is_view, tensors
from piper_core.names import Collective

_PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2), "dot": (0, 1), "mv": (0, 1)}
"""Matrix products of aten, and which arguments are multiplied."""
_GROUPED = {"grouped_linear", "grouped_outer", "_grouped_mm"}
_ATTENTION = ("scaled_dot_product", "flash_attention", "flex_attention", "efficient_attention", "cudnn_attention")
_GATHERS = {"embedding", "index", "index_select", "gather"}
"""Operations that read of their first argument as much as they write."""


@dataclass(frozen=True, slots=True)
class Product:
    """m x k times k x n, ``groups`` times. Of products that are not ``batched`` but grouped (one for each expert), m
    (or k, for a weight's gradient) is all groups' together."""

    m: int
    n: int
    k: int
    groups: int = 1
    batched: bool = True

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k * (self.groups if self.batched else 1)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """FLOPs executed by one attention kernel, those of its longest block, bytes of keys and values, of all four."""

    flops: float
    span: float
    kv_bytes: int
    qkvo_bytes: int


def name(node: Node) -> str:
    """Return the bare name of a call's operator, such as ``mm``."""
    packet = getattr(node.target, "overloadpacket", None)
    return str(getattr(packet, "__name__", getattr(node.target, "__name__", "")))


def is_product(node: Node) -> bool:
    """Say whether a call is a matrix product, plain, batched or grouped."""
    return name(node) in _PRODUCTS or name(node) in _GROUPED


def is_attention(node: Node) -> bool:
    """Say whether a call is an attention kernel, forward or backward."""
    return any(part in name(node) for part in _ATTENTION)


def is_grouped(node: Node) -> bool:
    """Say whether a call multiplies each expert's rows."""
    return name(node) in _GROUPED


def factors(node: Node) -> tuple[Node, Node]:
    """Return the two sides of a product."""
    left, right = _PRODUCTS.get(name(node), (0, 1))
    first, second = node.args[left], node.args[right]
    assert isinstance(first, Node)
    assert isinstance(second, Node)
    return first, second


def weight_of(node: Node) -> Node | None:
    """Return the parameter that a value is, is a view of, or is a cast of."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        if not is_view(node) and name(node) != "_to_copy":
            return None
        node = node.all_input_nodes[0]
    found = node.op == "placeholder" and type(node.meta.get("desc")).__name__ == "ParamAOTInput"
    return node if found else None


def product_weight(node: Node) -> Node | None:
    """Return the parameter that is one side of a product."""
    if not is_product(node):
        return None
    return next((weight for weight in map(weight_of, factors(node)) if weight is not None), None)


def is_fusable(node: Node) -> bool:
    """Say whether a compiler joins a call with its neighbours: element by element, or a mean or sum."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or name(node) in ("_to_copy", "mean", "sum", "clone", "grouped_bias")


def product(node: Node) -> Product:
    """Return the shape of a product."""
    left, right = (tensors(each)[0].shape for each in factors(node))
    match name(node):
        case "grouped_linear":  # (rows, k), (groups, n, k)
            return Product(left[0], right[1], left[1], right[0], batched=False)
        case "grouped_outer":  # (rows, m), (rows, n): one m x n for each group
            return Product(left[1], right[1], left[0], tensors(node)[0].shape[0], batched=False)
        case "_grouped_mm":
            out = tensors(node)[0].shape
            groups = out[0] if len(out) == 3 else right[0]
            return Product(left[-2], out[-1], left[-1], groups, batched=False)
        case "mv":
            return Product(left[0], 1, left[1])
        case "dot":
            return Product(1, 1, left[0])
        case "bmm" | "baddbmm":
            return Product(left[1], right[2], left[2], left[0])
        case _:
            return Product(left[0], right[1], left[1])


def attention(node: Node) -> AttentionCall:
    """Return what an attention kernel does.

    A causal kernel skips half of the 4 S^2 q_width FLOPs of F; its backward does 2.5 times those of F (Dao 2023, arXiv
    2307.08691, section 4.1). The last 128 queries meet every key in F; in the backward 64 keys meet every query. In a
    ring the queries meet the keys of all ranks, under a causal mask half of them (in every step, as zigzag parts do).
    """
    backward = "backward" in name(node)
    query, key, value = (tensors(n)[0] for n in _tensor_arguments(node)[1 if backward else 0 :][:3])
    *batch, queries, width = query.shape
    ranks = int(_argument(node, "ranks", default=1))  # of a ring, whose keys and values all come by
    flops = 2.0 * prod(batch) * queries * key.shape[-2] * (width + value.shape[-1]) * ranks
    causal = _argument(node, "is_causal", default=False)
    span = 2.0 * 128 * key.shape[-2] * (width + value.shape[-1]) * ranks
    scale = 2.5 if backward else 1.0
    kv = nbytes(key) + nbytes(value)
    out = prod(batch) * queries * value.shape[-1] * value.element_size()
    return AttentionCall(
        flops * scale / (2 if causal else 1), span * scale / (2 if backward else 1), kv, kv + nbytes(query) + out
    )


def other_flops(node: Node) -> int:
    """Return the FLOPs of what is neither a product nor attention but has a formula (convolutions)."""
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(getattr(node.target, "overloadpacket", node.target))
    if formula is None or is_product(node) or is_attention(node):
        return 0
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))


def traffic(node: Node) -> tuple[int, int]:
    """Return the bytes that a call reads and writes; a view moves none."""
    if is_view(node) or name(node) in ("detach", "empty", "new_empty", "empty_like"):
        return 0, 0
    written = sum(map(nbytes, tensors(node)))
    if kind_of(node) is not Collective.NONE and not is_attention(node):  # priced as a collective, not as a kernel
        return (written, written) if moves_rows(node) else (0, 0)
    sources = node.all_input_nodes
    if name(node) in _GATHERS and sources:
        return written + sum(nbytes(t) for n in sources[1:] for t in tensors(n)), written
    if name(node) == "embedding_dense_backward":  # rows of the gradient are read and added to as many of the table's
        sources = sources[:2]
    return sum(nbytes(t) for n in dict.fromkeys(sources) for t in tensors(n)), written


def nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor; an expanded one has those of its storage."""
    return int(min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()))


def _tensor_arguments(node: Node) -> list[Node]:
    return [each for each in node.args if isinstance(each, Node)]


def _argument(node: Node, wanted: str, *, default: Any) -> Any:
    """Return an argument by its name in the operator's schema."""
    schema = node.target._schema  # type: ignore[union-attr]  # an OpOverload
    for index, argument in enumerate(schema.arguments):
        if argument.name == wanted:
            return node.args[index] if index < len(node.args) else node.kwargs.get(wanted, default)
    return default
