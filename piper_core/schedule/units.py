"""Units of a lowering: every future action of a plan, and what lies between them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from piper_core.ir.dag import Dag, Floats, Ints, among
from piper_core.ir.edit import distinct
from piper_core.ir.macro import Macros
from piper_core.names import Axis, Collective, NodeKind, Phase, Role
from piper_core.schedule.open import Opening


class Units:
    """Arrays over units: first the pieces of compute, then one a communication node, then the updates.

    ``of`` (n,) is each node's unit. Per unit, shape (count,): ``node`` (its first), ``row``, ``kind``, ``is_compute``
    (it runs on the compute stream), ``inside`` (it is a piece of a macro action, inner collectives of opened ones
    included), ``place`` (its order on the compute stream; updates come last), ``first`` and ``latest`` (place of its
    first consumer and of its last producer inside macros). ``src`` and ``dst`` are the distinct edges between units,
    messages left out. ``mate`` is the other end of a message, ``peer`` its row.
    """

    def __init__(self, dag: Dag, found: Macros, row_of_group: Ints, opened: Opening) -> None:
        self.dag, self.found, self.opened = dag, found, opened
        nodes = dag.nodes
        row = row_of_group[nodes.group]
        apart = opened.of < 0
        self.comm = np.flatnonzero(apart & (nodes.kind != NodeKind.UPDATE))
        update = np.flatnonzero(nodes.kind == NodeKind.UPDATE)
        self.of = opened.of.copy()
        self.of[self.comm] = opened.count + np.arange(len(self.comm))
        self.of[update] = opened.count + len(self.comm) + np.arange(len(update))
        self.compute, self.count = opened.count, opened.count + len(self.comm) + len(update)
        self.node = np.full(self.count, -1, np.int32)
        self.node[self.of[::-1]] = np.arange(len(nodes), dtype=np.int32)[::-1]
        self.row = row[self.node]
        self.kind = nodes.kind[self.node]
        self.node_row = row
        self.src, self.dst = self._edges()
        self.is_compute: NDArray[np.bool_] = np.zeros(self.count, np.bool_)
        self.is_compute[: self.compute] = opened.is_compute
        self.is_compute[self.of[update]] = True
        self.inside = self.is_compute.copy()
        self.inside[: self.compute] = True
        self.place = np.zeros(self.count)
        self.place[: self.compute] = opened.place
        self.place[self.of[update]] = float(opened.place.max(initial=0.0)) + 2 + nodes.stage[update]
        self.first, self.latest = self._neighbours()
        self.mate, self.peer = self._messages()

    def _edges(self) -> tuple[Ints, Ints]:
        """Return the edges between different units, messages left out, each pair once."""
        edges = self.dag.edges
        a, b = self.of[edges.src], self.of[edges.dst]
        keep = (a != b) & (edges.role != Role.MESSAGE)
        kept = self._kept()
        a, b = np.concatenate([a[keep], kept[0]]), np.concatenate([b[keep], kept[1]])
        key = distinct(a.astype(np.int64) * self.count + b)
        return (key // self.count).astype(np.int32), (key % self.count).astype(np.int32)

    def _kept(self) -> tuple[Ints, Ints]:
        """Return (unit, unit) edges from the whole of F to collectives of an opened R, and of BI to those of a BW.

        A plan says of macro actions, not of their pieces, which one keeps what another uses.
        """
        nodes, found = self.dag.nodes, self.found
        apart = np.zeros(self.count, np.bool_)
        apart[: self.compute] = ~self.opened.is_compute
        inner = np.flatnonzero(apart[self.of] & among(nodes.phase, (Phase.R, Phase.BW)))
        find = found.find() if len(inner) else {}
        before = [
            find[int(nodes.stage[n]), int(Phase.F if nodes.phase[n] == Phase.R else Phase.BI), int(nodes.microbatch[n])]
            for n in inner.tolist()
        ]
        return self.of[found.last[before]] if before else inner, self.of[inner]

    def _neighbours(self) -> tuple[Floats, Floats]:
        """Return the place of each unit's first consumer (infinity: none) and of its last producer (-1: none)."""
        first, latest = np.full(self.count, np.inf), np.full(self.count, -1.0)
        into, outof = self.inside[self.dst], self.inside[self.src]
        np.minimum.at(first, self.src[into], self.place[self.dst[into]])
        np.maximum.at(latest, self.dst[outof], self.place[self.src[outof]])
        return first, latest

    def _messages(self) -> tuple[Ints, Ints]:
        """Return the other end of each message (-1 elsewhere) and the row that it is on (0 elsewhere)."""
        edges = self.dag.edges
        message = edges.role == Role.MESSAGE
        send, recv = self.of[edges.src[message]], self.of[edges.dst[message]]
        mate, peer = np.full(self.count, -1, np.int32), np.zeros(self.count, np.int32)
        mate[send], mate[recv] = recv, send
        peer[send], peer[recv] = self.row[recv], self.row[send]
        return mate, peer

    def first_user(self, kind: NodeKind) -> Ints:
        """Return, for each unit of a kind, the first piece of a macro that takes what it brings (-1: none)."""
        user = np.full(self.count, -1, np.int32)
        edge = np.flatnonzero(self.inside[self.dst] & (self.kind[self.src] == kind))
        edge = edge[np.argsort(-self.place[self.dst[edge]], kind="stable")]
        user[self.src[edge]] = self.dst[edge]
        return user

    def gathers_each_use(self) -> NDArray[np.bool_]:
        """Return which units gather a bucket for one microbatch (ZeRO-3), shape (count,)."""
        nodes = self.dag.nodes
        return np.asarray(
            (self.kind == NodeKind.COLLECTIVE)
            & (nodes.collective[self.node] == Collective.ALL_GATHER)
            & (nodes.axis[self.node] == Axis.DATA)
            & (nodes.microbatch[self.node] >= 0)
        )
