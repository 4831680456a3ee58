"""Small rewrites that directives and passes are made of. All append nodes; none renumbers them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from piper_core.errors import DirectiveError
from piper_core.ir.dag import Dag, Edges, Ints, Mask, Nodes, among
from piper_core.ir.filter import Filter
from piper_core.ir.shard_state import Ranks, ShardState
from piper_core.names import NodeKind, Phase, Role


def append(dag: Dag, nodes: Nodes | None, edges: Edges | None) -> Dag:
    """Return the DAG with nodes and edges added at the end."""
    return replace(
        dag,
        nodes=dag.nodes if nodes is None else Nodes.concat([dag.nodes, nodes]),
        edges=dag.edges if edges is None else Edges.concat([dag.edges, edges]),
    )


def compute_table(dag: Dag) -> Ints:
    """Return the node index of each (phase, chunk, microbatch), -1 where there is none.

    Shape (5, chunks, max(1, microbatches)). Compute nodes are unique by that key.
    """
    table = np.full((5, len(dag.chunks), max(1, dag.microbatches)), -1, np.int32)
    index = np.flatnonzero(dag.compute)
    nodes = dag.nodes
    table[nodes.phase[index], nodes.chunk[index], np.maximum(nodes.microbatch[index], 0)] = index
    return table


def distinct(values: Ints) -> Ints:
    """Return the values that occur, sorted: five times as quick as ``np.unique``, which hashes them first."""
    ordered = np.sort(values)
    new = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=new[1:])
    return np.asarray(ordered[new])


def distinct_pairs(a: Ints, b: Ints) -> list[tuple[int, int]]:
    """Return the pairs (a[i], b[i]) that occur, sorted; all at least -1."""
    width = int(b.max(initial=0)) + 2
    found = distinct((a.astype(np.int64) + 1) * width + b + 1)
    return [(pair // width - 1, pair % width - 1) for pair in found.tolist()]


def splice(dag: Dag, anchors: Ints, nodes: Nodes, *, before: bool) -> Dag:
    """Put ``nodes[i]`` on every activation and gradient edge into (or out of) ``anchors[i]``, and on stash edges into
    it: what a BI leaves for its BW does not go through the collectives that its own gradient goes through.

    Rewrite::

        u -> v   becomes   u -> new -> v    (before v, or after u)
    """
    n = len(dag)
    new_of = np.full(n, -1, np.int32)
    new_of[anchors] = n + np.arange(len(anchors))
    edges = dag.edges
    ends = edges.dst if before else edges.src
    roles = (Role.ACTIVATION, Role.GRADIENT, Role.STASH) if before else (Role.ACTIVATION, Role.GRADIENT)
    moved = (new_of[ends] >= 0) & among(edges.role, roles)
    redirected = np.where(moved, new_of[ends], ends).astype(np.int32)
    backward = among(dag.nodes.phase[anchors], (Phase.B, Phase.BI, Phase.BW))
    role = np.where(backward, int(Role.GRADIENT), int(Role.ACTIVATION))
    fresh = new_of[anchors]
    link = Edges.make(fresh, anchors, role) if before else Edges.make(anchors, fresh, role)
    kept = replace(edges, dst=redirected) if before else replace(edges, src=redirected)
    return replace(dag, nodes=Nodes.concat([dag.nodes, nodes]), edges=Edges.concat([kept, link]))


def update_states(dag: Dag, index: Ints, change: Callable[[ShardState, Ranks], ShardState]) -> Dag:
    """Return the DAG with ``change(state, row ranks)`` applied to the shard state of the nodes at ``index``."""
    states = list(dag.states)
    known = {state: i for i, state in enumerate(states)}
    nodes = dag.nodes
    key = nodes.state[index].astype(np.int64) * (len(dag.groups) + 1) + nodes.group[index] + 1
    unique, inverse = np.unique(key, return_inverse=True)
    fresh = np.empty(len(unique), np.int32)
    for i, value in enumerate(unique.tolist()):
        state, group = divmod(value, len(dag.groups) + 1)
        row = dag.groups[group - 1] if group else ()
        new = change(dag.states[state], row)
        fresh[i] = known.setdefault(new, len(states))
        if fresh[i] == len(states):
            states.append(new)
    column = nodes.state.copy()
    column[index] = fresh[inverse]
    return replace(dag, nodes=nodes.with_(state=column), states=tuple(states))


def rows(dag: Dag) -> tuple[int, ...]:
    """Return the group indices of the plan's rows, ordered by their ranks."""
    return tuple(sorted(range(len(dag.groups)), key=lambda g: dag.groups[g]))


def comms_of(dag: Dag) -> Ints:
    """Return the indices of collectives that shard directives put around compute."""
    return np.flatnonzero((dag.nodes.kind == NodeKind.COLLECTIVE) & (dag.nodes.bucket < 0) & (dag.nodes.chunk >= 0))


class Growth:
    """Nodes and edges being added to a DAG; joined to it once, by :meth:`finish`."""

    def __init__(self, dag: Dag) -> None:
        self.dag, self.size = dag, len(dag)
        self._nodes: list[tuple[int, Mapping[str, Any]]] = []
        self._edges: list[Edges] = []

    def add(self, n: int, **columns: Any) -> Ints:
        """Add ``n`` nodes with the default of every column that is not given; return their indices."""
        index = self.size + np.arange(n, dtype=np.int32)
        self.size += n
        self._nodes.append((n, columns))
        return index

    def link(self, src: Ints, dst: Ints, role: int) -> None:
        """Add edges of one role between two equally long arrays of node indices."""
        self._edges.append(Edges.make(src, dst, int(role)))

    def finish(self) -> Dag:
        """Return the DAG with everything added."""
        nodes = Nodes.concat([self.dag.nodes, Nodes.joined(self._nodes)])
        edges = Edges.concat([self.dag.edges, *self._edges])
        return replace(self.dag, nodes=nodes, edges=edges)


def attached(dag: Dag, mask: Mask) -> Ints:
    """Return the compute nodes in ``mask`` and the communication nodes of the same (chunk, microbatch).

    Collectives of a bucket are not among them.
    """
    nodes = dag.nodes
    width = max(1, dag.microbatches) + 1
    key = nodes.chunk.astype(np.int64) * width + nodes.microbatch + 1
    wanted = np.zeros((len(dag.chunks) + 1) * width, np.bool_)
    wanted[key[mask]] = True
    return np.flatnonzero(wanted[key] & (nodes.chunk >= 0) & (nodes.bucket < 0)).astype(np.int32)


def whole_chunks(filter_: Filter, dag: Dag, op: str) -> Mask:
    """Return the compute nodes that a filter selects for an op that treats all phases of a chunk alike.

    Raises:
        DirectiveError: the filter names PASS or COMM, or matches nothing.
    """
    for tag, _ in filter_.items:
        if tag in ("PASS", "COMM"):
            raise DirectiveError(f"{op} filter names {tag}", expected="tags of whole chunks", hint=f"drop {tag}")
    return filter_.select(dag)
