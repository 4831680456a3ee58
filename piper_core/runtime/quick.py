"""The same graph with fewer and quicker calls.

A joint graph in aten operations has many that move nothing, and calling an operation by its overload takes two to four
times as long as calling torch's own Python function for it (4.5 against 1.8 microseconds for a tiny product). Results
are the same but for the order in which sums of products are added up.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

_ATEN = torch.ops.aten
_VIEWS = (_ATEN.view.default, _ATEN._unsafe_view.default)
_MM, _T = _ATEN.mm.default, _ATEN.t.default

_FUNCTIONS: Mapping[Any, Callable[..., Any]] = {
    getattr(getattr(_ATEN, name), overload): getattr(torch._C._VariableFunctions, name)
    for name, overloads in {
        "mm": "default", "addmm": "default", "bmm": "default", "mul": "Tensor Scalar", "add": "Tensor",
        "sub": "Tensor", "div": "Tensor Scalar", "neg": "default", "rsqrt": "default", "pow": "Tensor_Scalar",
        "mean": "dim", "sum": "dim_IntList", "cat": "default", "sigmoid": "default", "tanh": "default",
        "exp": "default", "t": "default", "transpose": "int", "permute": "default", "embedding": "default",
        "index_select": "default", "gather": "default", "scatter_add": "default", "split": "Tensor",
        "select": "int", "unsqueeze": "default", "clone": "default", "where": "self", "addcmul": "default",
    }.items()
    for overload in overloads.split()
}  # fmt: skip
_METHODS = {
    _ATEN.view.default: "view",
    _ATEN._unsafe_view.default: "view",
    _ATEN.expand.default: "expand",
    _ATEN.add_.Tensor: "add_",
    _ATEN.addmm_.default: "addmm_",
    _ATEN.addcmul_.default: "addcmul_",
}
_NN = {
    _ATEN.silu.default: torch._C._nn.silu,
    _ATEN.gelu.default: torch._C._nn.gelu,
    _ATEN.linear.default: torch._C._nn.linear,
}


def quicken(graph: Graph) -> None:
    """Rewrite a graph of one macro action; gradient buffers are added to already."""
    for step in (
        _without_nothing,
        _views_of_views,
        _alike,
        _scalars,
        _sums_of_products,
        _sums,
        _linear,
        _unread,
        _functions,
    ):
        step(graph)


def _without_nothing(graph: Graph) -> None:
    """Take out transposes of transposes, first powers, and views of what has the shape already; and copies over a
    dimension that a product would broadcast."""
    for node in list(graph.nodes):
        if node.target is _T and node.all_input_nodes[0].target is _T:
            node.replace_all_uses_with(node.all_input_nodes[0].all_input_nodes[0])
        elif node.target is _ATEN.pow.Tensor_Scalar and node.args[1] == 1:
            node.replace_all_uses_with(node.all_input_nodes[0])
        elif node.target is _ATEN.expand.default:
            users = list(node.users)
            if len(users) == 1 and users[0].target is _ATEN.div.Scalar:
                scaled, source = users[0], node.all_input_nodes[0]
                if all(_broadcasts(each, scaled) for each in scaled.users):
                    node.replace_all_uses_with(source)
                    scaled.meta = {**scaled.meta, "val": source.meta.get("val")}


def _broadcasts(product: Node, small: Node) -> bool:
    """Say whether a call multiplies something of the whole shape with ``small``, which may then be smaller."""
    if product.target is not _ATEN.mul.Tensor or product.args[0] is product.args[1]:
        return False
    other = product.args[1] if product.args[0] is small else product.args[0]
    made, given = _value(product), _value(other)
    return made is not None and given is not None and made.shape == given.shape


def _views_of_views(graph: Graph) -> None:
    for node in graph.nodes:
        if node.target in _VIEWS:
            source = node.all_input_nodes[0]
            while source.target in _VIEWS:
                source = source.all_input_nodes[0]
            node.args = (source, node.args[1])
            before, after = _value(source), _value(node)
            if before is not None and after is not None and before.shape == after.shape:
                node.replace_all_uses_with(source)


def _alike(graph: Graph) -> None:
    """Make one of views and transposes of one tensor that are the same."""
    seen: dict[tuple[Any, ...], Node] = {}
    for node in graph.nodes:
        if node.target in (*_VIEWS, _T):
            rest = node.args[1:]
            key = (node.target in _VIEWS, node.args[0], tuple(rest[0]) if rest else ())
            if key in seen:
                node.replace_all_uses_with(seen[key])
            else:
                seen[key] = node


def _scalars(graph: Graph) -> None:
    """Multiply the smaller factor of a product by a number that stands before the larger one, and join numbers."""
    for node in list(graph.nodes):
        if node.target is not _ATEN.mul.Tensor or not all(isinstance(each, Node) for each in node.args):
            continue
        for scaled, small in (node.args, node.args[::-1]):
            if scaled.target is _ATEN.mul.Scalar and len(scaled.users) == 1 and _numel(small) < _numel(scaled):
                factor = scaled.args[1]
                if small.target is _ATEN.div.Scalar and len(small.users) == 1:
                    source, factor = small.args[0], factor / small.args[1]
                else:
                    source = small
                with graph.inserting_before(node):
                    times = graph.call_function(_ATEN.mul.Scalar, (source, factor))
                times.meta = dict(small.meta)
                node.args = (times, scaled.args[0])
                break


def _sums_of_products(graph: Graph) -> None:
    """Let a matrix product add to the other summand: where that is overwritten anyway in place, else to a copy."""
    for node in list(graph.nodes):
        if node.target not in (_ATEN.add_.Tensor, _ATEN.add.Tensor) or len(node.args) != 2:
            continue
        first, second = node.args
        if not (isinstance(first, Node) and isinstance(second, Node)):
            continue
        in_place = node.target is _ATEN.add_.Tensor
        if not in_place and not _alone(second) and _alone(first):
            first, second = second, first
        product = _alone(second)
        made, held = _value(node), _value(first)
        if product is None or made is None or held is None or first is second:
            continue
        if not (made.is_contiguous() and held.is_contiguous() and held.shape == made.shape):
            continue
        flat = _value(product)
        if flat is None or flat.dtype != held.dtype or flat.dtype != made.dtype:
            continue
        other = None if in_place else _alone(first)
        with graph.inserting_before(node):
            if other is not None and _place(graph, other) < _place(graph, product):
                graph.call_function(_ATEN.addmm_.default, (other, *product.args))
                whole = first
            else:
                target = first if held.shape == flat.shape else _view(graph, first, flat)
                call = _ATEN.addmm_.default if in_place else _ATEN.addmm.default
                total = graph.call_function(call, (target, *product.args))
                total.meta = dict(product.meta)
                whole = first if in_place else total if made.shape == flat.shape else _view(graph, total, made)
        node.replace_all_uses_with(whole)
        graph.erase_node(node)


def _alone(node: Node) -> Node | None:
    """Return the matrix product that a value is, or is the only view of, if nobody else reads it."""
    product = node.all_input_nodes[0] if node.target in _VIEWS else node
    return product if product.target is _MM and len(node.users) == 1 and len(product.users) == 1 else None


def _view(graph: Graph, node: Node, like: Tensor) -> Node:
    made = graph.call_function(_ATEN.view.default, (node, list(like.shape)))
    made.meta = {"val": like}
    return made


def _place(graph: Graph, node: Node) -> int:
    return next(i for i, each in enumerate(graph.nodes) if each is node)


def _sums(graph: Graph) -> None:
    """Add products of elements in one call."""
    for node in list(graph.nodes):
        if node.target not in (_ATEN.add_.Tensor, _ATEN.add.Tensor) or len(node.args) != 2:
            continue
        first, second = node.args
        in_place = node.target is _ATEN.add_.Tensor
        for total, product in ((first, second),) if in_place else ((first, second), (second, first)):
            if not (isinstance(total, Node) and isinstance(product, Node)) or product.target is not _ATEN.mul.Tensor:
                continue
            made, held, times = _value(node), _value(total), _value(product)
            if made is None or held is None or times is None or len(product.users) != 1 or total is product:
                continue
            if held.shape == made.shape == times.shape and held.dtype == made.dtype == times.dtype:
                node.target = _ATEN.addcmul_.default if in_place else _ATEN.addcmul.default
                node.args = (total, *product.args)
                break


def _linear(graph: Graph) -> None:
    """Take products with transposed matrices as linear layers."""
    for node in graph.nodes:
        if node.target is _MM and node.args[1].target is _T:
            node.target, node.args = _ATEN.linear.default, (node.args[0], node.args[1].args[0])


def _numel(node: Any) -> int:
    value = _value(node)
    return value.numel() if value is not None else 0


def _unread(graph: Graph) -> None:
    """Take out calls without a reader; what adds in place stays."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and node.target not in (
            _ATEN.add_.Tensor, _ATEN.addmm_.default, _ATEN.addcmul_.default
        ) and (node.target is operator.getitem or getattr(node.target, "namespace", "") == "aten"):  # fmt: skip
            graph.erase_node(node)


def _functions(graph: Graph) -> None:
    """Call torch's own functions and methods."""
    for node in list(graph.nodes):
        if node.target in _METHODS:
            node.op, node.target = "call_method", _METHODS[node.target]
        elif node.target in _FUNCTIONS:
            node.target = _FUNCTIONS[node.target]
        elif node.target in _NN:
            node.target = _NN[node.target]
        elif node.target is _ATEN.slice.Tensor:
            _narrow(node)


def _narrow(node: Node) -> None:
    """Make a slice of step 1 a ``narrow``."""
    given: list[Any] = [*node.args]
    source, dim, start, _, step = given + [None, 0, 0, None, 1][len(given) :]
    made, before = _value(node), _value(source)
    if made is None or before is None or not isinstance(start, int) or not isinstance(dim, int) or step != 1:
        return
    start = start + before.shape[dim] if start < 0 else start
    node.op, node.target, node.args = "call_method", "narrow", (source, dim, start, int(made.shape[dim]))


def _value(node: Any) -> Tensor | None:
    """Return the fake tensor that a node makes."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, Tensor) else None


_STEPS = (
    _without_nothing, _views_of_views, _alike, _scalars, _sums_of_products, _sums, _linear, _unread, _functions,
)  # fmt: skip
