"""Prices of nodes: each equal to what the cost model says of it alone, and asked once."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest

from piper_core.arch import model_chunks
from piper_core.arch.chunk import Chunk
from piper_core.arch.record import Architecture
from piper_core.ir.dag import Dag, Policy
from piper_core.names import Axis, Collective, NodeKind, Phase, Recompute, Role
from piper_core.passes.gradient_sync import bucket_ranks
from profiler.spec import load_cluster
from search.cost import CostModel, RooflineCost
from search.cost.price import buckets_of, node_seconds, owned
from search.cost.software import OWN
from tests.null.simulator.programs import build, random_case

COST = RooflineCost(load_cluster("p4de"))


class Counting:
    """A cost model that counts what it is asked."""

    overlap_slowdown = 1.0
    host_s = 0.0
    meeting_s = 0.0
    regular = True
    software = OWN

    def __init__(self, inner: CostModel) -> None:
        self.inner = inner
        self.asked: Counter[tuple[object, ...]] = Counter()

    def compute_s(
        self, chunk: Chunk, phase: Phase, sequences: float, tensor: int = 1, sequence_parallel: bool = False,
        context: int = 1, expert: int = 1, recompute: Recompute = Recompute.FULL,
    ) -> float:  # fmt: skip
        key = (chunk.name, phase, sequences, tensor, sequence_parallel, context, expert, recompute)
        self.asked["compute", key] += 1
        return self.inner.compute_s(chunk, phase, sequences, tensor, sequence_parallel, context, expert, recompute)

    def collective_s(self, kind: Collective, bytes: float, ranks: tuple[int, ...]) -> float:
        return self.inner.collective_s(kind, bytes, ranks)

    def send_s(self, bytes: float, sources: tuple[int, ...], destinations: tuple[int, ...]) -> float:
        self.asked["send", bytes, sources, destinations] += 1
        return self.inner.send_s(bytes, sources, destinations)

    def update_s(self, parameters: float) -> float:
        return self.inner.update_s(parameters)


def one_by_one(dag: Dag) -> list[float]:
    """Price every node on its own, as the module's text says."""
    nodes, size, sequences = dag.nodes, dag.nbytes(), dag.sequences()
    mate = {int(a): int(b) for a, b, r in zip(dag.edges.src, dag.edges.dst, dag.edges.role, strict=True)
            if r == Role.MESSAGE}  # fmt: skip
    sender = {b: a for a, b in mate.items()}
    found = []
    for i in range(len(dag)):
        state, kind = dag.states[nodes.state[i]], NodeKind(int(nodes.kind[i]))
        if kind is NodeKind.COMPUTE:
            policy = Recompute.SELECTIVE if nodes.policy[i] == Policy.SELECTIVE else Recompute.FULL
            chunk = dag.chunks[nodes.chunk[i]]
            degrees = (state.tensor_degree, state.sequence, state.context_degree, state.expert_degree)
            found.append(COST.compute_s(chunk, Phase(int(nodes.phase[i])), sequences[i], *degrees, policy))
        elif kind in (NodeKind.SEND, NodeKind.RECV):
            a = i if kind is NodeKind.SEND else sender[i]
            groups = dag.groups[nodes.group[a]], dag.groups[nodes.group[mate[a]]]
            found.append(COST.send_s(size[a], *groups))
        elif kind is NodeKind.UPDATE:
            mine = [b for b in buckets_of(dag) if b.stage == nodes.stage[i]]
            found.append(COST.update_s(sum(owned(dag, b) for b in mine)))
        else:
            axis = Axis(int(nodes.axis[i]))
            groups = {
                Axis.TENSOR: state.tensor, Axis.SEQUENCE: state.tensor, Axis.EXPERT: state.expert,
                Axis.CONTEXT: state.context, Axis.NORM: (tuple(sorted(r for g in dag.groups for r in g)),),
            }.get(axis) or bucket_ranks(dag, dag.buckets[nodes.bucket[i]])  # fmt: skip
            collective, phase = Collective(int(nodes.collective[i])), Phase(int(nodes.phase[i]))
            tensor = axis in (Axis.TENSOR, Axis.SEQUENCE)
            times = OWN.exposed(dag.chunks[nodes.chunk[i]].region, phase, collective) if tensor else 1.0
            found.append(times * max(COST.collective_s(collective, size[i], g) for g in groups))
    return found


@pytest.mark.parametrize("seed", range(6))
def test_every_node_costs_what_it_costs_alone(seed: int) -> None:
    rng = Random(seed)
    for _ in range(4):
        dag = random_case(rng).dag
        assert node_seconds(dag, COST).tolist() == one_by_one(dag)


def test_each_question_is_asked_once() -> None:
    dag = build("1f1b", 4, 16, dp=2, tp=2, zero=3, recompute="full", global_batch=64).dag
    counting = Counting(COST)
    node_seconds(dag, counting)
    assert max(counting.asked.values()) == 1
    assert sum(counting.asked.values()) < len(dag) / 10


def test_a_smaller_batch_is_cheaper_and_a_message_smaller() -> None:
    small, large = (build("1f1b", 2, 4, dp=2, global_batch=batch).dag for batch in (64, 512))
    a, b = node_seconds(small, COST), node_seconds(large, COST)
    assert len(a) == len(b)
    assert (a <= b).all()
    assert a.sum() < b.sum()
    message = small.nodes.kind == NodeKind.SEND
    assert (a[message] < b[message]).all()


def test_zero_divides_the_update() -> None:
    seconds = []
    for zero in range(4):
        dag = build("1f1b", 2, 2, dp=4, zero=zero).dag
        seconds.append(node_seconds(dag, COST)[dag.nodes.kind == NodeKind.UPDATE].sum())
    assert seconds[1] == seconds[2] == seconds[3] == pytest.approx(seconds[0] / 4)


def test_a_tie_is_priced_over_the_rows_that_hold_it() -> None:
    tied = Architecture("tied", 4, 64, 256, 8, 8, 8, 256, tied=True)
    table = model_chunks(tied, 64)
    dag = tagged(table, 2)
    nodes = dag.nodes
    ties = np.flatnonzero(nodes.axis == Axis.TIE)
    assert len(ties) == 2
    want = COST.collective_s(Collective.ALL_REDUCE, float(nodes.payload[ties[0]]), (0, 2))
    assert node_seconds(dag, COST)[ties].tolist() == [want, want]


def tagged(table, stages: int) -> Dag:  # type: ignore[no-untyped-def]
    from dataclasses import replace

    layers = table.layers
    chunks = tuple(
        replace(c, tags=(*c.tags, ("PP", min(max(c.layer, 0), layers - 1) * stages // layers))) for c in table.chunks
    )
    return build("1f1b", stages, 2, model=replace(table, chunks=chunks), dp=2, zero=1).dag
