"""Seconds of every node of a compiled DAG: each distinct piece of work is asked of the cost model once.

Priced are compute, collectives, messages and updates, each alone on its rank group; a group costs what its slowest
member costs. Not priced: gradient clipping's pass over the gradients, data loading, Python between actions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from piper_core.ir.dag import Bucket, Dag, Floats, Ints, Policy
from piper_core.ir.shard_state import Groups
from piper_core.names import Axis, Collective, NodeKind, Phase, Recompute, Region, Role
from piper_core.passes.gradient_sync import GRAD_BYTES, bucket_ranks, make_buckets
from search.cost.base import CostModel
from search.cost.software import OWN, REDUCES, Software

_Price: TypeAlias = Callable[[int], float]
_TOLD_APART = (Region.ATTENTION, Region.MLP, Region.HEAD, Region.EMBED)
"""Regions whose tensor-parallel collectives training programs treat in ways of their own."""


def node_seconds(dag: Dag, cost: CostModel) -> Floats:
    """Return the seconds of each node of a compiled DAG, shape (n,).

    Both ends of a message, and all members of a collective, carry its whole duration.
    """
    return _Pricer(dag, cost).run()


def buckets_of(dag: Dag) -> tuple[Bucket, ...]:
    """Return the buckets of a compiled DAG, made up where no directive replicates anything."""
    return dag.buckets or tuple(bucket for bucket, _ in make_buckets(dag))


def owned(dag: Dag, bucket: Bucket, software: Software = OWN) -> float:
    """Return the elements of ``bucket`` that one rank updates: all of them, or its share under ZeRO-1 and higher."""
    return bucket.numel / software.owners(bucket.ranks, dag.states[bucket.state].zero_stage)


class _Pricer:
    """One pricing: node columns of one DAG against one cost model."""

    def __init__(self, dag: Dag, cost: CostModel) -> None:
        self.dag, self.cost, self.nodes = dag, cost, dag.nodes
        self.sequences, self.bytes = dag.sequences(), dag.nbytes()
        self.degrees = [(s.tensor_degree, s.sequence, s.context_degree, s.expert_degree) for s in dag.states]
        self.buckets = buckets_of(dag)
        self.of_bucket: dict[tuple[int, ...], Groups] = {}

    def run(self) -> Floats:
        nodes = self.nodes
        seconds = np.zeros(len(nodes))
        size = np.searchsorted(np.unique(nodes.payload), nodes.payload)
        collective = nodes.kind == NodeKind.COLLECTIVE
        tie = collective & (nodes.axis == Axis.TIE)
        bucket = collective & (nodes.bucket >= 0) & ~tie
        inner = collective & ~bucket & ~tie
        for mask, columns, price in (
            (self.dag.compute, (nodes.chunk, nodes.phase, nodes.splits, nodes.state, nodes.policy), self._compute),
            (
                inner,
                (nodes.collective, nodes.axis, nodes.splits, nodes.state, size, self._region(), nodes.phase),
                self._inner,
            ),
            (bucket, (nodes.bucket, nodes.collective, size), self._bucket),
            (tie, (np.arange(len(nodes)),), self._tie),
            (nodes.kind == NodeKind.NORM, (nodes.kind, size), self._norm),
            (nodes.kind == NodeKind.UPDATE, (nodes.stage,), self._update),
        ):
            index = np.flatnonzero(mask)
            if len(index):
                seconds[index] = _once(index, columns, price)
        self._messages(seconds, size)
        return seconds

    def _compute(self, i: int) -> float:
        nodes = self.nodes
        recompute = Recompute.SELECTIVE if nodes.policy[i] == Policy.SELECTIVE else Recompute.FULL
        tensor, sequence, context, expert = self.degrees[nodes.state[i]]
        return self.cost.compute_s(
            self.dag.chunks[nodes.chunk[i]],
            Phase(int(nodes.phase[i])),
            float(self.sequences[i]),
            tensor,
            sequence,
            context,
            expert,
            recompute,
        )

    def _inner(self, i: int) -> float:
        state, axis = self.dag.states[self.nodes.state[i]], Axis(int(self.nodes.axis[i]))
        match axis:
            case Axis.TENSOR | Axis.SEQUENCE:
                groups = state.tensor
            case Axis.EXPERT:
                groups = state.expert
            case Axis.CONTEXT:
                groups = state.context
            case _:
                raise AssertionError(f"a collective over {axis.name} without a bucket")
        once = self._slowest(i, groups)
        if axis not in (Axis.TENSOR, Axis.SEQUENCE):
            return once
        chunk, phase = self.dag.chunks[self.nodes.chunk[i]], Phase(int(self.nodes.phase[i]))
        kind, software = Collective(int(self.nodes.collective[i])), self.cost.software
        if software.gathers_loss(chunk.region, phase, kind):
            logits = chunk.stash.sharded * float(self.sequences[i]) / state.context_degree
            return max((self.cost.collective_s(Collective.ALL_GATHER, logits, ranks) for ranks in groups), default=0.0)
        return once * software.exposed(chunk.region, phase, kind)

    def _region(self) -> Ints:
        """Return which of ``_TOLD_APART`` each node is of, or their number, shape (n,)."""
        places = {region: i for i, region in enumerate(_TOLD_APART)}
        place = np.asarray([places.get(chunk.region, len(places)) for chunk in self.dag.chunks], np.int32)
        return np.asarray(place[self.nodes.chunk])

    def _bucket(self, i: int) -> float:
        bucket = self.dag.buckets[self.nodes.bucket[i]]
        alone = len(bucket.rows) == 1
        key = (bucket.state, int(bucket.expert), -1 if alone else bucket.parts[0][0], *bucket.rows)
        if key not in self.of_bucket:
            self.of_bucket[key] = bucket_ranks(self.dag, bucket)
        groups, software = self.of_bucket[key], self.cost.software
        kind, size = Collective(int(self.nodes.collective[i])), float(self.bytes[i])
        zero = self.dag.states[bucket.state].zero_stage
        if zero < 2 and kind in REDUCES:
            size *= software.gradient_bytes / GRAD_BYTES
        if zero == 1 and software.shard_group:  # gradients meet everywhere, parameters come from the neighbours
            if kind is Collective.REDUCE_SCATTER:
                kind = Collective.ALL_REDUCE
            else:
                groups = tuple(ranks[: software.shard_group] for ranks in groups)
        return self._met(max((self.cost.collective_s(kind, size, ranks) for ranks in groups), default=0.0))

    def _tie(self, i: int) -> float:
        """All copies of a tied parameter, at equal positions of the rows that hold one."""
        dag, nodes = self.dag, self.nodes
        names = {p.tie for p in dag.chunks[nodes.chunk[i]].parameters if p.tie}
        same = [
            j for j in np.flatnonzero(nodes.axis == Axis.TIE).tolist()
            if names & {p.tie for p in dag.chunks[nodes.chunk[j]].parameters}
        ]  # fmt: skip
        rows = sorted({dag.groups[nodes.group[j]] for j in same})
        return self._met(self._slowest(i, tuple(zip(*rows, strict=True))))

    def _norm(self, i: int) -> float:
        return self._met(self._slowest(i, (tuple(sorted(rank for group in self.dag.groups for rank in group)),)))

    def _met(self, seconds: float) -> float:
        """Return what a collective outside chunks takes, of which ``seconds`` are its own."""
        return seconds + self.cost.meeting_s if seconds else 0.0

    def _slowest(self, i: int, groups: Groups) -> float:
        kind, size = Collective(int(self.nodes.collective[i])), float(self.bytes[i])
        return max((self.cost.collective_s(kind, size, ranks) for ranks in groups), default=0.0)

    def _update(self, i: int) -> float:
        stage = int(self.nodes.stage[i])
        return self.cost.update_s(sum(owned(self.dag, b, self.cost.software) for b in self.buckets if b.stage == stage))

    def _messages(self, seconds: Floats, size: Ints) -> None:
        """Price each message by its sender; its receiver lasts as long."""
        dag, edges, nodes = self.dag, self.dag.edges, self.nodes
        message = np.flatnonzero(edges.role == Role.MESSAGE)
        if not len(message):
            return
        sends, recvs = edges.src[message], edges.dst[message]
        peer = np.full(len(nodes), -1, np.int32)
        peer[sends] = nodes.group[recvs]

        def price(i: int) -> float:
            return self.cost.send_s(float(self.bytes[i]), dag.groups[nodes.group[i]], dag.groups[peer[i]])

        seconds[sends] = _once(sends, (nodes.group, peer, nodes.splits, nodes.state, size), price)
        seconds[recvs] = seconds[sends]


def _once(index: Ints, columns: Sequence[Ints], price: _Price) -> Floats:
    """Return the price of each node at ``index``, asking once for each distinct combination of ``columns``."""
    key: Any = np.zeros(len(index), np.int64)
    span = 1
    for column in columns:
        values = column[index].astype(np.int64)
        low, high = int(values.min()), int(values.max())
        key = key * (high - low + 1) + (values - low)
        span *= high - low + 1
    if span > 8 * len(index) + 65536:  # too wide for a table
        distinct, key = np.unique(key, return_inverse=True)
        span = len(distinct)
    representative = np.full(span, -1, np.int64)
    representative[key] = index
    used = np.flatnonzero(representative >= 0)
    table = np.zeros(span)
    table[used] = [price(i) for i in representative[used].tolist()]
    return np.asarray(table[key])
