"""recompute: keep less of a forward, and run it again before the backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from piper_core.directives.base import Directive, Domain
from piper_core.directives.read import check_fields, read_filter
from piper_core.errors import DirectiveError
from piper_core.ir.dag import Dag, Edges, Ints, Mask, Nodes, Policy, among
from piper_core.ir.edit import compute_table, whole_chunks
from piper_core.ir.filter import Filter
from piper_core.names import Axis, Collective, NodeKind, Phase, Recompute, Region, Role

if TYPE_CHECKING:
    from piper_core.mesh import Mesh


@dataclass(frozen=True, slots=True)
class RecomputeEdit:
    """Compute nodes (mask over n) and what they keep."""

    mask: Mask
    policy: int


@dataclass(frozen=True, slots=True)
class RecomputeDirective(Directive[RecomputeEdit]):
    """Run (a part of) the matched chunks again before their backward, and keep only what that needs.

    Rewrite::

        F -saved-> B      becomes      F -input-> R -saved-> B

    ``full`` keeps the input of each run of recomputed chunks of a layer; ``selective`` runs the attention core
    again (arXiv 2205.05198, section 5). R communicates as F, and reuses F's routing. An R that no order names
    runs right before the backward of its layer.
    """

    op: ClassVar[str] = "recompute"
    filter: Filter
    policy: Recompute = Recompute.FULL

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> RecomputeDirective:
        check_fields(data, ("filter", "policy"))
        policy = data["policy"]
        if policy not in ("full", "selective"):
            raise DirectiveError(f"unknown policy {policy!r}"[:60], expected="full or selective")
        return cls(read_filter(data), Recompute(policy))

    def to_data(self) -> dict[str, Any]:
        return {"op": self.op, "filter": self.filter.to_data(), "policy": str(self.policy)}

    def check(self, dag: Dag, mesh: Mesh | None = None) -> RecomputeEdit:
        mask = whole_chunks(self.filter, dag, self.op)
        if self.policy is Recompute.SELECTIVE:
            attention = np.asarray([*(chunk.region is Region.ATTENTION for chunk in dag.chunks), False])
            mask &= attention[dag.nodes.chunk]
            if not mask.any():
                raise DirectiveError(
                    f"filter {self.filter} matches no attention", expected="attention for policy selective"
                )
        else:
            layered = np.asarray([*(chunk.region not in (Region.EMBED, Region.HEAD) for chunk in dag.chunks), False])
            mask &= layered[dag.nodes.chunk]
            if not mask.any():
                raise DirectiveError(f"filter {self.filter} matches no layer", expected="layers for policy full")
        if (dag.nodes.phase[mask] == Phase.R).any():
            raise DirectiveError(f"filter {self.filter} matches compute that is recomputed already")
        return RecomputeEdit(mask, Policy.OF[self.policy])

    @classmethod
    def rewrite(cls, dag: Dag, edits: Sequence[RecomputeEdit]) -> Dag:
        if not edits:
            return dag
        policy = dag.nodes.policy.copy()
        for edit in edits:
            if (policy[edit.mask] != Policy.NONE).any():
                raise DirectiveError("two recompute directives match the same compute", expected="each chunk once")
            policy[edit.mask] = edit.policy
        dag = replace(dag, nodes=dag.nodes.with_(policy=_inner(dag, policy)))
        return _repeat(dag)

    @classmethod
    def domain(cls, dag: Dag, mesh: Mesh | None = None) -> Domain:
        layers = dag.model.layers

        def draw(rng: Random) -> RecomputeDirective:
            low = rng.randrange(layers)
            chosen = Filter((("LAYER", f"{low}-{rng.randint(low, layers - 1)}"),))
            return cls(chosen, rng.choice([Recompute.FULL, Recompute.SELECTIVE]))

        return Domain({"filter": "layers", "policy": "full, selective (attention)"}, draw, dag, mesh)

    def neighbours(self, dag: Dag, mesh: Mesh | None = None) -> Iterator[RecomputeDirective]:
        """The other policy on the same layers."""
        other = Recompute.SELECTIVE if self.policy is Recompute.FULL else Recompute.FULL
        near = replace(self, policy=other)
        if near.legal(dag, mesh):
            yield near


def _inner(dag: Dag, policy: Ints) -> Ints:
    """Mark fully recomputed chunks whose every input comes from a fully recomputed chunk of their own layer."""
    table = compute_table(dag)[Phase.F]
    layer = dag.chunk_tag("LAYER")
    kept = np.ones(len(dag.chunks), np.bool_)
    full = (table >= 0).any(axis=1) & (policy[table[:, 0]] == Policy.FULL)
    sources: dict[int, list[int]] = {}
    for u, v, _ in dag.model.edges:
        sources.setdefault(v, []).append(u)
    group, stage = dag.nodes.group, dag.nodes.stage
    for v, before in sources.items():
        a = table[v, 0]
        kept[v] = not all(
            full[u] and layer[u] == layer[v] and group[table[u, 0]] == group[a] and stage[table[u, 0]] == stage[a]
            for u in before
        )
    inner = (policy == Policy.FULL) & ~np.append(kept, True)[dag.nodes.chunk]
    return np.where(inner, Policy.FULL_INNER, policy).astype(np.int32)


def _repeat(dag: Dag) -> Dag:
    """Append the R nodes, the collectives that they repeat, and their edges."""
    nodes, edges = dag.nodes, dag.edges
    n = len(nodes)
    recomputed = dag.compute & (nodes.phase == Phase.F) & (nodes.policy != Policy.NONE)
    table = compute_table(dag)[Phase.F]
    of_compute = np.where(nodes.chunk >= 0, table[nodes.chunk, np.maximum(nodes.microbatch, 0)], 0)
    comm = (nodes.kind == NodeKind.COLLECTIVE) & (nodes.phase == Phase.F) & (nodes.bucket < 0) & (nodes.chunk >= 0)
    comm &= recomputed[of_compute]
    comm &= (nodes.policy[of_compute] != Policy.SELECTIVE) | (nodes.axis == Axis.CONTEXT)
    index = np.flatnonzero(recomputed | comm)
    copy_of = np.full(n, -1, np.int32)
    copy_of[index] = n + np.arange(len(index))
    copies: Nodes = nodes.take(index).with_(phase=int(Phase.R), bucket=-1)
    layer = np.append(dag.chunk_tag("LAYER")[:-1], -9)[nodes.chunk]
    inside = (edges.role == Role.ACTIVATION) & (copy_of[edges.src] >= 0) & (copy_of[edges.dst] >= 0)
    inside &= layer[edges.src] == layer[edges.dst]
    selective = nodes.policy[of_compute] == Policy.SELECTIVE
    inside &= (~selective[edges.src] & ~selective[edges.dst]) | (of_compute[edges.src] == of_compute[edges.dst])
    src, dst = copy_of[edges.src[inside]], copy_of[edges.dst[inside]]
    fed = np.zeros(n + len(index), np.bool_)
    fed[dst] = True
    heads = index[~fed[copy_of[index]]]
    saved = (edges.role == Role.SAVED) & (copy_of[edges.src] >= 0) & dag.compute[edges.src]
    saved &= among(nodes.phase[edges.dst], (Phase.B, Phase.BI, Phase.BW))
    gathered = (edges.role == Role.PARAMETER) & (nodes.collective[edges.src] == Collective.ALL_GATHER)
    backward = among(nodes.phase[edges.dst], (Phase.B, Phase.BI)) & dag.compute[edges.dst]
    gathered &= backward & recomputed[of_compute[edges.dst]]
    made = [
        edges,
        Edges.make(src, dst, Role.ACTIVATION, edges.payload[inside]),
        Edges.make(of_compute[heads], copy_of[heads], Role.SAVED),
        Edges.make(copy_of[edges.src[saved]], edges.dst[saved], Role.SAVED),
        Edges.make(edges.src[gathered], copy_of[of_compute[edges.dst[gathered]]], Role.PARAMETER),
    ]
    return replace(dag, nodes=Nodes.concat([nodes, copies]), edges=Edges.concat(made))
