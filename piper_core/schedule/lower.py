"""From a compiled DAG to a plan: macro actions, streams, channels, and what waits for what."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from piper_core.ir.action import KIND_OF_PHASE, ActionKind
from piper_core.ir.dag import Dag, Floats, Ints
from piper_core.ir.edit import distinct
from piper_core.ir.edit import rows as rows_of
from piper_core.ir.macro import Macros, macros
from piper_core.names import Collective, NodeKind, Phase, Role
from piper_core.schedule.complete import compute_order
from piper_core.schedule.open import Opening, opening
from piper_core.schedule.plan import CODE, BucketUse, Plan, Reduction
from piper_core.schedule.streams import ChannelRule, assign_lines, assign_places, assign_streams
from piper_core.schedule.units import Units
from piper_core.schedule.waits import assign_waits

__all__ = ["ChannelRule", "Costs", "flop_costs", "lower"]


@dataclass(frozen=True, slots=True)
class Costs:
    """What the list scheduler should know, per node, shape (n,): ``seconds``; ``hold_bytes`` that an F keeps until
    its backward ends; per row ``limit_bytes`` (None: no limit) on what is held."""

    seconds: Floats
    hold_bytes: Floats | None = None
    limit_bytes: tuple[float, ...] | None = None
    effort: int = 0


def flop_costs(dag: Dag) -> Costs:
    """Return costs in proportion to FLOPs: what the list scheduler uses when nothing better is known."""
    nodes = dag.nodes
    table = np.zeros((6, len(dag.chunks) + 1))
    for i, chunk in enumerate(dag.chunks):
        back = chunk.backward_input.flops, chunk.backward_weight.flops
        table[:, i] = (chunk.forward.flops, sum(back), *back, chunk.forward.flops, 0.0)
    seconds = table[nodes.phase, nodes.chunk] * dag.compute / 1e12
    return Costs(np.maximum(seconds, 1e-9 * dag.compute), effort=1 if dag.compute.sum() < 20_000 else 0)


def lower(
    dag: Dag, costs: Costs | None = None, *, channels: ChannelRule = ChannelRule.FULL, look_ahead: int = 1
) -> Plan:
    """Return the plan of a compiled DAG.

    Rows whose order is partial are completed by the list scheduler (``Plan.derived``). A receive is posted at
    most ``look_ahead`` consumers ahead.

    Raises:
        DirectiveError: the given order is cyclic; InfeasibleError: a limit cannot be met.
    """
    found = macros(dag)
    order_of_rows = rows_of(dag)
    row_of_group = np.full(len(dag.groups) + 1, -1, np.int32)
    row_of_group[list(order_of_rows)] = np.arange(len(order_of_rows))
    position, derived = compute_order(dag, found, costs or flop_costs(dag), row_of_group)
    opened = opening(dag, found, position)
    units = Units(dag, found, row_of_group, opened)
    stream, table = assign_streams(units, channels)
    lines, line = assign_lines(units, channels)
    place = assign_places(units, channels)
    free_after, free_place, freed = _frees(units)
    # frees join the compute streams
    place = np.concatenate([place, free_place])
    stream = np.concatenate([stream, stream[free_after]])
    order = np.lexsort((np.arange(len(place)), place, stream))
    rank = np.empty(len(place), np.int32)
    rank[order] = np.arange(len(place))
    columns = [
        np.concatenate([c, f])[order].astype(np.int32)
        for c, f in zip(_columns(units, line), _free_columns(units, freed), strict=True)
    ]
    stream = stream[order].astype(np.int32)
    wait_start, waits = assign_waits(units, stream, rank, look_ahead)
    return Plan(
        rows=tuple(dag.groups[g] for g in order_of_rows),
        microbatches=max(1, dag.microbatches),
        inputs=_inputs(dag),
        streams=tuple(table),
        lines=tuple(lines),
        labels=opened.labels,
        buckets=_bucket_uses(dag, opened),
        start=np.searchsorted(stream, np.arange(len(table) + 1)).astype(np.int32),
        kind=columns[0],
        stage=columns[1],
        microbatch=columns[2],
        bucket=columns[3],
        label=columns[4],
        line=columns[5],
        wait_start=wait_start,
        waits=waits,
        repeated=_repeated(dag, found),
        parts=opened.parts,
        derived=derived,
        sync=dag.sync,
        unit=np.where(units.of >= 0, rank[units.of], -1).astype(np.int32),
    )


def _frees(units: Units) -> tuple[Ints, Floats, Ints]:
    """For each ZeRO-3 gather: (its last user, a place just after that one, the gather)."""
    edge = np.flatnonzero(units.gathers_each_use()[units.src])
    users, gathers = units.dst[edge], units.src[edge]
    order = np.lexsort((units.place[users], gathers))
    ends = np.flatnonzero(np.diff(gathers[order], append=-1))
    user, gather = users[order][ends], gathers[order][ends]
    bucket = units.dag.nodes.bucket[units.node[gather]]
    tie = np.argsort(np.argsort(bucket, kind="stable")) / (len(gather) + 1.0)
    return user, units.place[user] + 0.25 + tie / 8, gather


def _free_columns(units: Units, freed: Ints) -> tuple[Ints, ...]:
    """Return (kind, stage, microbatch, bucket, label, line) of the FREE of each gather."""
    nodes, node, none = units.dag.nodes, units.node[freed], np.full(len(freed), -1)
    kind = np.full(len(freed), CODE[ActionKind.FREE])
    return kind, nodes.stage[node], nodes.microbatch[node], nodes.bucket[node], none, none


def _columns(units: Units, line: Ints) -> tuple[Ints, ...]:
    """Return (kind, stage, microbatch, bucket, label, line) of each unit."""
    nodes, n, kind, is_compute = units.dag.nodes, units.node, units.kind, units.is_compute
    code = np.full(units.count, -1, np.int32)
    phase = nodes.phase[n].copy()
    phase[: units.compute] = units.opened.phase
    for p, k in KIND_OF_PHASE.items():
        code[is_compute & (phase == p)] = CODE[k]
    code[kind == NodeKind.UPDATE] = CODE[ActionKind.UPDATE]
    code[kind == NodeKind.NORM] = CODE[ActionKind.NORM]
    forward = nodes.phase[n] == Phase.F
    for node_kind, verb in ((NodeKind.SEND, "SEND"), (NodeKind.RECV, "RECV")):
        code[(kind == node_kind) & forward] = CODE[ActionKind(f"{verb}_F")]
        code[(kind == node_kind) & ~forward] = CODE[ActionKind(f"{verb}_B")]
    collective = (kind == NodeKind.COLLECTIVE) & ~is_compute
    bucketed = collective & (nodes.bucket[n] >= 0)
    each = nodes.microbatch[n] >= 0
    table = {
        Collective.ALL_REDUCE: ("ALL_REDUCE",) * 3,
        Collective.REDUCE_SCATTER: ("REDUCE_SCATTER",) * 3,
        Collective.ALL_GATHER: ("ALL_GATHER_F", "ALL_GATHER_B", "ALL_GATHER"),
    }
    for which, (f, b, head) in table.items():
        mine = bucketed & (nodes.collective[n] == which)
        code[mine & each & forward] = CODE[ActionKind(f)]
        code[mine & each & ~forward] = CODE[ActionKind(b)]
        code[mine & ~each] = CODE[ActionKind(head)]
    inner = collective & (nodes.bucket[n] < 0)
    to_all = nodes.collective[n] == Collective.ALL_TO_ALL
    ahead = forward | (nodes.phase[n] == Phase.R)
    for mask, verb in ((to_all, "ALL_TO_ALL"), (~to_all, "COMM")):
        code[inner & mask & ahead] = CODE[ActionKind(f"{verb}_F")]
        code[inner & mask & ~ahead] = CODE[ActionKind(f"{verb}_B")]
    label = np.full(units.count, -1, np.int32)
    label[: units.compute] = units.opened.label
    bucket = np.where(np.arange(units.count) < units.compute, -1, nodes.bucket[n])
    microbatch = np.where(kind == NodeKind.UPDATE, -1, nodes.microbatch[n])
    stage = np.where(kind == NodeKind.NORM, 0, nodes.stage[n])
    return code, stage, microbatch, bucket, label, line


def _inputs(dag: Dag) -> tuple[tuple[int, ...], ...]:
    """Return, for each stage, the other stages whose activations it takes."""
    edges, nodes = dag.edges, dag.nodes
    mask = (edges.role == Role.ACTIVATION) | (edges.role == Role.MESSAGE)
    a, b = nodes.stage[edges.src[mask]], nodes.stage[edges.dst[mask]]
    forward = (nodes.phase[edges.src[mask]] == Phase.F) & (nodes.phase[edges.dst[mask]] == Phase.F) & (a != b)
    width = dag.stages + 1
    pairs = distinct(b[forward].astype(np.int64) * width + a[forward]).tolist()
    into: list[list[int]] = [[] for _ in range(max(1, dag.stages))]
    for pair in pairs:
        into[pair // width].append(pair % width)
    return tuple(map(tuple, into))


def _bucket_uses(dag: Dag, opened: Opening) -> tuple[BucketUse, ...]:
    """Return what the plan says of each bucket."""
    uses = []
    for bucket in dag.buckets:
        zero = dag.states[bucket.state].zero_stage if bucket.ranks > 1 else 0
        forward, backward, again, weight = opened.uses(bucket)
        each = zero == 3
        reduction = Reduction.NONE if bucket.ranks == 1 else Reduction.EACH if zero >= 2 else Reduction.STEP
        uses.append(
            BucketUse(
                bucket.stage,
                each,
                reduction,
                forward if zero else (),
                backward if each else (),
                again if each else (),
                weight,
            )
        )
    return tuple(uses)


def _repeated(dag: Dag, found: Macros) -> tuple[tuple[int, ...], ...]:
    """Return, for each stage, the microbatches that have an R of their own."""
    made: list[list[int]] = [[] for _ in range(max(1, dag.stages))]
    mine = np.flatnonzero(found.phase == Phase.R)
    for stage, microbatch in sorted(zip(found.stage[mine].tolist(), found.microbatch[mine].tolist(), strict=True)):
        made[stage].append(max(0, microbatch))
    return tuple(map(tuple, made))
