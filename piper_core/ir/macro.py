"""Macro actions: which nodes of one (row, stage, phase, microbatch) run as one fixed inner list."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from piper_core.errors import DirectiveError
from piper_core.ir.dag import Dag, Edges, Ints, Mask, among
from piper_core.ir.edit import compute_table, distinct
from piper_core.names import NodeKind, Phase, Role


@dataclass(frozen=True, slots=True)
class Macros:
    """``of[i]`` is the macro of node i (-1: none). Per macro, shape (k,): group, stage, phase, microbatch, and
    its ``first`` and ``last`` compute node in the fixed inner order (forward: by chunk; backward: reversed)."""

    of: Ints
    group: Ints
    stage: Ints
    phase: Ints
    microbatch: Ints
    first: Ints
    last: Ints

    def __len__(self) -> int:
        return len(self.group)

    def find(self) -> dict[tuple[int, int, int], int]:
        """Return the macro of each (stage, phase, microbatch); unique since a microbatch meets a stage once."""
        keys = zip(self.stage.tolist(), self.phase.tolist(), self.microbatch.tolist(), strict=True)
        return {key: i for i, key in enumerate(keys)}


def inner_position(dag: Dag) -> Ints:
    """Return where each node stands in the inner order of its macro: by chunk, reversed in a backward."""
    backward = among(dag.nodes.phase, (Phase.B, Phase.BI, Phase.BW))
    return np.where(backward, len(dag.chunks) - dag.nodes.chunk, dag.nodes.chunk)


def separate_recompute(dag: Dag) -> Mask:
    """Return, for each stage (last entry: untagged), whether an order names its R nodes.

    An R that no order names runs right before the backward of its layer, inside that macro.
    """
    edges = dag.edges
    named = np.zeros(dag.stages + 1, np.bool_)
    temporal = edges.role == Role.TEMPORAL
    ends = np.concatenate([edges.src[temporal], edges.dst[temporal]])
    ends = ends[dag.nodes.phase[ends] == Phase.R]
    named[dag.nodes.stage[ends]] = True
    return named


def macros(dag: Dag, separate: Mask | None = None) -> Macros:
    """Group compute nodes, and the collectives around them, by (row, stage, phase, microbatch).

    ``separate`` says for which stages R is a macro of its own (default: where an order names it).
    """
    nodes = dag.nodes
    inside = (nodes.kind == NodeKind.COMPUTE) | (
        (nodes.kind == NodeKind.COLLECTIVE) & (nodes.bucket < 0) & (nodes.chunk >= 0)
    )
    index = np.flatnonzero(inside)
    phase = nodes.phase[index]
    recompute = phase == Phase.R
    if recompute.any():
        recompute &= ~(separate_recompute(dag) if separate is None else separate)[nodes.stage[index]]
        table = compute_table(dag)
        whole = table[Phase.B][nodes.chunk[index], np.maximum(nodes.microbatch[index], 0)] >= 0
        phase = np.where(recompute, np.where(whole, int(Phase.B), int(Phase.BI)), phase)
    stages, splits = dag.stages + 1, max(1, dag.microbatches)
    key = nodes.group[index].astype(np.int64) + 1
    key = (key * stages + nodes.stage[index] + 1) * 8 + phase
    key = key * (splits + 1) + nodes.microbatch[index] + 1
    place = nodes.kind[index] * np.int64(len(dag.chunks) + 2) + inner_position(dag)[index]
    width = int(place.max(initial=0)) + 1
    order = np.argsort(key * width + place, kind="stable")
    ranked, by = key[order], index[order]
    change = np.diff(ranked, prepend=-1) != 0
    new = np.flatnonzero(change)
    of = np.full(len(nodes), -1, np.int32)
    of[by] = np.cumsum(change) - 1
    computes = np.add.reduceat((nodes.kind[by] == NodeKind.COMPUTE).astype(np.int32), new)
    first, last = by[new], by[new + computes - 1]
    return Macros(
        of,
        nodes.group[first],
        nodes.stage[first],
        phase[order][new].astype(np.int32),
        nodes.microbatch[first],
        first.astype(np.int32),
        last.astype(np.int32),
    )


def project(dag: Dag, of: Ints, edges: Edges | None = None) -> tuple[Ints, Ints]:
    """Return the distinct edges between different units, ``of[node]`` giving each node's unit (-1: none)."""
    table = dag.edges if edges is None else edges
    a, b = of[table.src], of[table.dst]
    keep = (a >= 0) & (b >= 0) & (a != b)
    key = distinct(a[keep].astype(np.int64) * (int(of.max(initial=0)) + 1) + b[keep])
    width = int(of.max(initial=0)) + 1
    return (key // width).astype(np.int32), (key % width).astype(np.int32)


def topological(n: int, src: Ints, dst: Ints) -> tuple[list[int], list[int]]:
    """Return a topological order of ``n`` units (Kahn, smallest first among ready runs) and the units on cycles."""
    order = np.argsort(src, kind="stable")
    starts = np.searchsorted(src[order], np.arange(n + 1)).tolist()
    targets = dst[order].tolist()
    degree = np.bincount(dst, minlength=n).tolist()
    ready = [i for i in range(n - 1, -1, -1) if degree[i] == 0]
    done: list[int] = []
    while ready:
        u = ready.pop()
        done.append(u)
        for v in targets[starts[u] : starts[u + 1]]:
            degree[v] -= 1
            if degree[v] == 0:
                ready.append(v)
    return done, [i for i in range(n) if degree[i] > 0]


def cycle(stuck: list[int], src: Ints, dst: Ints) -> list[int]:
    """Return one cycle among units that a topological sort could not place."""
    left = set(stuck)
    previous: dict[int, int] = {}
    for a, b in zip(src.tolist(), dst.tolist(), strict=True):
        if a in left and b in left:
            previous[b] = a
    at, seen = next(iter(previous), -1), dict[int, int]()
    path: list[int] = []
    while at not in seen and at >= 0:
        seen[at] = len(path)
        path.append(at)
        at = previous.get(at, -1)
    if at < 0:
        raise DirectiveError("no cycle among the units left over")
    return path[seen[at] :][::-1]
