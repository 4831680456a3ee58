"""A training DAG as JSON that reads back equal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from piper_core.errors import DirectiveError
from piper_core.ir.dag import NODE_COLUMNS, Dag, Edges, Nodes

_EDGE_COLUMNS = {"src": np.int32, "dst": np.int32, "role": np.int32, "payload": np.float64}


def to_json(dag: Dag) -> str:
    """Return the text of a DAG: its tables, then node and edge columns; node columns of one value as that value."""
    data: dict[str, Any] = {
        f.name: _encode(getattr(dag, f.name)) for f in fields(dag) if f.name not in ("nodes", "edges")
    }
    columns = {name: getattr(dag.nodes, name) for name in NODE_COLUMNS}
    data["count"] = len(dag)
    data["nodes"] = {
        name: column[0].item() if len(column) and (column == column[0]).all() else column.tolist()
        for name, column in columns.items()
    }
    data["edges"] = {name: getattr(dag.edges, name).tolist() for name in _EDGE_COLUMNS}
    return json.dumps(data)


def from_json(text: str) -> Dag:
    """Read the text of a DAG.

    Raises:
        DirectiveError: it is not what :func:`to_json` writes.
    """
    try:
        data = json.loads(text)
        nodes = Nodes.make(int(data["count"]), **{name: data["nodes"][name] for name in NODE_COLUMNS})
        edges = Edges(**{name: np.asarray(data["edges"][name], dtype) for name, dtype in _EDGE_COLUMNS.items()})
        hints = _hints(Dag)
        tables = {name: _decode(hints[name], data[name]) for name in hints if name not in ("nodes", "edges")}
        return Dag(nodes=nodes, edges=edges, **tables)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DirectiveError(
            "the text of a DAG cannot be read", found=f"{type(error).__name__}: {error}"[:80]
        ) from None


def _encode(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        return {f.name: _encode(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    return value


@cache
def _hints(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind)


def _decode(hint: Any, data: Any) -> Any:
    """Return the value of a declared type that a JSON value stands for."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        if data is None and NoneType in inner:
            return None
        return _decode(next(kind for kind in inner if kind is not NoneType), data)
    if origin is Literal:
        if data not in inner:
            raise ValueError(f"{data!r} is none of {inner}")
        return data
    if origin is tuple:
        if not isinstance(data, list):
            raise TypeError(f"{data!r} is not a list")
        if inner[-1] is Ellipsis:
            return tuple(_decode(inner[0], item) for item in data)
        return tuple(_decode(kind, item) for kind, item in zip(inner, data, strict=True))
    if is_dataclass(hint):
        hints = _hints(hint)  # type: ignore[arg-type]
        return hint(**{name: _decode(kind, data[name]) for name, kind in hints.items()})  # type: ignore[operator]
    if hint is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(data)
    if not isinstance(data, hint):
        raise TypeError(f"{data!r} is not {hint.__name__}")
    return data
