"""A cut as bytes, so that one process captures and others only read.

What goes along is what running and cutting need: nodes with their names, calls and arguments, of ``meta`` the values'
shapes, dtypes and storages (which views share), whose backward it is and a person's tags, and constants. What a trace
asks about (descriptions of inputs, stack traces, sequence numbers) stays behind.
"""

from __future__ import annotations

import io
import operator
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

import piper_core.frontend.exchange  # noqa: F401  # registers the operators that graphs call

_KEPT = ("custom", "partitioner_tag")


@dataclass(frozen=True, slots=True)
class _At:
    """A node by its place in the graph."""

    place: int


@dataclass(frozen=True, slots=True)
class _Fake:
    """A tensor without values: where it lies in which storage."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Row:
    """A node."""

    op: str
    name: str
    target: Any
    args: Any
    kwargs: Any
    value: Any
    meta: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Parcel:
    """A graph, sizes of the storages in bytes, constants by name, and whatever speaks of the graph, pickled."""

    rows: tuple[_Row, ...]
    storages: tuple[int, ...]
    constants: Mapping[str, Tensor]
    rest: bytes


def pack(module: GraphModule, what: object) -> bytes:
    """Return a graph and something that refers to it and its nodes; :func:`unpack` gives that back."""
    places = {node: i for i, node in enumerate(module.graph.nodes)}
    storages: dict[int, tuple[int, int]] = {}

    def value(each: Any) -> Any:
        if not isinstance(each, Tensor):
            return each
        storage = each.untyped_storage()
        place, _ = storages.setdefault(storage._cdata, (len(storages), storage.nbytes()))
        return _Fake(place, tuple(each.shape), each.stride(), int(each.storage_offset()), each.dtype)

    def at(each: Any) -> Any:
        return _At(places[each]) if isinstance(each, Node) else each

    rows = tuple(
        _Row(
            node.op, node.name, _named(node.target), map_aggregate(node.args, at), map_aggregate(node.kwargs, at),
            map_aggregate(node.meta.get("val"), value), {key: node.meta[key] for key in _KEPT if key in node.meta},
        )
        for node in places
    )  # fmt: skip
    constants = {
        str(node.target): operator.attrgetter(str(node.target))(module) for node in places if node.op == "get_attr"
    }
    rest = io.BytesIO()
    _Pickler(rest, module, places).dump(what)
    sizes = tuple(size for _, size in storages.values())
    return pickle.dumps(_Parcel(rows, sizes, constants, rest.getvalue()), pickle.HIGHEST_PROTOCOL)


def unpack(data: bytes) -> Any:
    """Return what :func:`pack` was given; its graph is a new one, whose values lie on ``meta``: a fake mode, which
    would let them lie where they did, takes over a second to import."""
    parcel: _Parcel = pickle.loads(data)
    storages = [torch.empty(n, dtype=torch.uint8, device="meta").untyped_storage() for n in parcel.storages]

    def value(each: Any) -> Any:
        if not isinstance(each, _Fake):
            return each
        made = torch.empty(0, dtype=each.dtype, device="meta")
        return made.set_(storages[each.storage], each.offset, each.size, each.stride)

    graph, nodes = Graph(), list[Node]()

    def at(each: Any) -> Any:
        return nodes[each.place] if isinstance(each, _At) else each

    for row in parcel.rows:
        arguments, named = map_aggregate(row.args, at), map_aggregate(row.kwargs, at)
        node = graph.create_node(row.op, _target(row.target), arguments, named, row.name)
        assert node.name == row.name, "names name values everywhere"
        node.meta = dict(row.meta)
        if row.value is not None:
            node.meta["val"] = map_aggregate(row.value, value)
        nodes.append(node)
    module = GraphModule(dict(parcel.constants), graph)
    return _Unpickler(io.BytesIO(parcel.rest), module, nodes).load()


class _Pickler(pickle.Pickler):
    """Writes nodes as their places, and the module of the graph as nothing but that."""

    def __init__(self, file: io.BytesIO, module: GraphModule, places: Mapping[Node, int]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self._module, self._places = module, places

    def persistent_id(self, given: Any) -> int | None:
        if isinstance(given, Node):
            return self._places[given]
        return -1 if given is self._module else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, module: GraphModule, nodes: Sequence[Node]) -> None:
        super().__init__(file)
        self._module, self._nodes = module, nodes

    def persistent_load(self, given: int) -> Any:
        return self._module if given < 0 else self._nodes[given]


@dataclass(frozen=True, slots=True)
class _Operator:
    """One overload of an operator, by its name (``aten.mm.default``)."""

    name: str


def _named(target: Any) -> Any:
    return _Operator(str(target)) if isinstance(target, torch._ops.OpOverload) else target


def _target(given: Any) -> str | Callable[..., Any]:
    found: Any = operator.attrgetter(given.name)(torch.ops) if isinstance(given, _Operator) else given
    return found  # type: ignore[no-any-return]
