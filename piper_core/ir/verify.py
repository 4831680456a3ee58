"""Invariants of a training DAG: what every directive and pass may assume, and must leave so."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from piper_core.errors import PiperError
from piper_core.ir.dag import NODE_COLUMNS, Dag, Ints, Mask, Policy
from piper_core.ir.edit import compute_table
from piper_core.ir.macro import topological
from piper_core.names import Axis, Collective, NodeKind, Phase, Role

FORWARD, BACKWARD = (Phase.F, Phase.R), (Phase.B, Phase.BI, Phase.BW)
_COMPUTE, _SEND, _RECV, _COLLECTIVE = NodeKind.COMPUTE, NodeKind.SEND, NodeKind.RECV, NodeKind.COLLECTIVE
_Phases: TypeAlias = tuple[Phase, ...]
_ALL: _Phases = tuple(Phase)

_ENDS: dict[Role, tuple[tuple[NodeKind, ...], _Phases, tuple[NodeKind, ...], _Phases]] = {
    Role.ACTIVATION: ((_COMPUTE, _COLLECTIVE, _RECV), FORWARD, (_COMPUTE, _COLLECTIVE, _SEND), FORWARD),
    Role.GRADIENT: ((_COMPUTE, _COLLECTIVE, _RECV), BACKWARD, (_COMPUTE, _COLLECTIVE, _SEND), BACKWARD),
    Role.SAVED: ((_COMPUTE,), FORWARD, (_COMPUTE, _COLLECTIVE), (Phase.R, *BACKWARD)),
    Role.STASH: ((_COMPUTE,), (Phase.BI,), (_COMPUTE, _COLLECTIVE), (Phase.BW,)),
    Role.PARAMETER: ((_COLLECTIVE,), (Phase.F, Phase.B), (_COMPUTE,), (Phase.F, Phase.R, Phase.B, Phase.BI)),
    Role.REDUCTION: ((_COMPUTE, _COLLECTIVE, NodeKind.NORM), _ALL, (_COLLECTIVE, NodeKind.NORM, NodeKind.UPDATE), _ALL),
    Role.MESSAGE: ((_SEND,), (Phase.F, Phase.B), (_RECV,), (Phase.F, Phase.B)),
    Role.TEMPORAL: ((_COMPUTE, _COLLECTIVE, _SEND, _RECV), _ALL, (_COMPUTE, _COLLECTIVE, _SEND, _RECV), _ALL),
}
"""For each role: kinds and phases of its source, kinds and phases of its target."""


class DagError(PiperError):
    """A DAG that breaks an invariant: the fault of the directive or pass that made it, never of a user's input."""


def verify_dag(dag: Dag) -> None:
    """Check every invariant of a DAG.

    Numbers lie in the range of the tables that they index; compute is unique by (phase, chunk, microbatch), with F
    and one of B and {BI, BW} for each (chunk, microbatch); edges join what their role says, of one microbatch and,
    once everything is placed, on one row unless they are messages; each send has one receive; groups are disjoint
    and of one size; there is no cycle; and once the step is closed every weight gradient reaches its stage's update.

    Raises:
        DagError: the first that is broken, with a node or edge.
    """
    _ranges(dag)
    _tables(dag)
    _compute(dag)
    _edges(dag)
    _messages(dag)
    _closed(dag)
    _, stuck = topological(len(dag), dag.edges.src, dag.edges.dst)
    _demand(not stuck, "the edges make a cycle", dag, stuck)


def _demand(holds: object, what: str, dag: Dag, nodes: list[int] | NDArray[np.intp] | Ints = ()) -> None:  # type: ignore[assignment]
    if not holds:
        where = f": {_name(dag, int(nodes[0]))}" if len(nodes) else ""
        raise DagError(what + where)


def _name(dag: Dag, node: int) -> str:
    row = dag.nodes.take(np.asarray([node]))
    kind, phase = NodeKind(int(row.kind[0])).name.lower(), Phase(int(row.phase[0])).name
    return f"node {node} ({kind} {phase}, chunk {row.chunk[0]}, microbatch {row.microbatch[0]}, stage {row.stage[0]})"


