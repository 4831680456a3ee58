"""From a compiled DAG to a plan: macro actions, streams, channels, and what waits for what."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from piper_core.ir.action import KIND_OF_PHASE, ActionKind
from piper_core.ir.dag import Dag, Floats, Ints
from piper_core.ir.edit import rows as rows_of
from piper_core.ir.macro import Macros, macros
from piper_core.names import Axis, Collective, NodeKind, Phase, Role
from piper_core.passes.gradient_sync import bucket_ranks
from piper_core.schedule.complete import compute_order
from piper_core.schedule.open import Opening, opening
from piper_core.schedule.plan import CODE, BucketUse, Channel, Communicator, Plan, Reduction, Stream, StreamKind


class ChannelRule(StrEnum):
    """How messages share queues. FULL (source, destination, activation or gradient; each end its own stream) is
    the one that is safe; PAIR (one channel a source and destination) and RANK (one send and one receive stream
    a row), both in order of issue, exist to show what they break (DESIGN: Channel)."""

    FULL = "full"
    PAIR = "pair"
    RANK = "rank"


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
    return Costs(np.maximum(seconds, 1e-9 * dag.compute))


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
    order = rows_of(dag)
    row_of_group = np.full(len(dag.groups) + 1, -1, np.int32)
    row_of_group[list(order)] = np.arange(len(order))
    position, derived = compute_order(dag, found, costs or flop_costs(dag), row_of_group)
    opened = opening(dag, found, position)
    return _Lowering(dag, found, row_of_group, position, opened, channels, look_ahead).plan(derived)


class _Lowering:
    """The arrays of one lowering. A unit is a future action: first those of compute, then one a comm node."""

    def __init__(
        self,
        dag: Dag,
        found: Macros,
        row_of_group: Ints,
        position: Ints,
        opened: Opening,
        channels: ChannelRule,
        look_ahead: int,
    ) -> None:
        self.dag, self.channels, self.look_ahead = dag, channels, look_ahead
        nodes = dag.nodes
        self.row = row_of_group[nodes.group]
        inside = opened.of >= 0
        comm = np.flatnonzero(~inside & (nodes.kind != NodeKind.UPDATE))
        update = np.flatnonzero(nodes.kind == NodeKind.UPDATE)
        self.unit = opened.of.copy()
        self.unit[comm] = opened.count + np.arange(len(comm))
        self.unit[update] = opened.count + len(comm) + np.arange(len(update))
        self.count = opened.count + len(comm) + len(update)
        self.compute_units, self.comm, self.update = opened.count, comm, update
        self.opened, self.found, self.position = opened, found, position
        self.node = np.full(self.count, -1, np.int32)
        self.node[self.unit[::-1]] = np.arange(len(nodes), dtype=np.int32)[::-1]
        self.unit_row = self.row[self.node]
        self._project()

    def _project(self) -> None:
        """Edges between different units, messages and order left out; each pair once."""
        edges = self.dag.edges
        a, b = self.unit[edges.src], self.unit[edges.dst]
        keep = (a != b) & (edges.role != Role.MESSAGE)
        kept = self._kept()
        a, b = np.concatenate([a[keep], kept[0]]), np.concatenate([b[keep], kept[1]])
        key = np.unique(a.astype(np.int64) * self.count + b)
        self.src, self.dst = (key // self.count).astype(np.int32), (key % self.count).astype(np.int32)

    def _kept(self) -> tuple[Ints, Ints]:
        """Return (unit, unit) edges from the whole of F to collectives of an opened R, and of BI to those of a BW.

        A plan says of macro actions, not of their pieces, which one keeps what another uses.
        """
        nodes, found = self.dag.nodes, self.found
        apart = np.zeros(self.count, np.bool_)
        apart[: self.compute_units] = ~self.opened.is_compute
        inner = np.flatnonzero(apart[self.unit] & np.isin(nodes.phase, (Phase.R, Phase.BW)))
        find = found.find() if len(inner) else {}
        before = [
            find[int(nodes.stage[n]), int(Phase.F if nodes.phase[n] == Phase.R else Phase.BI), int(nodes.microbatch[n])]
            for n in inner.tolist()
        ]
        return self.unit[found.last[before]] if before else inner, self.unit[inner]

    def plan(self, derived: tuple[int, ...]) -> Plan:
        """Return the plan."""
        dag, nodes = self.dag, self.dag.nodes
        place = np.zeros(self.count)
        place[: self.compute_units] = self.opened.place
        is_compute = np.zeros(self.count, np.bool_)
        is_compute[: self.compute_units] = self.opened.is_compute
        is_compute[self.unit[self.update]] = True
        last = float(place[: self.compute_units].max(initial=0.0)) + 2
        place[self.unit[self.update]] = last + nodes.stage[self.update]
        # first consumer and last producer of each unit, by place in its row's compute stream
        first = np.full(self.count, np.inf)
        latest = np.full(self.count, -1.0)
        inside = is_compute.copy()
        inside[: self.compute_units] = True  # with the collectives of opened macros, which have a place as well
        into = inside[self.dst]
        np.minimum.at(first, self.src[into], place[self.dst[into]])
        outof = inside[self.src]
        np.maximum.at(latest, self.dst[outof], place[self.src[outof]])
        free_unit, free_place, free_of = self._frees(place)
        kind = nodes.kind[self.node]
        self.stream_names: list[str] = []
        streams = self._streams(is_compute, kind)
        lines, line = self._lines(kind)
        place = self._comm_places(place, first, latest, kind, is_compute)
        # frees join the compute stream
        total = self.count + len(free_unit)
        place = np.concatenate([place, free_place])
        stream = np.concatenate([streams, streams[free_unit]])
        order = np.lexsort((np.arange(total), place, stream))
        rank = np.empty(total, np.int32)
        rank[order] = np.arange(total)
        columns = self._columns(kind, is_compute, line)
        frees = (
            np.full(len(free_unit), CODE[ActionKind.FREE]),
            nodes.stage[self.node[free_of]],
            nodes.microbatch[self.node[free_of]],
            nodes.bucket[self.node[free_of]],
            np.full(len(free_unit), -1),
            np.full(len(free_unit), -1),
        )
        joined = [np.concatenate([c, f])[order].astype(np.int32) for c, f in zip(columns, frees, strict=True)]
        wait_start, waits = self._waits(stream, place, rank, kind, inside, order)
        start = np.searchsorted(stream[order], np.arange(len(self.stream_table) + 1)).astype(np.int32)
        unit = np.where(self.unit >= 0, rank[self.unit], -1).astype(np.int32)
        return Plan(
            rows=tuple(dag.groups[g] for g in rows_of(dag)),
            microbatches=max(1, dag.microbatches),
            inputs=self._inputs(),
            streams=tuple(self.stream_table),
            lines=tuple(lines),
            labels=self.opened.labels,
            buckets=self._bucket_uses(),
            start=start,
            kind=joined[0],
            stage=joined[1],
            microbatch=joined[2],
            bucket=joined[3],
            label=joined[4],
            line=joined[5],
            wait_start=wait_start,
            waits=waits,
            repeated=self._repeated(),
            parts=self.opened.parts,
            derived=derived,
            sync=dag.sync,
            unit=unit,
        )

    def _frees(self, place: Floats) -> tuple[Ints, Floats, Ints]:
        """For each ZeRO-3 gather: (a unit of its row's compute stream, place just after its last user, the gather)."""
        nodes = self.dag.nodes
        each = np.zeros(self.count, np.bool_)
        each[self.unit[self.comm]] = (
            (nodes.collective[self.comm] == Collective.ALL_GATHER)
            & (nodes.axis[self.comm] == Axis.DATA)
            & (nodes.microbatch[self.comm] >= 0)
        )
        edge = np.flatnonzero(each[self.src])
        users, gathers = self.dst[edge], self.src[edge]
        order = np.lexsort((place[users], gathers))
        ends = np.flatnonzero(np.diff(gathers[order], append=-1))
        user, gather = users[order][ends], gathers[order][ends]
        tie = np.argsort(np.argsort(nodes.bucket[self.node[gather]], kind="stable")) / (len(gather) + 1.0)
        return user, place[user] + 0.25 + tie / 8, gather

    def _streams(self, is_compute: NDArray[np.bool_], kind: Ints) -> Ints:
        """Return the stream of each unit, and fill ``stream_table``: one compute stream a row first."""
        nodes, rows = self.dag.nodes, len(self.dag.groups)
        self.stream_table = [Stream(row, StreamKind.COMPUTE, "compute") for row in range(rows)]
        stream = np.where(is_compute, self.unit_row, -1).astype(np.int32)
        others = np.flatnonzero(~is_compute)
        node = self.node[others]
        message = (kind[others] == NodeKind.SEND) | (kind[others] == NodeKind.RECV)
        peer = np.where(message, self._peer()[others], 0)
        direction = np.where(nodes.phase[node] == Phase.F, 0, 1)
        tail = peer * 2 * (self.channels is not ChannelRule.RANK) + direction * (self.channels is ChannelRule.FULL)
        name = np.where(kind[others] == NodeKind.NORM, len(self.dag.streams), nodes.stream[node])
        key = (
            (self.unit_row[others].astype(np.int64) * 3 + np.where(message, kind[others], 0))
            * (len(self.dag.streams) + 1)
            + np.where(message, 0, name)
        ) * (2 * rows + 2) + np.where(message, tail, 0)
        _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
        stream[others] = rows + inverse
        for i in first.tolist():
            n = int(node[i])
            row = int(self.unit_row[others[i]])
            if message[i]:
                sending = kind[others[i]] == NodeKind.SEND
                prefix = self.dag.streams[nodes.stream[n]] if nodes.stream[n] else ""
                end = "" if self.channels is ChannelRule.RANK else f"{'>' if sending else '<'}{peer[i]}"
                end += f".{'F' if direction[i] == 0 else 'B'}" if self.channels is ChannelRule.FULL else ""
                text = f"{prefix}{'.' if prefix else ''}{'send' if sending else 'recv'}{end}"
                self.stream_table.append(Stream(row, StreamKind.SEND if sending else StreamKind.RECV, text))
            else:
                text = "norm" if kind[others[i]] == NodeKind.NORM else self.dag.streams[nodes.stream[n]]
                self.stream_table.append(Stream(row, StreamKind.COLLECTIVE, text))
        return stream

    def _peer(self) -> Ints:
        """Return the row at the other end of each message unit (0 elsewhere)."""
        edges = self.dag.edges
        message = edges.role == Role.MESSAGE
        send, recv = self.unit[edges.src[message]], self.unit[edges.dst[message]]
        peer = np.zeros(self.count, np.int32)
        peer[send], peer[recv] = self.unit_row[recv], self.unit_row[send]
        self.mate = np.full(self.count, -1, np.int32)
        self.mate[send], self.mate[recv] = recv, send
        self.peer = peer
        return peer

    def _lines(self, kind: Ints) -> tuple[list[Channel | Communicator], Ints]:
        """Return the channels and communicators, and which of them each unit meets others on (-1: none)."""
        dag, nodes, rows = self.dag, self.dag.nodes, len(self.dag.groups)
        line = np.full(self.count, -1, np.int32)
        lines: list[Channel | Communicator] = []
        send, recv = np.flatnonzero(kind == NodeKind.SEND), np.flatnonzero(kind == NodeKind.RECV)
        for units, source, target in ((send, self.unit_row, self.peer), (recv, self.peer, self.unit_row)):
            direction = np.where(nodes.phase[self.node[units]] == Phase.F, 0, 1)
            direction = direction * (self.channels is not ChannelRule.PAIR)
            line[units] = (source[units] * rows + target[units]) * 2 + direction
        if len(send):
            keys, inverse = np.unique(line[line >= 0], return_inverse=True)
            line[line >= 0] = inverse
            for key in keys.tolist():
                pair, direction = divmod(key, 2)
                label = "any" if self.channels is ChannelRule.PAIR else "FB"[direction]
                lines.append(Channel(pair // rows, pair % rows, label))
        # One look at each combination of bucket and stream: there are far fewer than collectives.
        comms = self.unit[self.comm]
        node = self.node[comms]
        collective, tie = kind[comms] == NodeKind.COLLECTIVE, nodes.axis[node] == Axis.TIE
        own = nodes.bucket[node].astype(np.int64) * len(dag.streams) + nodes.stream[node]
        combination = np.where(kind[comms] == NodeKind.NORM, -1, np.where(tie, -2 - node, own))
        meets = (collective & (tie | (nodes.bucket[node] >= 0))) | (kind[comms] == NodeKind.NORM)
        _, first, inverse = np.unique(combination[meets], return_index=True, return_inverse=True)
        line_of = np.full(len(first), -1, np.int32)
        made: dict[tuple[Any, ...], int] = {}
        for i in np.argsort(first).tolist():
            line_of[i] = made.setdefault(self._communicator(int(node[meets][first[i]])), len(lines) + len(made))
        line[comms[meets]] = line_of[inverse]
        lines += [Communicator(*each) for each in made]
        return lines, line

    def _communicator(self, node: int) -> tuple[Any, ...]:
        """Return the rows, groups and label of the communicator that a collective meets others on."""
        dag, nodes = self.dag, self.dag.nodes
        if nodes.kind[node] == NodeKind.NORM:
            everyone = (tuple(sorted(rank for group in dag.groups for rank in group)),)
            return tuple(range(len(dag.groups))), everyone, "norm"
        if nodes.axis[node] == Axis.TIE:
            return self._tie(node)
        order, bucket = rows_of(dag), int(nodes.bucket[node])
        held = tuple(sorted(order.index(g) for g in dag.buckets[bucket].rows))
        return held, self._groups(bucket), dag.streams[nodes.stream[node]]

    def _groups(self, bucket: int) -> Any:
        if not hasattr(self, "_group_cache"):
            self._group_cache: dict[int, Any] = {}
        if bucket not in self._group_cache:
            self._group_cache[bucket] = bucket_ranks(self.dag, self.dag.buckets[bucket])
        return self._group_cache[bucket]

    def _tie(self, node: int) -> tuple[Any, ...]:
        """Return the communicator of a tie: the rows that hold a copy, paired at equal positions."""
        dag, nodes = self.dag, self.dag.nodes
        names = {p.tie for p in dag.chunks[nodes.chunk[node]].parameters if p.tie}
        same = [
            n
            for n in np.flatnonzero(nodes.axis == Axis.TIE).tolist()
            if names & {p.tie for p in dag.chunks[nodes.chunk[n]].parameters}
        ]
        held = tuple(sorted({int(self.row[n]) for n in same}))
        order = rows_of(dag)
        return held, tuple(zip(*(dag.groups[order[row]] for row in held), strict=True)), "tie"

    def _comm_places(
        self, place: Floats, first: Floats, latest: Floats, kind: Ints, is_compute: NDArray[np.bool_]
    ) -> Floats:
        """Return the order key of every unit inside its stream: by consumer, then bucket; reductions by producer."""
        nodes = self.dag.nodes
        bucket = nodes.bucket[self.node]
        out = place.copy()
        send, recv = kind == NodeKind.SEND, kind == NodeKind.RECV
        out[recv] = first[recv]
        out[send] = first[self.mate[send]] if self.channels is ChannelRule.FULL else latest[send]
        gather = (kind == NodeKind.COLLECTIVE) & (nodes.collective[self.node] == Collective.ALL_GATHER) & (bucket >= 0)
        shared = np.asarray([len(b.rows) > 1 for b in self.dag.buckets], np.bool_)
        for mask, key, better in ((gather, first, np.minimum), (~gather & (bucket >= 0), latest, np.maximum)):
            spanning = np.flatnonzero(mask & (kind == NodeKind.COLLECTIVE))
            spanning = spanning[shared[bucket[spanning]]]
            if len(spanning):  # a collective of several rows has one place in all of them
                common = np.full(len(self.dag.buckets), np.inf if better is np.minimum else -np.inf)
                better.at(common, bucket[spanning], key[spanning])
                key[spanning] = common[bucket[spanning]]
        out[gather] = first[gather] + bucket[gather] / (len(self.dag.buckets) + 1.0)
        reduce = (kind == NodeKind.COLLECTIVE) & (bucket >= 0) & ~gather
        late = nodes.axis[self.node] == Axis.TIE
        out[reduce] = latest[reduce] + bucket[reduce] / (len(self.dag.buckets) + 1.0)
        out[reduce & late] = np.maximum(latest[reduce & late], place.max(initial=0.0))
        wide = np.asarray([len(b.rows) > 1 for b in self.dag.buckets], np.bool_)
        if wide.any():  # rows that meet must agree in order: by when the last of them is ready
            mine = np.flatnonzero(reduce & ~late)
            mine = mine[wide[bucket[mine]]]
            last = np.zeros(len(wide))
            np.maximum.at(last, bucket[mine], out[mine])
            out[mine] = last[bucket[mine]]
        inner = ~is_compute & ~send & ~recv & (bucket < 0) & (kind == NodeKind.COLLECTIVE)
        out[inner] = place[inner]
        return out

    def _columns(self, kind: Ints, is_compute: NDArray[np.bool_], line: Ints) -> tuple[Any, ...]:
        nodes, n = self.dag.nodes, self.node
        code = np.full(self.count, -1, np.int32)
        phase = nodes.phase[n].copy()
        phase[: self.compute_units] = self.opened.phase
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
        label = np.full(self.count, -1, np.int32)
        label[: self.compute_units] = self.opened.label
        bucket = np.where(np.arange(self.count) < self.compute_units, -1, nodes.bucket[n])
        microbatch = np.where(kind == NodeKind.UPDATE, -1, nodes.microbatch[n])
        stage = np.where(kind == NodeKind.NORM, 0, nodes.stage[n])
        return code, stage, microbatch, bucket, label, line

    def _waits(
        self, stream: Ints, place: Floats, rank: Ints, kind: Ints, inside: NDArray[np.bool_], order: Ints
    ) -> tuple[Ints, Ints]:
        """Return what each action waits for: the last one it needs on each other stream of its row, where no earlier
        action of its own stream has waited for that already."""
        a, b = [rank[self.src]], [rank[self.dst]]
        total = len(rank)
        start = np.searchsorted(stream[order], stream)  # first action of a unit's stream
        # receives: buffers of at most look_ahead + 1 consumers
        recv = np.flatnonzero(kind == NodeKind.RECV)
        recv = recv[np.argsort(rank[recv])]
        consumer = np.full(self.count, -1, np.int32)
        edge = inside[self.dst] & (kind[self.src] == NodeKind.RECV)
        edge = np.flatnonzero(edge)
        edge = edge[np.argsort(-place[self.dst[edge]], kind="stable")]
        consumer[self.src[edge]] = self.dst[edge]
        gap = self.look_ahead + 1
        if len(recv) > gap:
            later, earlier = recv[gap:], recv[:-gap]
            same = (stream[later] == stream[earlier]) & (consumer[earlier] >= 0)
            a.append(rank[consumer[earlier[same]]])
            b.append(rank[later[same]])
        # gathers: at most `prefetch` ahead of the compute that is about to use one
        nodes = self.dag.nodes
        gather = np.flatnonzero(
            (kind == NodeKind.COLLECTIVE)
            & (nodes.collective[self.node] == Collective.ALL_GATHER)
            & (nodes.axis[self.node] == Axis.DATA)
            & (nodes.microbatch[self.node] >= 0)
        )
        if len(gather):
            gather = gather[np.argsort(rank[gather])]
            states = self.dag.states
            ahead = np.asarray([s.replication.prefetch if s.replication else 1 for s in states])
            prefetch = ahead[nodes.state[self.node[gather]]]
            k = np.arange(len(gather)) - prefetch
            ok = (k >= 0) & (stream[gather[np.maximum(k, 0)]] == stream[gather])
            user = np.full(self.count, -1, np.int32)
            edge = np.flatnonzero(inside[self.dst] & (kind[self.src] == NodeKind.COLLECTIVE))
            edge = edge[np.argsort(-place[self.dst[edge]], kind="stable")]
            user[self.src[edge]] = self.dst[edge]
            target = user[gather[np.maximum(k, 0)]]
            before = rank[target] - 1
            ok &= before >= start[target]
            a.append(before[ok])
            b.append(rank[gather[ok]])
        src, dst = np.concatenate(a), np.concatenate(b)
        ranked = stream[order]
        keep = ranked[src] != ranked[dst]
        src, dst = src[keep], dst[keep]
        width = len(self.stream_table)
        pair = ranked[dst].astype(np.int64) * width + ranked[src]
        by = np.lexsort((src, dst, pair))
        pair, src, dst = pair[by], src[by], dst[by]
        _, group = np.unique(pair, return_inverse=True)
        known = np.maximum.accumulate(src + group.astype(np.int64) * total)
        fresh = np.diff(known, prepend=-1) > 0  # something that no earlier wait of this stream has seen
        lasts = np.append((np.diff(dst) != 0) | (np.diff(group) != 0), True) if len(dst) else np.zeros(0, np.bool_)
        # keep, for each (action, stream), the furthest wait, where it is fresh
        key = pair * total + dst
        best = np.zeros(len(src), np.bool_)
        best[lasts] = True
        any_fresh = np.zeros(len(src), np.bool_)
        if len(src):
            _, inverse = np.unique(key, return_inverse=True)
            any_fresh = np.bincount(inverse, weights=fresh)[inverse] > 0
        take = best & any_fresh
        src, dst = src[take], dst[take]
        by = np.lexsort((src, dst))
        counts = np.bincount(dst, minlength=total)
        wait_start = np.zeros(total + 1, np.int32)
        wait_start[1:] = np.cumsum(counts)
        return wait_start, src[by].astype(np.int32)

    def _inputs(self) -> tuple[tuple[int, ...], ...]:
        """Return, for each stage, the other stages whose activations it takes."""
        edges, nodes = self.dag.edges, self.dag.nodes
        mask = (edges.role == Role.ACTIVATION) | (edges.role == Role.MESSAGE)
        a, b = nodes.stage[edges.src[mask]], nodes.stage[edges.dst[mask]]
        forward = (nodes.phase[edges.src[mask]] == Phase.F) & (nodes.phase[edges.dst[mask]] == Phase.F) & (a != b)
        width = self.dag.stages + 1
        pairs = np.unique(b[forward].astype(np.int64) * width + a[forward]).tolist()
        into: list[list[int]] = [[] for _ in range(max(1, self.dag.stages))]
        for pair in pairs:
            into[pair // width].append(pair % width)
        return tuple(map(tuple, into))

    def _bucket_uses(self) -> tuple[BucketUse, ...]:
        dag = self.dag
        uses = []
        for bucket in dag.buckets:
            zero = dag.states[bucket.state].zero_stage if bucket.ranks > 1 else 0
            forward, backward, again, weight = self.opened.uses(bucket)
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

    def _repeated(self) -> tuple[tuple[int, ...], ...]:
        """Return, for each stage, the microbatches that have an R of their own."""
        made: list[list[int]] = [[] for _ in range(max(1, self.dag.stages))]
        mine = np.flatnonzero(self.found.phase == Phase.R)
        for stage, microbatch in sorted(
            zip(self.found.stage[mine].tolist(), self.found.microbatch[mine].tolist(), strict=True)
        ):
            made[stage].append(max(0, microbatch))
        return tuple(map(tuple, made))
