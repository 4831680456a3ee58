"""Opening macro actions: where a bucket boundary or an overlap group needs finer pieces than whole phases."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from piper_core.ir.dag import Bucket, Dag, Ints, among
from piper_core.ir.edit import distinct
from piper_core.ir.macro import Macros, inner_position
from piper_core.names import NodeKind, Phase, Role
from piper_core.schedule.plan import Part

# In loops over nodes: looking a member up on its enum, or comparing one with numpy's, takes longer than all else there.
_COLLECTIVE, _COMPUTE, _R, _SAVED = int(NodeKind.COLLECTIVE), int(NodeKind.COMPUTE), int(Phase.R), int(Role.SAVED)
_RESULTS = (Role.ACTIVATION, Role.GRADIENT)


@dataclass(slots=True)
class Opening:
    """Units of compute: whole macros, or the pieces of opened ones.

    ``of`` (n,) is the unit of each node (-1: none). Per unit, shape (count,): ``place`` in its row's order,
    ``is_compute`` (inner collectives of an opened overlap group are units of their own), ``phase``, ``label`` (index
    into ``labels``; -1 whole). ``spans`` are the chunks that each compute label covers, as (stage, phase, label,
    chunks). ``parts`` see ``Plan.parts``.
    """

    of: Ints
    place: NDArray[np.float64]
    is_compute: NDArray[np.bool_]
    phase: Ints
    label: Ints
    labels: tuple[str, ...] = ()
    parts: tuple[tuple[int, str, tuple[tuple[Part, ...], ...]], ...] = ()
    spans: dict[tuple[int, Phase, int], frozenset[int]] = field(default_factory=dict)
    _of_stage: dict[int, list[tuple[Phase, int, frozenset[int]]]] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(self.place)

    def uses(self, bucket: Bucket) -> tuple[tuple[int, ...], ...]:
        """Return the labels that read a bucket in a forward, in a backward, in an R, and that add to its gradient."""
        if not self._of_stage:
            for (stage, phase, label), covered in self.spans.items():
                self._of_stage.setdefault(stage, []).append((phase, label, covered))
        chunks = {chunk for chunk, _ in bucket.parts}
        found: tuple[set[int], ...] = (set(), set(), set(), set())
        for phase, label, covered in self._of_stage.get(bucket.stage, ()):
            if not chunks.isdisjoint(covered):
                if phase is Phase.F:
                    found[0].add(label)
                if phase in (Phase.B, Phase.BI):
                    found[1].add(label)
                if phase is Phase.R:
                    found[2].add(label)
                if phase in (Phase.B, Phase.BW):
                    found[3].add(label)
        return tuple(tuple(sorted(labels)) for labels in found)


def opening(dag: Dag, found: Macros, position: Ints) -> Opening:
    """Return the units of compute of a plan.

    A macro opens where a bucket is gathered for it or its gradient is reduced after it (see ``_cuts``), so that the
    collective can overlap; members of an overlap group open around their inner collectives, and take turns (see
    ``_turns``).
    """
    k = len(found)
    opened: dict[int, Ints] = {}
    steady, edge = _cuts(dag)
    edges_of = _edge_macros(found, position)
    for (stage, phase), table in steady.items():
        for m in np.flatnonzero((found.stage == stage) & (found.phase == phase)).tolist():
            opened[m] = table
    for (stage, _), m in edges_of.items():
        edge_table = edge.get((stage, Phase(int(found.phase[m]))))
        if edge_table is not None:
            opened[m] = edge_table
    overlapped = _overlapped(dag, found, position)
    if not opened and not overlapped:
        of = found.of.copy()
        spans = _whole_spans(dag, found)
        return Opening(
            of,
            position.astype(np.float64) * 2,
            np.ones(k, np.bool_),
            found.phase.copy(),
            np.full(k, -1, np.int32),
            spans=spans,
        )
    return _Opener(dag, found, position, opened, overlapped).build()


def _cuts(dag: Dag) -> tuple[dict[tuple[int, Phase], Ints], dict[tuple[int, Phase], Ints]]:
    """Return, for each (stage, phase), the segment of every chunk: for all macros, and for the first forward and last
    backward only. Only those with more than one segment.

    A macro is cut before the first user of a bucket that is gathered for it, and after the last of one whose gradient
    is reduced then: each microbatch's under ZeRO-2/3, the last one's under ZeRO-0/1.
    """
    steady: dict[tuple[int, Phase], set[int]] = {}
    edge: dict[tuple[int, Phase], set[int]] = {}
    for bucket in dag.buckets:
        if bucket.ranks == 1:
            continue
        zero = dag.states[bucket.state].zero_stage
        chunks = [c for c, _ in bucket.parts]
        if zero:
            (steady if zero == 3 else edge).setdefault((bucket.stage, Phase.F), set()).add(min(chunks))
        if zero == 3:
            for phase in (Phase.B, Phase.BI):
                steady.setdefault((bucket.stage, phase), set()).add(max(chunks))
        for phase in (Phase.B, Phase.BW):
            (steady if zero >= 2 else edge).setdefault((bucket.stage, phase), set()).add(min(chunks) - 1)
    return _segments(dag, steady), _segments(dag, edge)


def _segments(dag: Dag, cuts: dict[tuple[int, Phase], set[int]]) -> dict[tuple[int, Phase], Ints]:
    """Return the segment of every chunk for each (stage, phase) whose chunks the cuts divide."""
    compute, chunk = dag.compute, np.arange(len(dag.chunks))
    held, stages = dag.nodes.chunk[compute], dag.nodes.stage[compute]
    table: dict[tuple[int, Phase], Ints] = {}
    for (stage, phase), cut in cuts.items():
        mine = held[stages == stage]
        first, last, forward = int(mine.min()), int(mine.max()), phase is Phase.F
        at = np.asarray(sorted(c for c in cut if (first < c <= last if forward else first <= c < last)))
        if len(at):
            segment = (at[None, :] <= chunk[:, None]) if forward else (at[None, :] >= chunk[:, None])
            table[stage, phase] = segment.sum(1).astype(np.int32)
    return table


def _edge_macros(found: Macros, position: Ints) -> dict[tuple[int, bool], int]:
    """Return the first forward and the last whole or weight backward of each stage, by place in its row."""
    edge: dict[tuple[int, bool], int] = {}
    order = np.argsort(position, kind="stable")
    for m in order[found.phase[order] == Phase.F].tolist():
        edge.setdefault((int(found.stage[m]), False), m)
    for m in order[among(found.phase[order], (Phase.B, Phase.BW))].tolist():
        edge[int(found.stage[m]), True] = m
    return edge


def _overlapped(dag: Dag, found: Macros, position: Ints) -> list[tuple[int, ...]]:
    """Return the overlap groups, as macros, in which some member communicates inside.

    A group whose members do not follow one another (an order that the list scheduler completed) is left out.
    """
    if not dag.overlaps:
        return []
    nodes = dag.nodes
    talks = set(found.of[(nodes.kind == NodeKind.COLLECTIVE) & (found.of >= 0) & (nodes.stream > 0)].tolist())
    find, row_of, place = found.find(), found.group.tolist(), position.tolist()
    groups = [tuple(find[key] for key in group if key in find) for group in dag.overlaps]

    def together(group: tuple[int, ...]) -> bool:
        places = [place[m] for m in group]
        return len({row_of[m] for m in group}) == 1 and max(places) - min(places) == len(group) - 1

    return [group for group in groups if len(group) > 1 and not talks.isdisjoint(group) and together(group)]


def _whole_spans(dag: Dag, found: Macros) -> dict[tuple[int, Phase, int], frozenset[int]]:
    nodes = dag.nodes
    mask = dag.compute
    width = len(dag.chunks) + 1
    key = (nodes.stage[mask].astype(np.int64) * 8 + nodes.phase[mask]) * width + nodes.chunk[mask]
    held: dict[tuple[int, Phase], set[int]] = {}
    for value in distinct(key).tolist():
        stage, phase = divmod(value // width, 8)
        held.setdefault((stage, Phase(phase)), set()).add(value % width)
    return {(stage, phase, -1): frozenset(chunks) for (stage, phase), chunks in held.items()}


def _turns(members: list[list[bool]]) -> list[tuple[int, int]]:
    """Return (member, piece) in the order in which the pieces of an overlap group are taken, given which compute.

    The i-th of n that compute comes at (2 i + 1) / 2 n of the way, ties in the order of members; collectives follow
    what computes before them. So as few as can be of one member come one after the other, where nothing hides the
    collective between them.
    """
    keys = []
    for turn, computes in enumerate(members):
        halves, past = 2 * sum(computes), -1
        for i, compute in enumerate(computes):
            past += 2 * compute
            keys.append((past / halves, turn, i))
    return [(turn, i) for _, turn, i in sorted(keys)]


class _Opener:
    """Cuts macros by template: macros of one (stage, phase) with the same cuts have the same pieces."""

    def __init__(
        self, dag: Dag, found: Macros, position: Ints, opened: dict[int, Ints], overlapped: list[tuple[int, ...]]
    ) -> None:
        self.dag, self.found, self.position, self.opened = dag, found, position, opened
        self.overlapped = overlapped
        self.in_overlap = {m for group in overlapped for m in group}
        index = np.flatnonzero(found.of >= 0)
        order = np.lexsort((index, inner_position(dag)[index], dag.nodes.kind[index], found.of[index]))
        self.sorted = index[order]
        self.starts = np.searchsorted(found.of[self.sorted], np.arange(len(found) + 1))
        self.labels: dict[str, int] = {}
        self.work: dict[tuple[int, Phase, str], frozenset[tuple[bool, int, int]]] = {}
        self.parts: dict[tuple[int, str], dict[tuple[Part, ...], None]] = {}
        self.spans = _whole_spans(dag, found)
        self.segments = {id(table): table for table in opened.values()}
        self.layer = dag.chunk_tag("LAYER")
        self.shown = np.zeros(0, np.bool_)
        """Which nodes are of macros that templates are made of, shape (n,)."""

    def build(self) -> Opening:
        """Return the units: those of whole macros first, then the pieces of opened ones."""
        found, k = self.found, len(self.found)
        cut = set(self.opened) | self.in_overlap
        alike: dict[tuple[int, int, int, bool, bytes], list[int]] = {}
        for m, key in zip(sorted(cut), self._keys(sorted(cut)), strict=True):
            alike.setdefault(key, []).append(m)
        shown = np.zeros(k + 1, np.bool_)
        shown[[same[0] for same in alike.values()]] = True
        self.shown = shown[found.of]
        templates = [(np.asarray(same), *self._cut(same[0], self.opened.get(same[0]))) for same in alike.values()]
        # units: whole macros first, then the pieces of the others
        template_of, pieces = np.full(k, -1, np.int64), np.zeros(k, np.int64)
        for t, (same, _, kinds) in enumerate(templates):
            template_of[same], pieces[same] = t, len(kinds)
        whole = np.flatnonzero(template_of < 0)
        first = len(whole) + np.cumsum(pieces) - pieces
        first[whole] = np.arange(len(whole))
        of = np.where(found.of >= 0, first[found.of], -1).astype(np.int32)
        count, scale = len(whole) + int(pieces.sum()), 2.0 * (int(pieces.max(initial=1)) + 1)
        place = np.zeros(count)
        place[: len(whole)] = self.position[whole] * scale
        is_compute = np.ones(count, np.bool_)
        phase, label = np.zeros(count, np.int32), np.full(count, -1, np.int32)
        phase[: len(whole)] = found.phase[whole]
        for same, local, kinds in templates:
            of[self.sorted[self.starts[same][:, None] + np.arange(len(local))]] = first[same][:, None] + local
            mine = first[same][:, None] + np.arange(len(kinds))
            is_compute[mine], label[mine] = zip(*kinds, strict=True)
            place[mine] = self.position[same][:, None] * scale + np.arange(len(kinds))
            phase[mine] = found.phase[same][:, None]
        turns: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for group in self.overlapped:
            turns.setdefault(tuple(template_of[list(group)].tolist()), []).append(group)
        for members, groups in turns.items():
            who, i = np.asarray(_turns([[compute for compute, _ in templates[t][2]] for t in members])).T
            macros = np.asarray(groups)
            base = self.position[macros].min(axis=1) * scale
            place[first[macros[:, who]] + i] = base[:, None] + np.arange(len(i))
        parts = tuple((stage, kind, tuple(sets)) for (stage, kind), sets in sorted(self.parts.items()))
        return Opening(of, place, is_compute, phase, label, tuple(self.labels), parts, self.spans)

    def _keys(self, macros: list[int]) -> Iterator[tuple[int, int, int, bool, bytes]]:
        """Yield, for each macro, what is alike where the pieces of two are."""
        nodes, stage, phase, starts = self.dag.nodes, self.found.stage, self.found.phase, self.starts.tolist()
        inside = nodes.chunk[self.sorted].astype(np.int64) * 8 + nodes.phase[self.sorted]  # some may be recomputed
        for m, s, p in zip(macros, stage[macros].tolist(), phase[macros].tolist(), strict=True):
            table = id(self.opened[m]) if m in self.opened else 0
            yield s, p, table, m in self.in_overlap, inside[starts[m] : starts[m + 1]].tobytes()

    def _cut(self, m: int, table: Ints | None) -> tuple[Ints, list[tuple[bool, int]]]:
        """Return the piece of each of a macro's nodes (in sorted order), and (is compute, label) of each piece."""
        nodes = self.dag.nodes
        mine = self.sorted[self.starts[m] : self.starts[m + 1]].tolist()
        order = self._inner_order(mine)
        apart = m in self.in_overlap
        local = {n: i for i, n in enumerate(mine)}
        piece = np.zeros(len(mine), np.int32)
        groups: list[list[int]] = []
        current = None
        segments = self._segments(order, table)
        beside = (nodes.kind[order] == _COLLECTIVE) & (nodes.stream[order] > 0)
        for n, segment, comm in zip(order, segments, beside.tolist(), strict=True):
            token: Any = ("comm", n) if comm and apart else ("compute", segment)
            if token != current:
                groups.append([])
                current = token
            groups[-1].append(n)
            piece[local[n]] = len(groups) - 1
        names = self._names(groups, apart)
        single = len(groups) == 1
        stage, phase = int(self.found.stage[m]), Phase(int(self.found.phase[m]))
        kinds = [
            (compute, -1 if single else self._label(stage, phase, name, group))
            for (compute, name), group in zip(names, groups, strict=True)
        ]
        for group, (compute, label) in zip(groups, kinds, strict=True):
            if compute:
                computes = self._computes(group)
                chunks = frozenset(nodes.chunk[computes or group].tolist())
                self.spans[stage, phase, label] = self.spans.get((stage, phase, label), frozenset()) | chunks
        if not single:
            self.parts.setdefault((stage, phase.name), {})[self._variant(mine, piece, kinds)] = None
        return piece, kinds

    def _names(self, groups: list[list[int]], apart: bool) -> list[tuple[bool, str]]:
        """Return (is compute, name) of each piece; names differ within a macro, and between phases where they meet."""
        nodes = self.dag.nodes
        made: list[tuple[bool, str]] = []
        seen: set[tuple[int, int]] = set()
        for group in groups:
            computes = self._computes(group)
            seen.update(zip(nodes.phase[computes].tolist(), nodes.chunk[computes].tolist(), strict=True))
            names = list(dict.fromkeys(self.dag.chunks[c].name for c in nodes.chunk[computes or group].tolist()))
            name = names[0] if len(names) == 1 else f"{names[0]}-{names[-1]}"
            compute = bool(computes) or len(group) > 1 or not apart
            phase = Phase(int(nodes.phase[group[-1]]))
            if not compute:
                name += "" if phase is Phase.F else f".{phase.name}"
                name += ".out" if (int(phase), int(nodes.chunk[group[0]])) in seen else ".in"
            elif phase == _R:
                name += ".R"
            again = sum(other == name or other.startswith(f"{name}_") for _, other in made)
            made.append((compute, f"{name}_{again + 1}" if again else name))
        return made

    def _variant(self, mine: list[int], piece: Ints, kinds: list[tuple[bool, int]]) -> tuple[Part, ...]:
        """Return the pieces of a macro with what each reads."""
        local = dict(zip(mine, piece.tolist(), strict=True))
        takes, gives = set[int](), set[int]()
        reads: list[set[int]] = [set() for _ in kinds]
        for n, here in local.items():
            for u, role in self._edges(n, 0):
                if u not in local and role != _SAVED:
                    takes.add(here)
                elif u in local and local[u] != here:
                    reads[here].add(local[u])
            if any(role in _RESULTS for v, role in self._edges(n, 1) if v not in local):
                gives.add(here)
        return tuple(
            Part(label, not compute, tuple(sorted(reads[i])), i in takes, i in gives)
            for i, (compute, label) in enumerate(kinds)
        )

    def _edges(self, node: int, end: int) -> list[tuple[int, int]]:
        """Return (neighbour, role) of the edges that carry results into a node (end 0) or out of it (end 1)."""
        if not hasattr(self, "_sides"):
            edges = self.dag.edges
            carries = ~among(edges.role, (Role.TEMPORAL, Role.PARAMETER, Role.REDUCTION))
            self._sides: list[dict[int, list[tuple[int, int]]]] = []
            for near, far in ((edges.dst, edges.src), (edges.src, edges.dst)):
                mine = np.flatnonzero(carries & self.shown[near])
                held: dict[int, list[tuple[int, int]]] = {}
                for n, other, role in zip(
                    near[mine].tolist(), far[mine].tolist(), edges.role[mine].tolist(), strict=True
                ):
                    held.setdefault(n, []).append((other, role))
                self._sides.append(held)
        return self._sides[end].get(node, [])

    def _computes(self, group: list[int]) -> list[int]:
        """Return the compute nodes among some nodes."""
        return [n for n, kind in zip(group, self.dag.nodes.kind[group].tolist(), strict=True) if kind == _COMPUTE]

    def _segments(self, nodes: list[int], table: Ints | None) -> list[int]:
        """Return the segment of each node; a layer is recomputed as a whole, before its backward starts."""
        if table is None:
            return [0] * len(nodes)
        chunk = self.dag.nodes.chunk[nodes]
        found: list[int] = table[chunk].tolist()
        for i in np.flatnonzero(self.dag.nodes.phase[nodes] == _R).tolist():
            found[i] = int(table[np.flatnonzero(self.layer[:-1] == self.layer[chunk[i]])].min())
        return found

    def _label(self, stage: int, phase: Phase, name: str, group: list[int]) -> int:
        """Return the label of a piece; other pieces of the stage that have its name, but not its work, get a number."""
        nodes = self.dag.nodes
        again = (nodes.phase[group] == _R).tolist()
        work = frozenset(zip(again, nodes.chunk[group].tolist(), nodes.axis[group].tolist(), strict=True))
        way = phase if phase in (Phase.F, _R) else Phase.B  # a bucket has one list of labels for B, BI and BW
        number, text = 1, name
        while self.work.setdefault((stage, way, text), work) != work:
            number += 1
            text = f"{name}.{number}"
        return self.labels.setdefault(text, len(self.labels))

    def _inner_order(self, mine: list[int]) -> list[int]:
        """Return a macro's nodes in a topological order that follows the inner positions."""
        dag = self.dag
        if not hasattr(self, "_out"):
            edges = dag.edges
            of = self.found.of
            inner = self.shown[edges.src] & (of[edges.src] == of[edges.dst]) & (edges.role != Role.TEMPORAL)
            self._out: dict[int, list[int]] = {}
            for u, v in zip(edges.src[inner].tolist(), edges.dst[inner].tolist(), strict=True):
                self._out.setdefault(u, []).append(v)
            self._rank = inner_position(dag)
        degree = dict.fromkeys(mine, 0)
        out: dict[int, list[int]] = {}
        for n in mine:
            out[n] = self._out.get(n, [])
            for v in out[n]:
                degree[v] += 1
        import heapq

        ranks = dict(
            zip(mine, ((at, 0, n) for at, n in zip(self._rank[mine].tolist(), mine, strict=True)), strict=True)
        )
        for i in np.flatnonzero(dag.nodes.phase[mine] == _R).tolist():  # right before the backward of its layer
            chunk = int(dag.nodes.chunk[mine[i]])
            same = np.flatnonzero(self.layer[:-1] == self.layer[chunk])
            ranks[mine[i]] = len(dag.chunks) - int(same.max()), -1, chunk
        ready = [(ranks[n], n) for n in mine if degree[n] == 0]
        heapq.heapify(ready)
        order: list[int] = []
        while ready:
            _, n = heapq.heappop(ready)
            order.append(n)
            for v in out[n]:
                degree[v] -= 1
                if degree[v] == 0:
                    heapq.heappush(ready, (ranks[v], v))
        return order
