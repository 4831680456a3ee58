"""Insert the point-to-point messages that a placement makes necessary."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from piper_core.ir.dag import Dag, Edges, Nodes, among
from piper_core.names import NodeKind, Phase, Role


def send_recv(dag: Dag) -> Dag:
    """Put a Send and a Recv on every activation or gradient edge between different rank groups.

    Rewrite::

        u -> v   becomes   u -> Send =message=> Recv -> v

    One message serves all consumers of the same tensor on the same group. Ranks pair by position.
    """
    nodes, edges = dag.nodes, dag.edges
    comm = (nodes.kind == NodeKind.SEND) | (nodes.kind == NodeKind.RECV)
    crossing = np.flatnonzero(
        among(edges.role, (Role.ACTIVATION, Role.GRADIENT))
        & (nodes.group[edges.src] != nodes.group[edges.dst])
        & ~comm[edges.src]
        & ~comm[edges.dst]
    )
    if not len(crossing):
        return dag
    src, dst = edges.src[crossing], edges.dst[crossing]
    key = src.astype(np.int64) * (len(dag.groups) + 1) + nodes.group[dst]
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    k, n = len(first), len(nodes)
    sends, recvs = n + np.arange(k), n + k + np.arange(k)
    forward = edges.role[crossing] == Role.ACTIVATION
    phase = np.where(forward, int(Phase.F), int(Phase.B))[first]
    size = edges.payload[crossing][first]

    def message(ends: np.ndarray, kind: NodeKind) -> Nodes:
        return nodes.take(ends).with_(
            kind=int(kind), phase=phase, payload=size, scaled=True, collective=0, axis=0, policy=0
        )

    role = edges.role[crossing]
    kept = np.ones(len(edges), np.bool_)
    kept[crossing] = False
    return replace(
        dag,
        nodes=Nodes.concat([nodes, message(src[first], NodeKind.SEND), message(dst[first], NodeKind.RECV)]),
        edges=Edges.concat(
            [
                edges.take(kept),
                Edges.make(src[first], sends, role[first], size),
                Edges.make(sends, recvs, Role.MESSAGE, size),
                Edges.make(recvs[inverse], dst, role, edges.payload[crossing]),
            ]
        ),
    )
