"""Laws of passes: the input is unchanged, what comes out is verified, and doing it again does nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from piper_core.arch.closed_form import model_chunks
from piper_core.arch.record import Architecture
from piper_core.errors import DirectiveError
from piper_core.ir.dag import Dag, Edges, training_dag
from piper_core.ir.verify import DagError, verify_dag
from piper_core.names import Axis, Collective, NodeKind, Phase, Role, Sync
from piper_core.passes.gradient_sync import bucket_ranks, gradient_sync
from piper_core.passes.lower_backward import lower_backward
from piper_core.passes.send_recv import send_recv
from piper_core.passes.update import close_step, with_row
from piper_core.program.program import Program
from tests.null.laws.ladder import BOTH_WAYS, MESH, PLACE, SPLIT, STAGE, ladder, snapshot

TIED = Architecture("tied", 4, 64, 256, 8, 8, 8, 256, tied=True)


def bare(dag: Dag) -> Dag:
    """Return a placement without its messages: stage s on row s."""
    return replace(dag, nodes=dag.nodes.with_(group=dag.nodes.stage), groups=((0, 1), (2, 3)))


def lowered(dag: Dag) -> Dag:
    return lower_backward(dag, dag.nodes.microbatch >= 1)


PASSES: dict[str, tuple[Callable[[Dag], Dag], str]] = {
    "lower_backward": (lowered, "split"),
    "send_recv": (lambda dag: send_recv(dag if dag.groups else bare(dag)), "split"),
    "send_recv of halves": (lambda dag: send_recv(dag if dag.groups else bare(lowered(dag))), "split"),
    "gradient_sync": (gradient_sync, "sharded"),
    "gradient_sync both ways": (gradient_sync, "placed both ways"),
    "close_step": (close_step, "placed"),
    "close_step of ZeRO-3": (close_step, "replicated"),
    "close_step of recompute": (close_step, "recomputed"),
    "with_row": (with_row, "staged"),
}


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("model", ["dense", "moe"])
@pytest.mark.parametrize("sync", list(Sync))
def test_laws(name: str, model: str, sync: Sync) -> None:
    step, where = PASSES[name]
    dag = replace(ladder(model)[where], sync=sync)
    before = snapshot(dag)
    out = step(dag)
    assert snapshot(dag) == before, "the input has changed"
    assert not out.equal(dag)
    verify_dag(out)
    assert out.equal(step(dag)), "a replay differs"
    assert step(out).equal(out), "it is not idempotent"


def test_lowering_nothing_is_nothing() -> None:
    dag = ladder("dense")["split"]
    assert lower_backward(dag, np.zeros(len(dag), np.bool_)) is dag


def closed(model: str, program: list[object], sync: Sync = Sync.GLOBAL_NORM) -> Dag:
    base = training_dag(model_chunks(TIED, 64), sync=sync) if model == "tied" else ladder(model)["base"]
    dag = Program.parse(program).apply(base, MESH)
    verify_dag(dag)
    return dag


def reductions(dag: Dag, axis: Axis) -> int:
    return int(((dag.nodes.kind == NodeKind.COLLECTIVE) & (dag.nodes.axis == axis)).sum())


def test_a_stage_on_two_rows_is_reduced_without_replicate() -> None:
    """Each row has the gradients of its own microbatches only."""
    dag = closed("dense", [STAGE, SPLIT, *BOTH_WAYS])
    assert reductions(dag, Axis.DATA) == 4
    assert [bucket.ranks for bucket in dag.buckets] == [2, 2]


def test_context_groups_are_reduced_without_replicate() -> None:
    shard = {"op": "shard", "filter": {}, "devices": [[0, 1, 2, 3], [4, 5, 6, 7]], "kind": "context"}
    dag = closed("dense", [STAGE, SPLIT, *PLACE, shard])
    assert reductions(dag, Axis.DATA) == 2
    assert {bucket.ranks for bucket in dag.buckets} == {4}


def test_experts_of_a_stage_on_two_rows_are_reduced_with_their_like() -> None:
    """The two ranks of either row that hold the first half of the experts, and those that hold the second."""
    shard = {"op": "shard", "filter": {"EP": "*"}, "devices": [[0, 1], [2, 3], [4, 5], [6, 7]]}
    dag = closed(
        "moe",
        [STAGE, SPLIT, *BOTH_WAYS, shard, {"op": "replicate", "filter": {}, "devices": [[0, 1, 2, 3], [4, 5, 6, 7]]}],
    )
    experts = [bucket for bucket in dag.buckets if bucket.expert]
    assert {bucket_ranks(dag, bucket) for bucket in experts} == {((0, 2, 4, 6), (1, 3, 5, 7))}
    assert {bucket.ranks for bucket in dag.buckets if not bucket.expert} == {8}


def test_nothing_is_reduced_where_each_rank_has_its_own() -> None:
    assert reductions(closed("dense", [STAGE, SPLIT, *PLACE]), Axis.DATA) == 0


@pytest.mark.parametrize("zero", [None, 0, 1, 2, 3])
def test_tied_parameters_are_summed_over_their_rows(zero: int | None) -> None:
    """Before the data reduction of the whole step, after those of each microbatch; without replicate as well."""
    flags = {"shard_optimizer": zero == 1, "shard_grads": (zero or 0) >= 2, "shard_params": zero == 3}
    replicate = {"op": "replicate", "filter": {}, "devices": [[0, 1, 2, 3], [4, 5, 6, 7]], **flags}
    dag = closed("tied", [STAGE, SPLIT, *PLACE, *([] if zero is None else [replicate])])
    nodes, edges = dag.nodes, dag.edges
    tie = np.flatnonzero(nodes.axis == Axis.TIE)
    assert len(tie) == 2
    data = (nodes.axis == Axis.DATA) & (nodes.collective != Collective.ALL_GATHER)
    before = {int(s) for s, d in zip(edges.src, edges.dst, strict=True) if d in tie and data[s]}
    after = {int(d) for s, d in zip(edges.src, edges.dst, strict=True) if s in tie and data[d]}
    assert bool(before) == (zero in (2, 3))
    assert bool(after) == (zero in (0, 1))


def test_a_stage_lies_on_one_row_for_each_microbatch() -> None:
    halves = [
        {"op": "place", "filter": {"LAYER": layers}, "devices": [row]} for row, layers in enumerate(("-1-1", "2-4"))
    ]
    halves[0]["filter"] = {"LAYER": [-1, 0, 1]}
    with pytest.raises(DirectiveError, match=r"stage 0 of microbatch 0 lies on \[0\] and on \[1\]"):
        closed("dense", [SPLIT, *halves])


# --- what the invariants refuse ---


def broken(dag: Dag, **columns: tuple[int, object]) -> Dag:
    """Return the DAG with one value of some columns replaced."""
    changed = {}
    for name, (node, value) in columns.items():
        column = getattr(dag.nodes, name).copy()
        column[node] = value
        changed[name] = column
    return replace(dag, nodes=dag.nodes.with_(**changed))


def first(dag: Dag, kind: NodeKind, phase: Phase | None = None) -> int:
    mask = dag.nodes.kind == kind
    return int(np.flatnonzero(mask if phase is None else mask & (dag.nodes.phase == phase))[0])


def without_edges(dag: Dag, role: Role) -> Dag:
    return replace(dag, edges=dag.edges.take(dag.edges.role != role))


def with_role(dag: Dag, old: Role, new: Role) -> Dag:
    role = dag.edges.role.copy()
    role[np.flatnonzero(role == old)[0]] = new
    return replace(dag, edges=replace(dag.edges, role=role))


def both_ways(dag: Dag) -> Dag:
    """Turn an activation inside a row round as well."""
    edges = dag.edges
    inside = np.isin(dag.nodes.kind, (NodeKind.COMPUTE, NodeKind.COLLECTIVE))
    near = inside[edges.src] & inside[edges.dst] & (edges.role == Role.ACTIVATION)
    some = edges.take(np.flatnonzero(near)[:1])
    return replace(dag, edges=Edges.concat([edges, replace(some, src=some.dst, dst=some.src)]))


REFUSED: dict[str, tuple[str, Callable[[Dag], Dag]]] = {
    "payload": ("payload is negative", lambda d: broken(d, payload=(0, -1.0))),
    "splits": ("splits is not in", lambda d: broken(d, splits=(0, 0))),
    "state": ("state is not in", lambda d: broken(d, state=(0, 99))),
    "group": ("group is not in", lambda d: broken(d, group=(0, 7))),
    "edge": ("not a node", lambda d: replace(d, edges=replace(d.edges, dst=d.edges.dst + len(d)))),
    "type": ("wrong shape or type", lambda d: replace(d, nodes=replace(d.nodes, kind=d.nodes.kind.astype(np.int64)))),
    "twice": ("not unique", lambda d: broken(d, microbatch=(first(d, NodeKind.COMPUTE), 1))),
    "both": ("has not B, or BI and BW", lambda d: broken(d, phase=(first(d, NodeKind.COMPUTE, Phase.BI), Phase.B))),
    "forward": ("a forward is missing", lambda d: broken(d, phase=(first(d, NodeKind.COMPUTE, Phase.F), Phase.R))),
    "stages": ("different stages", lambda d: broken(d, stage=(first(d, NodeKind.COMPUTE), 1))),
    "role": ("role GRADIENT joins", lambda d: with_role(d, Role.ACTIVATION, Role.GRADIENT)),
    "partner": ("has not one partner", lambda d: without_edges(d, Role.MESSAGE)),
    "crossing": ("crosses rows", lambda d: broken(d, group=(first(d, NodeKind.RECV), 0))),
    "sizes": ("different sizes", lambda d: replace(d, groups=(d.groups[0][:1], *d.groups[1:]))),
    "overlap": ("groups overlap", lambda d: replace(d, groups=(d.groups[0], d.groups[0]))),
    "update": ("does not reach its update", lambda d: replace(d, edges=d.edges.take(
        d.nodes.kind[d.edges.dst] != NodeKind.UPDATE))),
    "cycle": ("make a cycle", both_ways),
    "ordered": ("ordered twice", lambda d: replace(d, ordered=(0, 0))),
    "bucket": ("holds an unknown chunk", lambda d: replace(d, buckets=(replace(d.buckets[0], parts=((999, 1),)),) * 9)),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_invariants_refuse(name: str) -> None:
    what, harm = REFUSED[name]
    dag = ladder("dense")["ordered"]
    verify_dag(dag)
    with pytest.raises(DagError, match=what) as caught:
        verify_dag(harm(dag))
    assert "\n" not in str(caught.value)
