"""Insert parameter gathers and gradient reductions, bucket by bucket, for every ZeRO stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from piper_core.errors import DirectiveError
from piper_core.ir.dag import Bucket, Dag, Ints
from piper_core.ir.edit import Growth, compute_table, distinct
from piper_core.ir.shard_state import Groups, Replication, ShardState, reduction_groups
from piper_core.names import Axis, Collective, NodeKind, Phase, Role

GRAD_BYTES = 4
"""ZeRO-0/1 accumulate and reduce gradients in fp32; ZeRO-2/3 reduce each microbatch in compute dtype."""


def stage_rows(dag: Dag) -> dict[int, tuple[int, ...]]:
    """Return the groups that hold each stage (more than one under a bidirectional placement)."""
    index = np.flatnonzero(dag.compute)
    width = len(dag.groups) + 1
    pairs = distinct((dag.nodes.stage[index].astype(np.int64) + 1) * width + dag.nodes.group[index] + 1)
    held: dict[int, tuple[int, ...]] = {}
    for pair in pairs.tolist():
        stage, group = divmod(pair, width)
        held[stage - 1] = (*held.get(stage - 1, ()), group - 1)
    return held


def make_buckets(dag: Dag) -> list[tuple[Bucket, Replication]]:
    """Cut each stage's parameters into buckets, in model order.

    A bucket holds parameters of one stage that the same ranks reduce: dense ones and sharded experts never
    mix. It closes before it would exceed ``bucket_bytes`` in compute dtype (0: never); its id does not
    depend on the microbatch.
    """
    table = compute_table(dag)
    stage_of = np.full(len(dag.chunks), -1, np.int32)
    state_of = np.zeros(len(dag.chunks), np.int32)
    forward = table[Phase.F, :, 0]
    stage_of[:] = dag.nodes.stage[forward]
    state_of[:] = dag.nodes.state[forward]
    held = stage_rows(dag)
    found: list[tuple[Bucket, Replication]] = []
    for stage in sorted(held):
        ranks = tuple(dag.groups[g] for g in held[stage] if g >= 0)
        if not ranks:
            continue
        runs: dict[tuple[Replication, bool, Groups], list[tuple[int, int, int]]] = {}
        known: dict[tuple[int, bool], list[tuple[int, int, int]]] = {}  # runs by what is quicker to look up than groups
        for chunk in np.flatnonzero(stage_of == stage).tolist():
            index = int(state_of[chunk])
            state = dag.states[index] if len(ranks) == 1 else _over_rows(dag, chunk, dag.states[index])
            for parameter in dag.chunks[chunk].parameters:
                expert = parameter.expert and state.expert_degree > 1
                numel = parameter.numel
                numel //= state.tensor_degree if parameter.tensor else 1
                numel //= state.expert_degree if expert else 1
                key = index if len(ranks) == 1 else -1 - chunk, expert
                if key not in known:
                    groups = reduction_groups(state if expert else replace(state, expert=()), ranks)
                    known[key] = runs.setdefault((state.replication or Replication(()), expert, groups), [])
                known[key].append((chunk, numel, index))
        for (replication, expert, groups), parameters in runs.items():
            for parts, state_index in _cut(parameters, replication.bucket_bytes // dag.dtype_bytes):
                bucket = Bucket(stage, expert, parts, state_index, len(groups[0]), held[stage])
                found.append((bucket, replication))
    return found


def _over_rows(dag: Dag, chunk: int, state: ShardState) -> ShardState:
    """Return the state of a chunk that lies on several rows, with the expert and context groups of all of them."""
    found = distinct(dag.nodes.state[dag.compute & (dag.nodes.chunk == chunk)]).tolist()
    expert = dict.fromkeys(group for index in found for group in dag.states[index].expert)
    context = dict.fromkeys(group for index in found for group in dag.states[index].context)
    return replace(state, expert=tuple(expert), context=tuple(context))


def _cut(parameters: list[tuple[int, int, int]], limit: int) -> Iterator[tuple[tuple[tuple[int, int], ...], int]]:
    """Yield runs of (chunk, elements) of at most ``limit`` elements each, one parameter at least."""
    parts: dict[int, int] = {}
    total, state = 0, parameters[0][2]
    for chunk, numel, state_index in parameters:
        if parts and limit and total + numel > limit:
            yield tuple(parts.items()), state
            parts, total, state = {}, 0, state_index
        parts[chunk] = parts.get(chunk, 0) + numel
        total += numel
    yield tuple(parts.items()), state


def bucket_ranks(dag: Dag, bucket: Bucket) -> Groups:
    """Return the groups of ranks that hold the same shard of ``bucket``."""
    state = dag.states[bucket.state]
    state = state if len(bucket.rows) == 1 else _over_rows(dag, bucket.parts[0][0], state)
    view: ShardState = state if bucket.expert else replace(state, expert=())
    return reduction_groups(view, tuple(dag.groups[g] for g in bucket.rows))


def gradient_sync(dag: Dag) -> Dag:
    """Insert the collectives of every bucket that more than one rank holds.

    ========  ==================================================  ==============================
    ZeRO      parameters                                          gradients
    ========  ==================================================  ==============================
    0         whole                                               all_reduce after the last BW
    1         all_gather at the head of the step                  reduce_scatter after the last BW
    2         all_gather at the head of the step                  reduce_scatter per microbatch
    3         all_gather before F, and before B (or R, or BI)     reduce_scatter per microbatch
    ========  ==================================================  ==============================

    Raises:
        DirectiveError: ZeRO-2 or 3 on a stage that lives on two rows.
    """
    if dag.buckets:
        return dag
    made = make_buckets(dag)
    streams = list(dag.streams)
    for replication in (replication for bucket, replication in made if bucket.ranks > 1):
        for stream in (replication.reduce_stream, replication.gather_stream):
            if stream not in streams:
                streams.append(stream)
    dag = replace(dag, buckets=tuple(bucket for bucket, _ in made), streams=tuple(streams))
    growth, table = Growth(dag), compute_table(dag)
    for index, (bucket, replication) in enumerate(made):
        zero = replication.zero_stage
        if bucket.ranks == 1:
            continue
        if zero >= 2 and len(bucket.rows) > 1:
            raise DirectiveError(
                f"stage {bucket.stage} lives on {len(bucket.rows)} rows, where ZeRO-{zero} cannot reduce each "
                "microbatch",
                expected="ZeRO-0 or ZeRO-1",
                hint="drop shard_grads and shard_params",
            )
        sync = _Sync(growth, table, index, bucket, replication)
        sync.reduce(zero)
        if zero in (1, 2):
            sync.gather(Phase.F, each=False)
        elif zero == 3:
            sync.gather(Phase.F, each=True)
            sync.gather(Phase.B, each=True)
    return growth.finish()


@dataclass(frozen=True, slots=True)
class _Sync:
    """The communication of one bucket, being added to ``growth``; ``table`` is (phase, chunk, microbatch)."""

    growth: Growth
    table: Ints
    index: int
    bucket: Bucket
    replication: Replication

    def users(self, phase: Phase) -> Ints:
        """Return the compute nodes of the bucket's chunks in a phase, shape (parts, microbatches).

        B stands for the whole backward or BI, BW for the whole backward or BW: each has one or the other.
        """
        chunks = [chunk for chunk, _ in self.bucket.parts]
        found = self.table[phase, chunks]
        if phase is Phase.B:
            return np.where(found < 0, self.table[Phase.BI, chunks], found)
        if phase is Phase.BW:
            return np.where(found < 0, self.table[Phase.B, chunks], found)
        return found

    def nodes(
        self, n: int, kind: Collective, stream: str, group: Any, microbatch: Any, phase: Phase, size: float
    ) -> Ints:
        dag = self.growth.dag
        return self.growth.add(
            n,
            kind=int(NodeKind.COLLECTIVE),
            phase=int(phase),
            chunk=self.bucket.parts[0][0],
            microbatch=microbatch,
            stage=self.bucket.stage,
            group=group,
            stream=dag.streams.index(stream),
            collective=int(kind),
            axis=int(Axis.DATA),
            payload=size,
            bucket=self.index,
            state=self.bucket.state,
        )

    def reduce(self, zero: int) -> None:
        """Add one reduction a step (ZeRO-0/1; one node a row) or a microbatch (ZeRO-2/3)."""
        dag, users = self.growth.dag, self.users(Phase.BW)
        kind = Collective.REDUCE_SCATTER if zero else Collective.ALL_REDUCE
        stream = self.replication.reduce_stream
        if zero >= 2:
            m = users.shape[1]
            microbatch = dag.nodes.microbatch[users[0]]
            size = self.bucket.numel * dag.dtype_bytes
            made = self.nodes(m, kind, stream, dag.nodes.group[users[0]], microbatch, Phase.BW, size)
            self.growth.link(users.ravel(), np.tile(made, len(users)), Role.REDUCTION)
            return
        rows = np.asarray(self.bucket.rows, np.int32)
        made = self.nodes(len(rows), kind, stream, rows, -1, Phase.BW, self.bucket.numel * GRAD_BYTES)
        of_row = np.full(len(dag.groups) + 1, -1, np.int32)
        of_row[rows] = made
        self.growth.link(users.ravel(), of_row[dag.nodes.group[users.ravel()]], Role.REDUCTION)

    def gather(self, phase: Phase, *, each: bool) -> None:
        """Add the gathers of the parameters: one a row at the head of the step, or one a microbatch."""
        dag, users = self.growth.dag, self.users(phase)
        size, stream = self.bucket.numel * dag.dtype_bytes, self.replication.gather_stream
        if each:
            m = users.shape[1]
            first = users[0]
            made = self.nodes(
                m, Collective.ALL_GATHER, stream, dag.nodes.group[first], dag.nodes.microbatch[first], phase, size
            )
            self.growth.link(np.tile(made, len(users)), users.ravel(), Role.PARAMETER)
            return
        rows = np.asarray(self.bucket.rows, np.int32)
        made = self.nodes(len(rows), Collective.ALL_GATHER, stream, rows, -1, Phase.F, size)
        of_row = np.full(len(dag.groups) + 1, -1, np.int32)
        of_row[rows] = made
        self.growth.link(of_row[dag.nodes.group[users.ravel()]], users.ravel(), Role.PARAMETER)
