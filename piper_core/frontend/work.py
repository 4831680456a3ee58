"""FLOPs and bytes of a chunk graph, one capture at a time; :mod:`piper_core.frontend.chunks` makes records of two."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Literal

from torch.fx import Node

from piper_core.frontend import operations as ops
from piper_core.frontend.cut import ChunkGraph, Piece, is_view, root, storages, tensors
from piper_core.frontend.roles import Roles, gradient_products
from piper_core.frontend.table import Kernels
from piper_core.names import Region

ACCUMULATE_BYTES = 8
"""Traffic of adding one weight gradient to its fp32 accumulator: read and write 4 bytes."""


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product with the role of its weight; ``part`` is what it computes."""

    shape: ops.Product
    role: Literal["column", "row", ""]
    part: Literal["output", "input", "weight"]


@dataclass(frozen=True, slots=True)
class Totals:
    """What one chunk graph does at one batch size. ``read`` and ``written`` count every call; ``memory`` and
    ``replicated`` only memory-bound ones, by whether tensor parallelism divides them; ``weights`` is what products
    move of weights, and of their gradients."""

    matmul_flops: float = 0.0
    attention_flops: float = 0.0
    read: float = 0.0
    written: float = 0.0
    memory: float = 0.0
    replicated: float = 0.0
    weights: float = 0.0
    span: float = 0.0
    kernels: int = 0
    products: tuple[Product, ...] = ()
    written_out: bool = False

    @property
    def flops(self) -> float:
        return self.matmul_flops + self.attention_flops


NUMBERS = tuple(f.name for f in fields(Totals) if f.type == "float")
"""Fields of Totals that may grow with the batch."""


def measure(graph: ChunkGraph, piece: Piece, roles: Roles, kernels: Kernels = "eager") -> Totals:
    """Return the totals of one phase of ``piece``.

    ``kernels`` "eager": a kernel a call, as traced. "fused": chains of small operations are one kernel, which reads
    and writes what crosses its ends.
    """
    total = dict.fromkeys(NUMBERS, 0.0)
    products: list[Product] = []
    written_out = False
    launches = 0
    late = gradient_products(piece)
    small: list[Node] = []
    for node in graph.calls:
        if node.op != "call_function" or is_view(node):
            continue
        if ops.is_attention(node) or ops.is_product(node):
            read, written = ops.traffic(node)
            total["read"] += read
            total["written"] += written
        if ops.is_attention(node):
            call = ops.attention(node)
            total["attention_flops"] += call.flops
            total["span"] = max(total["span"], call.span)
            launches += 1
        elif ops.is_product(node):
            launches += 1
            shape, weight = ops.product(node), ops.product_weight(node)
            if weight is None and node not in late and piece.site.region is Region.ATTENTION:
                total["attention_flops"] += shape.flops
                total["memory"] += sum(ops.traffic(node))
                written_out = True
                continue
            total["matmul_flops"] += shape.flops
            if node in late:
                products.append(Product(shape, roles.weights.get(late[node], ""), "weight"))
                total["weights"] += ACCUMULATE_BYTES * sum(t.numel() for t in tensors(node))
            else:
                backward = node in piece.backward.calls
                products.append(Product(shape, roles.of(weight), "input" if backward else "output"))
                total["weights"] += sum(t.numel() * t.element_size() for t in tensors(weight)) if weight else 0
        else:
            total["matmul_flops"] += ops.other_flops(node)
            small.append(node)
    ends = set(graph.outputs)
    for group in _chains(graph, small) if kernels == "fused" else [[node] for node in small]:
        taken, made = _chain_traffic(group, set(graph.calls), ends)
        total["read"] += taken
        total["written"] += made
        total["memory" if group[-1] in roles.divided else "replicated"] += taken + made
        launches += bool(taken + made)
    return Totals(**total, kernels=launches, products=tuple(products), written_out=written_out)