def _ranges(dag: Dag) -> None:
    nodes, edges = dag.nodes, dag.edges
    for name, (dtype, _) in NODE_COLUMNS.items():
        column = getattr(nodes, name)
        _demand(
            column.shape == (len(nodes),) and column.dtype == dtype, f"column {name} has a wrong shape or type", dag
        )
    limits = {
        "kind": (0, len(NodeKind)), "phase": (0, len(Phase)), "chunk": (-1, len(dag.chunks)),
        "microbatch": (-1, max(dag.microbatches, 0)), "stage": (-1, len(dag) + 1), "group": (-1, len(dag.groups)),
        "stream": (0, len(dag.streams)), "collective": (0, len(Collective)), "axis": (0, len(Axis)),
        "bucket": (-1, len(dag.buckets)), "splits": (1, 2**31), "state": (0, len(dag.states)),
        "policy": (0, Policy.FULL_INNER + 1),
    }  # fmt: skip
    for name, (low, high) in limits.items():
        column = getattr(nodes, name)
        bad = np.flatnonzero((column < low) | (column >= high))
        _demand(not len(bad), f"{name} is not in {low} to {high - 1}", dag, bad)
    bad = np.flatnonzero(~(np.isfinite(nodes.payload) & (nodes.payload >= 0)))
    _demand(not len(bad), "payload is negative or not finite", dag, bad)
    for name in ("src", "dst"):
        column = getattr(edges, name)
        _demand(((column >= 0) & (column < len(dag))).all(), f"an edge's {name} is not a node", dag)
    _demand(((edges.role >= 0) & (edges.role < len(Role))).all(), "an edge has no known role", dag)
    _demand((edges.payload >= 0).all(), "an edge has a negative payload", dag)
    loops = edges.src[edges.src == edges.dst]
    _demand(not len(loops), "an edge joins a node to itself", dag, loops)


def _tables(dag: Dag) -> None:
    sizes = {len(group) for group in dag.groups}
    ranks = [rank for group in dag.groups for rank in group]
    _demand(len(sizes) <= 1 and 0 not in sizes, "groups have different sizes, or none", dag)
    _demand(
        len(set(ranks)) == len(ranks) and min(ranks, default=0) >= 0, "groups overlap, or hold a negative rank", dag
    )
    _demand(len(set(dag.states)) == len(dag.states), "a shard state is there twice", dag)
    for bucket in dag.buckets:
        chunks = [chunk for chunk, numel in bucket.parts if numel >= 0]
        _demand(chunks and len(chunks) == len(bucket.parts), "a bucket holds nothing, or less", dag)
        _demand(min(chunks) >= 0 and max(chunks) < len(dag.chunks), "a bucket holds an unknown chunk", dag)
        _demand(0 <= bucket.state < len(dag.states) and bucket.ranks >= 1, "a bucket's state or ranks are wrong", dag)
        rows = len(set(bucket.rows))
        _demand(rows == len(bucket.rows) and all(0 <= g < len(dag.groups) for g in bucket.rows), "a bucket's rows", dag)
    _demand(set(dag.ordered) <= set(range(len(dag.groups))), "an ordered row does not exist", dag)
    _demand(len(set(dag.ordered)) == len(dag.ordered), "a row is ordered twice", dag)


