"""The training DAG, column by column: every directive and pass is a rewrite of these arrays."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from piper_core.arch.chunk import Chunk, ModelChunks
from piper_core.ir.shard_state import Ranks, ShardState
from piper_core.names import Axis, Collective, NodeKind, Phase, Recompute, Role, Sync

Ints: TypeAlias = NDArray[np.integer[Any]]
Floats: TypeAlias = NDArray[np.float64]
Mask: TypeAlias = NDArray[np.bool_]

ABSENT = -(2**30)
"""Value of an integer tag that a node does not carry."""


def among(column: Ints, values: tuple[int, ...]) -> Mask:
    """Return where a column has one of a few values."""
    found: Mask = column == int(values[0])
    for value in values[1:]:
        found |= column == int(value)
    return found


def _column(dtype: str, default: float) -> Any:
    return field(metadata={"dtype": np.dtype(dtype), "default": default})


@dataclass(frozen=True, slots=True)
class Nodes:
    """Node columns, each of shape (n,).

    ``chunk`` indexes ``Dag.chunks`` (-1: none); ``microbatch`` -1 before ``split``; ``stage`` -1 untagged;
    ``group`` indexes ``Dag.groups`` (-1 unplaced); ``stream`` indexes ``Dag.streams``; ``payload`` is bytes: for one
    sequence where ``scaled``, else absolute; ``bucket`` indexes ``Dag.buckets``; ``splits`` is what the
    global batch was divided by; ``state`` indexes ``Dag.states``; ``policy`` see :class:`Policy`.
    """

    kind: Ints = _column("i4", 0)
    phase: Ints = _column("i4", int(Phase.NONE))
    chunk: Ints = _column("i4", -1)
    microbatch: Ints = _column("i4", -1)
    stage: Ints = _column("i4", -1)
    group: Ints = _column("i4", -1)
    stream: Ints = _column("i4", 0)
    collective: Ints = _column("i4", 0)
    axis: Ints = _column("i4", 0)
    payload: Floats = _column("f8", 0.0)
    scaled: Mask = _column("?", 0)
    bucket: Ints = _column("i4", -1)
    splits: Ints = _column("i4", 1)
    state: Ints = _column("i4", 0)
    policy: Ints = _column("i4", 0)

    def __len__(self) -> int:
        return len(self.kind)

    def take(self, index: NDArray[Any]) -> Nodes:
        """Return the nodes at ``index`` (or where a mask is true), in that order."""
        return Nodes(**{name: getattr(self, name)[index] for name in NODE_COLUMNS})

    def with_(self, **columns: Any) -> Nodes:
        """Return a copy with some columns replaced; scalars are broadcast."""
        n = len(self)
        return replace(
            self,
            **{
                name: np.full(n, value, NODE_COLUMNS[name][0])
                if np.ndim(value) == 0
                else np.asarray(value, NODE_COLUMNS[name][0])
                for name, value in columns.items()
            },
        )

    @staticmethod
    def make(n: int, **columns: Any) -> Nodes:
        """Return ``n`` nodes with the default of every column that is not given."""
        filled = _fresh(n, columns)
        for name, value in columns.items():
            dtype = NODE_COLUMNS[name][0]
            filled[name] = np.full(n, value, dtype) if np.ndim(value) == 0 else np.asarray(value, dtype)
        return Nodes(**filled)

    @staticmethod
    def joined(runs: list[tuple[int, Mapping[str, Any]]]) -> Nodes:
        """Return the nodes of several runs of (count, columns), one after the other (see :meth:`make`)."""
        filled = _fresh(sum(n for n, _ in runs))
        at = 0
        for n, columns in runs:
            for name, value in columns.items():
                filled[name][at : at + n] = value
            at += n
        return Nodes(**filled)

    @staticmethod
    def concat(parts: list[Nodes]) -> Nodes:
        """Join several runs of nodes."""
        if len(parts) == 1:
            return parts[0]
        return Nodes(**{name: np.concatenate([getattr(p, name) for p in parts]) for name in NODE_COLUMNS})


NODE_COLUMNS: Mapping[str, tuple[Any, float]] = {
    f.name: (f.metadata["dtype"], f.metadata["default"]) for f in fields(Nodes)
}


def _fresh(n: int, but: Container[str] = ()) -> dict[str, NDArray[Any]]:
    """Return the default of every column but some."""
    return {name: np.full(n, default, dtype) for name, (dtype, default) in NODE_COLUMNS.items() if name not in but}


@dataclass(frozen=True, slots=True)
class Edges:
    """Edge columns, each of shape (e,): node indices, a :class:`Role`, and bytes for one sequence."""

    src: Ints
    dst: Ints
    role: Ints
    payload: Floats

    def __len__(self) -> int:
        return len(self.src)

    def take(self, index: NDArray[Any]) -> Edges:
        """Return the edges at ``index`` (or where a mask is true)."""
        return Edges(self.src[index], self.dst[index], self.role[index], self.payload[index])

    @staticmethod
    def make(src: Any, dst: Any, role: int | NDArray[Any], payload: float | NDArray[Any] = 0.0) -> Edges:
        """Return edges between two equally long arrays of node indices."""
        source, target = np.asarray(src, np.int32), np.asarray(dst, np.int32)
        n = len(source)
        roles = np.full(n, role, np.int32) if np.ndim(role) == 0 else np.asarray(role, np.int32)
        size = np.full(n, payload, np.float64) if np.ndim(payload) == 0 else np.asarray(payload, np.float64)
        return Edges(source, target, roles, size)

    @staticmethod
    def concat(parts: list[Edges]) -> Edges:
        """Join several runs of edges."""
        if len(parts) == 1:
            return parts[0]
        return Edges(
            np.concatenate([p.src for p in parts]),
            np.concatenate([p.dst for p in parts]),
            np.concatenate([p.role for p in parts]),
            np.concatenate([p.payload for p in parts]),
        )


class Policy:
    """Values of ``Nodes.policy``: what a chunk keeps for its backward.

    FULL_INNER is a fully recomputed chunk whose input is itself recomputed (it follows another one of the
    same layer and row), so that it holds nothing.
    """

    NONE, SELECTIVE, FULL, FULL_INNER = range(4)
    OF: ClassVar = {Recompute.NONE: NONE, Recompute.SELECTIVE: SELECTIVE, Recompute.FULL: FULL}


@dataclass(frozen=True, slots=True)
class Bucket:
    """A consecutive run of parameters of one (stage, dense or expert, group), the unit of gather and reduce.

    ``parts`` are (chunk index, elements after tensor and expert sharding); ``ranks`` is the size of the group
    that reduces it; ``rows`` are the row groups (indices into ``Dag.groups``) that hold it.
    """

    stage: int
    expert: bool
    parts: tuple[tuple[int, int], ...]
    state: int
    ranks: int
    rows: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the whole bucket on one rank when gathered."""
        return sum(numel for _, numel in self.parts)