def _chains(graph: ChunkGraph, small: list[Node]) -> list[list[Node]]:
    """Join fusable calls that feed each other or read the same result, views between them; never round another call.

    Calls between the same two ranks of other calls (a product, a sort) may join. A call's rank is as late as its users
    allow, so that what is computed again for a backward joins that.
    """
    members, calls = set(small), set(graph.calls)
    joins = {node for node in small if ops.is_fusable(node)}
    rank: dict[Node, int] = {}
    for node in graph.calls:
        before = max((rank[n] for n in node.all_input_nodes if n in rank), default=0)
        rank[node] = before + (node not in joins and not is_view(node))
    for node in reversed(graph.calls):
        users = [rank[u] - (u not in joins and not is_view(u)) for u in node.users if u in calls]
        if users and (node in joins or is_view(node)):
            rank[node] = max(rank[node], min(users))
    leader: dict[Node, Node] = {}
    groups: dict[Node, list[Node]] = {}
    reader: dict[tuple[Node, int, int], Node] = {}
    for node in graph.calls:
        sources = [leader[n] for n in node.all_input_nodes if n in leader and rank[n] == rank[node]]
        if node in joins:
            size = sum(t.numel() for t in tensors(node))
            places = [(root(n), rank[node], size) for n in node.all_input_nodes if root(n) in calls]
            sources += [leader[reader[place]] for place in places if place in reader]
            reader.update(dict.fromkeys(places, node))
        if is_view(node):
            if sources:
                leader[node] = sources[0]
            continue
        if node not in members:
            continue
        groups[node] = [node]
        if node in joins:
            leader[node] = node
            for other in dict.fromkeys(sources):
                groups[node] += groups.pop(other)
                leader = {key: node if value is other else value for key, value in leader.items()}
    return [sorted(group) for group in groups.values()]


def _chain_traffic(group: list[Node], calls: set[Node], ends: set[Node]) -> tuple[float, float]:
    """Return the bytes that a chain of calls reads and writes: what crosses its ends."""
    if len(group) == 1:
        read, written = ops.traffic(group[0])
        return float(read), float(written)
    inside = set(group)
    own = {key for node in group for key in storages(node)}
    taken: dict[int, int] = {}
    made: dict[int, int] = {}
    for node in group:
        for source in node.all_input_nodes:
            for tensor in tensors(source):
                key = tensor.untyped_storage()._cdata
                if key not in own:
                    taken[key] = max(taken.get(key, 0), ops.nbytes(tensor))
        if _leaves(node, inside, calls, ends):
            made.update((t.untyped_storage()._cdata, ops.nbytes(t)) for t in tensors(node))
    return float(sum(taken.values())), float(sum(made.values()))


def _leaves(node: Node, inside: set[Node], calls: set[Node], ends: set[Node]) -> bool:
    """Say whether a value, itself or through views, is read outside its chain or handed out."""
    return node in ends or any(
        _leaves(user, inside, calls, ends) if is_view(user) else user not in inside
        for user in node.users
        if user in calls
    )


def held(nodes: Iterable[Node], roles: Roles, counted: set[int]) -> tuple[float, float]:
    """Return bytes of the storages that values lie in, divided by tensor parallelism and not; each storage once,
    those in ``counted`` left out, which is added to."""
    sharded = replicated = 0.0
    for node in nodes:
        for tensor in tensors(node):
            storage = tensor.untyped_storage()
            if storage._cdata in counted:
                continue
            counted.add(storage._cdata)
            if node in roles.divided:
                sharded += storage.nbytes()
            else:
                replicated += storage.nbytes()
    return sharded, replicated


def workspace(graph: ChunkGraph) -> float:
    """Return the most bytes alive at once of what a graph makes and does not hand out."""
    last: dict[int, int] = {}
    for i, node in enumerate(graph.calls):
        for each in (node, *node.all_input_nodes):
            last.update(dict.fromkeys(storages(each), i))
    given = {key for node in (*graph.inputs, *graph.outputs) for key in storages(node)}
    alive = most = 0.0
    size: dict[int, int] = {}
    for i, node in enumerate(graph.calls):
        for tensor in tensors(node):
            storage = tensor.untyped_storage()
            if storage._cdata not in given and storage._cdata not in size:
                size[storage._cdata] = storage.nbytes()
                alive += storage.nbytes()
        most = max(most, alive)
        for key in {key for each in (node, *node.all_input_nodes) for key in storages(each)}:
            if key in size and last[key] == i:
                alive -= size[key]
    return most
