"""Streams and lines of a plan: which queue each unit is on, in which order, and whom it meets there."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import numpy as np

from piper_core.ir.dag import Dag, Floats, Ints
from piper_core.ir.edit import rows as rows_of
from piper_core.names import Axis, Collective, NodeKind, Phase
from piper_core.passes.gradient_sync import bucket_ranks
from piper_core.schedule.plan import Channel, Communicator, Stream, StreamKind
from piper_core.schedule.units import Units


class ChannelRule(StrEnum):
    """How messages share queues. FULL (source, destination, activation or gradient; each end its own stream) is
    the one that is safe; PAIR (one channel a source and destination) and RANK (one send and one receive stream
    a row), both in order of issue, exist to show what they break (DESIGN: Channel)."""

    FULL = "full"
    PAIR = "pair"
    RANK = "rank"


def assign_streams(units: Units, rule: ChannelRule) -> tuple[Ints, list[Stream]]:
    """Return the stream of each unit, and the streams: one compute stream a row first."""
    nodes, rows, names = units.dag.nodes, len(units.dag.groups), units.dag.streams
    table = [Stream(row, StreamKind.COMPUTE, "compute") for row in range(rows)]
    stream = np.where(units.is_compute, units.row, -1).astype(np.int32)
    others = np.flatnonzero(~units.is_compute)
    node, kind = units.node[others], units.kind[others]
    message = (kind == NodeKind.SEND) | (kind == NodeKind.RECV)
    peer = units.peer[others]
    direction = np.where(nodes.phase[node] == Phase.F, 0, 1)
    tail = peer * 2 * (rule is not ChannelRule.RANK) + direction * (rule is ChannelRule.FULL)
    name = np.where(kind == NodeKind.NORM, len(names), nodes.stream[node])
    key = units.row[others].astype(np.int64) * 3 + np.where(message, kind, 0)
    key = key * (len(names) + 1) + np.where(message, 0, name)
    key = key * (2 * rows + 2) + np.where(message, tail, 0)
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    stream[others] = rows + inverse
    for i in first.tolist():
        row, own = int(units.row[others[i]]), names[nodes.stream[node[i]]]
        if message[i]:
            sending = kind[i] == NodeKind.SEND
            end = "" if rule is ChannelRule.RANK else f"{'>' if sending else '<'}{peer[i]}"
            end += f".{'FB'[direction[i]]}" if rule is ChannelRule.FULL else ""
            text = f"{own + '.' if nodes.stream[node[i]] else ''}{'send' if sending else 'recv'}{end}"
            table.append(Stream(row, StreamKind.SEND if sending else StreamKind.RECV, text))
        else:
            table.append(Stream(row, StreamKind.COLLECTIVE, "norm" if kind[i] == NodeKind.NORM else own))
    return stream, table


def assign_places(units: Units, rule: ChannelRule) -> Floats:
    """Return the order key of every unit inside its stream: communication by consumer, then bucket; reductions by
    producer, after what that producer gathers; a collective of several rows at one place in all of them."""
    nodes, kind = units.dag.nodes, units.kind
    bucket, buckets = nodes.bucket[units.node], units.dag.buckets
    send, recv = kind == NodeKind.SEND, kind == NodeKind.RECV
    bucketed = (kind == NodeKind.COLLECTIVE) & (bucket >= 0)
    gather = bucketed & (nodes.collective[units.node] == Collective.ALL_GATHER)
    reduce, tie = bucketed & ~gather, bucketed & (nodes.axis[units.node] == Axis.TIE)
    out = units.place.copy()
    out[recv] = units.first[recv]
    out[send] = units.first[units.mate[send]] if rule is ChannelRule.FULL else units.latest[send]
    out[gather], out[reduce] = units.first[gather], units.latest[reduce]
    out[tie] = np.maximum(units.latest[tie], units.place.max(initial=0.0))
    shared = np.asarray([len(b.rows) > 1 for b in buckets], np.bool_)
    if shared.any():
        for mask, worst, start in ((gather, np.minimum, np.inf), (reduce & ~tie, np.maximum, -np.inf)):
            spanning = np.flatnonzero(mask)
            spanning = spanning[shared[bucket[spanning]]]
            common = np.full(len(buckets), start)
            worst.at(common, bucket[spanning], out[spanning])
            out[spanning] = common[bucket[spanning]]
    part = bucket / (2.0 * len(buckets) + 2.0)
    out[gather] += part[gather]
    out[reduce & ~tie] += 0.5 + part[reduce & ~tie]
    return out


def assign_lines(units: Units, rule: ChannelRule) -> tuple[list[Channel | Communicator], Ints]:
    """Return the channels and communicators, and which of them each unit meets others on (-1: none)."""
    dag, nodes, rows, kind = units.dag, units.dag.nodes, len(units.dag.groups), units.kind
    line = np.full(units.count, -1, np.int32)
    lines: list[Channel | Communicator] = []
    send, recv = np.flatnonzero(kind == NodeKind.SEND), np.flatnonzero(kind == NodeKind.RECV)
    for ends, source, target in ((send, units.row, units.peer), (recv, units.peer, units.row)):
        direction = (nodes.phase[units.node[ends]] != Phase.F) * (rule is not ChannelRule.PAIR)
        line[ends] = (source[ends] * rows + target[ends]) * 2 + direction
    if len(send):
        keys, inverse = np.unique(line[line >= 0], return_inverse=True)
        line[line >= 0] = inverse
        for key in keys.tolist():
            pair, back = divmod(key, 2)
            lines.append(Channel(pair // rows, pair % rows, "any" if rule is ChannelRule.PAIR else "FB"[back]))
    # One look at each combination of bucket and stream: there are far fewer than collectives.
    comms = units.of[units.comm]
    node = units.node[comms]
    norm, tie = kind[comms] == NodeKind.NORM, nodes.axis[node] == Axis.TIE
    own = nodes.bucket[node].astype(np.int64) * len(dag.streams) + nodes.stream[node]
    combination = np.where(norm, -1, np.where(tie, -2 - node, own))
    meets = norm | ((kind[comms] == NodeKind.COLLECTIVE) & (tie | (nodes.bucket[node] >= 0)))
    _, first, inverse = np.unique(combination[meets], return_index=True, return_inverse=True)
    line_of = np.full(len(first), -1, np.int32)
    made: dict[tuple[Any, ...], int] = {}
    known: dict[tuple[Any, ...], int] = {}  # looked up before communicators, which name every rank
    for i in np.argsort(first).tolist():
        at = int(node[meets][first[i]])
        key = _short_key(dag, at)
        if key not in known:
            known[key] = made.setdefault(_communicator(units, at), len(lines) + len(made))
        line_of[i] = known[key]
    line[comms[meets]] = line_of[inverse]
    lines += [Communicator(*each) for each in made]
    return lines, line


def _short_key(dag: Dag, node: int) -> tuple[Any, ...]:
    """Return what is alike only where the communicators of two collectives are."""
    nodes = dag.nodes
    if int(nodes.kind[node]) == NodeKind.NORM or int(nodes.axis[node]) == Axis.TIE:  # quicker than with numpy's own
        return (node,)
    bucket = dag.buckets[int(nodes.bucket[node])]
    alone = len(bucket.rows) == 1
    return bucket.state, bucket.expert, bucket.rows, int(nodes.stream[node]), -1 if alone else bucket.parts[0][0]


def _communicator(units: Units, node: int) -> tuple[Any, ...]:
    """Return the rows, groups and label of the communicator that a collective meets others on."""
    dag, nodes = units.dag, units.dag.nodes
    order = rows_of(dag)
    if nodes.kind[node] == NodeKind.NORM:
        everyone = tuple(sorted(rank for group in dag.groups for rank in group))
        return tuple(range(len(dag.groups))), (everyone,), "norm"
    if nodes.axis[node] == Axis.TIE:
        names = _ties(dag, node)
        same = [n for n in np.flatnonzero(nodes.axis == Axis.TIE).tolist() if names & _ties(dag, n)]
        held = tuple(sorted({int(units.node_row[n]) for n in same}))
        return held, tuple(zip(*(dag.groups[order[row]] for row in held), strict=True)), "tie"
    bucket = dag.buckets[int(nodes.bucket[node])]
    held = tuple(sorted(order.index(group) for group in bucket.rows))
    return held, bucket_ranks(dag, bucket), dag.streams[nodes.stream[node]]


def _ties(dag: Dag, node: int) -> set[str]:
    """Return the tie groups of a node's chunk."""
    return {parameter.tie for parameter in dag.chunks[dag.nodes.chunk[node]].parameters if parameter.tie}