@dataclass(frozen=True, slots=True)
class Dag:
    """A training DAG: one node for a whole rank group, edges that carry data or order.

    ``global_batch`` in sequences, None when nothing fixes it (then a microbatch is one sequence).
    ``split_name`` is the tag that ``split`` created, ``microbatches`` how many copies (0 before).
    ``groups`` are the rows' rank groups in order of appearance; ``overlaps`` are groups of (stage, phase,
    microbatch) that may overlap; ``ordered`` are the groups whose total order a directive gave.
    """

    model: ModelChunks
    nodes: Nodes
    edges: Edges
    groups: tuple[Ranks, ...] = ()
    streams: tuple[str, ...] = ("compute",)
    states: tuple[ShardState, ...] = (ShardState(),)
    buckets: tuple[Bucket, ...] = ()
    global_batch: int | None = None
    sync: Sync = Sync.GLOBAL_NORM
    split_name: str = "MB"
    microbatches: int = 0
    overlaps: tuple[tuple[tuple[int, int, int], ...], ...] = ()
    ordered: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The model's chunk table that ``nodes.chunk`` indexes."""
        return self.model.chunks

    @property
    def dtype_bytes(self) -> int:
        return self.model.dtype_bytes

    def __len__(self) -> int:
        return len(self.nodes)

    @property
    def compute(self) -> Mask:
        """Mask of compute nodes, shape (n,)."""
        return np.asarray(self.nodes.kind == NodeKind.COMPUTE)

    def sequences(self) -> Floats:
        """Sequences that each node handles, shape (n,)."""
        if self.global_batch is None:
            return np.ones(len(self.nodes))
        return self.global_batch / self.nodes.splits

    def nbytes(self) -> Floats:
        """Bytes that each communication node moves in full (before division over its group), shape (n,).

        Context parallelism divides every activation, but a ring shows each rank the whole sequence; what context ranks
        exchange are heads, which tensor parallelism divides; sequence parallelism divides what a message carries.
        """
        nodes = self.nodes
        context = np.asarray([state.context_degree for state in self.states])[nodes.state]
        tensor = np.asarray([state.tensor_degree for state in self.states])[nodes.state]
        sequence = np.asarray([state.sequence for state in self.states])[nodes.state]
        message = (nodes.kind == NodeKind.SEND) | (nodes.kind == NodeKind.RECV)
        collective = nodes.kind == NodeKind.COLLECTIVE
        ring = collective & (nodes.collective == Collective.RING_EXCHANGE)
        heads = (collective & (nodes.axis == Axis.CONTEXT)) | (message & sequence)
        share = self.sequences() / np.where(ring, 1, context) / np.where(heads, tensor, 1)
        return np.where(self.nodes.scaled, self.nodes.payload * share, self.nodes.payload)

    def tag_names(self) -> tuple[str, ...]:
        """Names that a filter can use on this DAG."""
        extra = sorted({name for chunk in self.chunks for name, _ in chunk.tags if name != "PP"})
        staged = ["PP"] if bool((self.nodes.stage >= 0).any()) else []
        split = [self.split_name] if self.microbatches else []
        return (*staged, *split, "PASS", "LAYER", "REGION", *extra)

    def chunk_tag(self, name: str) -> Ints:
        """Value of a chunk tag for each chunk, ABSENT where missing; shape (len(chunks) + 1,), last is absent."""
        if name == "LAYER":
            values = [chunk.layer for chunk in self.chunks]
        else:
            values = [dict(chunk.tags).get(name, ABSENT) for chunk in self.chunks]
        return np.asarray([*values, ABSENT], np.int32)

    @property
    def stages(self) -> int:
        """Number of pipeline stages (0 when untagged)."""
        return int(self.nodes.stage.max(initial=-1)) + 1

    def equal(self, other: Dag) -> bool:
        """Compare two DAGs column by column."""
        tables = (
            "groups",
            "streams",
            "states",
            "buckets",
            "microbatches",
            "global_batch",
            "overlaps",
            "ordered",
            "sync",
        )
        return (
            all(np.array_equal(getattr(self.nodes, c), getattr(other.nodes, c)) for c in NODE_COLUMNS)
            and all(np.array_equal(getattr(self.edges, c), getattr(other.edges, c)) for c in Edges.__slots__)
            and all(getattr(self, t) == getattr(other, t) for t in tables)
            and self.model == other.model
        )