def _compute(dag: Dag) -> None:
    nodes, mask = dag.nodes, dag.compute
    index = np.flatnonzero(mask)
    _demand((nodes.chunk[index] >= 0).all(), "compute without a chunk", dag, index)
    _demand((nodes.phase[index] < Phase.NONE).all(), "compute without a phase", dag, index)
    _demand(
        ((nodes.microbatch[index] >= 0) == bool(dag.microbatches)).all(), "compute without its microbatch", dag, index
    )
    table = compute_table(dag)
    _demand((table >= 0).sum() == len(index), "compute is not unique by (phase, chunk, microbatch)", dag)
    has = table >= 0
    _demand(has[Phase.F].all(), "a forward is missing", dag)
    whole, halves = has[Phase.B], has[Phase.BI] & has[Phase.BW]
    either = has[Phase.BI] | has[Phase.BW]
    _demand((whole ^ halves).all() and (halves == either).all(), "a chunk has not B, or BI and BW", dag)
    stage = nodes.stage[index]
    by_chunk = np.full(len(dag.chunks), -2, np.int32)
    by_chunk[nodes.chunk[index]] = stage
    bad = index[by_chunk[nodes.chunk[index]] != stage]
    _demand(not len(bad), "phases of a chunk are of different stages", dag, bad)
    comm = np.flatnonzero(nodes.kind == NodeKind.COLLECTIVE)
    none = comm[nodes.collective[comm] == Collective.NONE]
    _demand(not len(none), "a collective of no kind", dag, none)
    other = np.flatnonzero(
        (nodes.collective != Collective.NONE) & ~np.isin(nodes.kind, (NodeKind.COLLECTIVE, NodeKind.NORM))
    )
    _demand(not len(other), "a collective's kind on another node", dag, other)


def _edges(dag: Dag) -> None:
    nodes, edges = dag.nodes, dag.edges
    for role, (kinds, phases, to_kinds, to_phases) in _ENDS.items():
        mine = edges.role == role
        src, dst = edges.src[mine], edges.dst[mine]
        ok = np.isin(nodes.kind[src], kinds) & np.isin(nodes.phase[src], phases)
        ok &= np.isin(nodes.kind[dst], to_kinds) & np.isin(nodes.phase[dst], to_phases)
        bad = src[~ok]
        _demand(not len(bad), f"an edge of role {role.name} joins what it should not", dag, bad)
        if role not in (Role.REDUCTION, Role.PARAMETER, Role.TEMPORAL):
            bad = src[nodes.microbatch[src] != nodes.microbatch[dst]]
            _demand(not len(bad), f"an edge of role {role.name} joins two microbatches", dag, bad)
    if bool((nodes.group[dag.compute] >= 0).all()) and len(dag.groups):
        near = edges.role != Role.MESSAGE
        bad = edges.src[near & (nodes.group[edges.src] != nodes.group[edges.dst])]
        _demand(not len(bad), "an edge that is no message crosses rows", dag, bad)


def _messages(dag: Dag) -> None:
    nodes, edges = dag.nodes, dag.edges
    mine = edges.role == Role.MESSAGE
    src, dst = edges.src[mine], edges.dst[mine]
    for kind, ends in ((NodeKind.SEND, src), (NodeKind.RECV, dst)):
        count = np.bincount(ends, minlength=len(dag))
        bad = np.flatnonzero(count != (nodes.kind == kind))
        _demand(not len(bad), f"a {kind.name.lower()} has not one partner", dag, bad)
    same = (nodes.phase[src] == nodes.phase[dst]) & (nodes.payload[src] == nodes.payload[dst])
    _demand(same.all(), "a message's ends disagree", dag, src[~same])
    _demand((nodes.group[src] != nodes.group[dst]).all(), "a message stays on its row", dag, src)


def _closed(dag: Dag) -> None:
    """Where there are updates: one for each stage on each of its rows, that every weight gradient there reaches."""
    nodes, edges = dag.nodes, dag.edges
    update = np.flatnonzero(nodes.kind == NodeKind.UPDATE)
    if not len(update):
        return
    key = nodes.stage.astype(np.int64) * (len(dag.groups) + 1) + nodes.group
    weight: Mask = dag.compute & np.isin(nodes.phase, (Phase.B, Phase.BW))
    _demand(len(np.unique(key[update])) == len(update), "a stage is updated twice on a row", dag, update)
    _demand(np.isin(key[weight], key[update]).all(), "a stage is never updated", dag, np.flatnonzero(weight))
    into = (edges.role == Role.REDUCTION) & (nodes.kind[edges.dst] == NodeKind.UPDATE)
    reached = edges.src[into & (key[edges.src] == key[edges.dst])]
    bad = np.setdiff1d(np.flatnonzero(weight), reached)
    _demand(not len(bad), "a weight gradient does not reach its update", dag, bad)
