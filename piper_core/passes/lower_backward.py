"""Split whole backwards into input and weight gradients where a schedule moves them apart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from piper_core.ir.dag import Dag, Edges, Mask, Nodes
from piper_core.names import NodeKind, Phase, Role


def lower_backward(dag: Dag, mask: Mask) -> Dag:
    """Lower every B node in ``mask`` (n,) to BI, and append its BW.

    Rewrite::

        F -saved-> B    becomes    F -saved-> BI -stash-> BW,  F -saved-> BW

    cost(B) = cost(BI) + cost(BW); the gradient flows out of BI (arXiv 2401.10241, section 2).
    """
    nodes = dag.nodes
    index = np.flatnonzero(mask & (nodes.kind == NodeKind.COMPUTE) & (nodes.phase == Phase.B))
    if not len(index):
        return dag
    phase = nodes.phase.copy()
    phase[index] = Phase.BI
    fresh = len(nodes) + np.arange(len(index))
    new_of = np.full(len(nodes), -1, np.int32)
    new_of[index] = fresh
    edges = dag.edges
    saved = (edges.role == Role.SAVED) & (new_of[edges.dst] >= 0)
    weight = nodes.take(index).with_(phase=int(Phase.BW))
    return replace(
        dag,
        nodes=Nodes.concat([nodes.with_(phase=phase), weight]),
        edges=Edges.concat(
            [
                edges,
                Edges.make(index, fresh, Role.STASH),
                Edges.make(edges.src[saved], new_of[edges.dst[saved]], Role.SAVED),
            ]
        ),
    )