def training_dag(model: ModelChunks, *, global_batch: int | None = None, sync: Sync = Sync.GLOBAL_NORM) -> Dag:
    """Return the base DAG: one device, the whole batch, F and B of every chunk.

    Nodes are the forward chunks in order, then the backward ones in reverse; edges carry activations,
    gradients (reversed) and what each forward saves for its backward.
    """
    n = len(model.chunks)
    chunk = np.concatenate([np.arange(n), np.arange(n)[::-1]])
    stage = np.asarray([dict(c.tags).get("PP", -1) for c in model.chunks], np.int32)
    nodes = Nodes.make(
        2 * n,
        kind=int(NodeKind.COMPUTE),
        phase=np.repeat([int(Phase.F), int(Phase.B)], n),
        chunk=chunk,
        stage=stage[chunk],
        collective=int(Collective.NONE),
        axis=int(Axis.NONE),
    )
    table = np.asarray([(u, v) for u, v, _ in model.edges], np.int32).reshape(-1, 2)
    size = np.asarray([w for _, _, w in model.edges], np.float64)
    back = 2 * n - 1 - np.arange(n)
    edges = Edges.concat(
        [
            Edges.make(table[:, 0], table[:, 1], Role.ACTIVATION, size),
            Edges.make(back[table[:, 1]], back[table[:, 0]], Role.GRADIENT, size),
            Edges.make(np.arange(n), back, Role.SAVED),
        ]
    )
    return Dag(model=model, nodes=nodes, edges=edges, global_batch=global_batch, sync=sync)
