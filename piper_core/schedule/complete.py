"""The total order of compute on each row: as given, or completed by the list scheduler."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from piper_core.errors import DirectiveError
from piper_core.ir.dag import Dag, Ints, Mask, among
from piper_core.ir.macro import Macros, topological
from piper_core.names import NodeKind, Phase, Role

if TYPE_CHECKING:
    from piper_core.schedule.lower import Costs


def compute_order(dag: Dag, found: Macros, costs: Costs, row_of_group: Ints) -> tuple[Ints, tuple[int, ...]]:
    """Return the position of each macro in its row, shape (k,), and the rows that the list scheduler completed.

    Raises:
        DirectiveError: the given order is cyclic; InfeasibleError: a memory limit cannot be met.
    """
    edges = dag.edges
    row = row_of_group[found.group]
    k = len(found)
    first, then = _turns(dag, found)
    if len(set(dag.ordered)) == len(dag.groups):
        temporal = edges.role == Role.TEMPORAL
        a, b = found.of[edges.src[temporal]], found.of[edges.dst[temporal]]
        keep = (a >= 0) & (b >= 0) & (a != b)
        done, stuck = topological(k, np.concatenate([a[keep], first]), np.concatenate([b[keep], then]))
        if stuck:
            raise DirectiveError("cyclic order between the actions of a row")
        return _positions(done, row), ()
    src, dst, message = _macro_edges(dag, found)
    src, dst = np.concatenate([src, first]), np.concatenate([dst, then])
    message = np.concatenate([message, np.zeros(len(first), np.bool_)])
    done, stuck = topological(k, src, dst)
    if stuck:
        raise DirectiveError(
            "cyclic order: " + ", ".join(_name(found, u) for u in stuck[:6]) + " wait for each other",
            hint="check the order directives of these rows against each other",
        )
    position = _positions(done, row)
    direct = set(zip(src[~message].tolist(), dst[~message].tolist(), strict=True))
    partial = _partial_rows(done, row.tolist(), direct)
    if not partial:
        return position, ()
    return _complete(dag, found, costs, row, src, dst, message), tuple(sorted(partial))


def _macro_edges(dag: Dag, found: Macros) -> tuple[Ints, Ints, Mask]:
    """Return the distinct edges between macros, those through a message marked (shape (e,) each)."""
    nodes, edges, of = dag.nodes, dag.edges, found.of
    a, b = of[edges.src], of[edges.dst]
    plain = (a >= 0) & (b >= 0) & (a != b)
    hop = edges.role == Role.MESSAGE
    send, recv = edges.src[hop], edges.dst[hop]
    producer = np.full(len(nodes), -1, np.int32)
    into = nodes.kind[edges.dst] == NodeKind.SEND
    producer[edges.dst[into]] = of[edges.src[into]]
    mate = np.full(len(nodes), -1, np.int32)
    mate[recv] = producer[send]
    outof = (nodes.kind[edges.src] == NodeKind.RECV) & (b >= 0)
    far, near = mate[edges.src[outof]], b[outof]
    width = len(found)
    key = np.concatenate([a[plain].astype(np.int64) * width + b[plain], far.astype(np.int64) * width + near])
    message = np.concatenate([np.zeros(int(plain.sum()), np.bool_), np.ones(len(far), np.bool_)])
    unique, index = np.unique(key, return_index=True)
    return (unique // width).astype(np.int32), (unique % width).astype(np.int32), message[index]


def _positions(order: list[int], row: Ints) -> Ints:
    """Return how many macros of the same row come before each, given a topological order of all."""
    sequence = np.asarray(order, np.int64)
    by_row = sequence[np.argsort(row[sequence], kind="stable")]
    starts = np.searchsorted(row[by_row], row[by_row])
    position = np.empty(len(row), np.int32)
    position[by_row] = np.arange(len(row)) - starts
    return position


def _turns(dag: Dag, found: Macros) -> tuple[Ints, Ints]:
    """Return edges between consecutive members of each overlap group: they take turns as they were named."""
    find = found.find() if dag.overlaps else {}
    pairs = [pair for group in dag.overlaps for pair in pairwise(find[key] for key in group if key in find)]
    table = np.asarray(pairs, np.int32).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _partial_rows(order: list[int], row: list[int], direct: set[tuple[int, int]]) -> set[int]:
    """Return the rows in which two neighbours of a topological order are not joined by an edge."""
    last: dict[int, int] = {}
    partial: set[int] = set()
    for u in order:
        before = last.get(row[u])
        if before is not None and (before, u) not in direct:
            partial.add(row[u])
        last[row[u]] = u
    return partial


def _complete(dag: Dag, found: Macros, costs: Costs, row: Ints, src: Ints, dst: Ints, message: Mask) -> Ints:
    from piper_core.schedule.list_problem import ListProblem
    from piper_core.schedule.list_scheduler import list_schedule

    k = len(found)
    inside = found.of >= 0
    seconds = np.bincount(found.of[inside], weights=costs.seconds[inside], minlength=k)
    hop_s = np.zeros(len(src))
    hop = dag.edges.role == Role.MESSAGE
    if hop.any() and message.any():
        hop_s[message] = float(np.median(costs.seconds[dag.edges.src[hop]]))
    held_by_node = np.zeros(len(dag)) if costs.hold_bytes is None else costs.hold_bytes
    hold = np.bincount(found.of[inside], weights=held_by_node[inside], minlength=k)
    forward = found.phase == Phase.F
    held = {
        (int(s), int(m)): float(h)
        for s, m, h in zip(found.stage[forward], found.microbatch[forward], hold[forward], strict=True)
    }
    ends = among(found.phase, (Phase.B, Phase.BW))
    keys = list(zip(found.stage.tolist(), found.phase.tolist(), found.microbatch.tolist(), strict=True))
    preds: list[list[tuple[int, float]]] = [[] for _ in range(k)]
    for a, b, delay in zip(src.tolist(), dst.tolist(), hop_s.tolist(), strict=True):
        preds[b].append((a, delay))
    rows = len(dag.groups)
    problem = ListProblem(
        rows=rows,
        row=row.tolist(),
        seconds=seconds.tolist(),
        preds=preds,
        hold_bytes=np.where(forward, hold, 0.0).tolist(),
        release_bytes=[held.get((s, m), 0.0) if e else 0.0 for (s, _, m), e in zip(keys, ends.tolist(), strict=True)],
        limit_bytes=list(costs.limit_bytes) if costs.limit_bytes else [float("inf")] * rows,
        filler=(found.phase == Phase.BW).tolist(),
        key=keys,
    )
    position = np.empty(k, np.int32)
    for ordered in list_schedule(problem, effort=costs.effort):
        position[ordered] = np.arange(len(ordered))
    return position


def _name(found: Macros, unit: int) -> str:
    return f"{found.stage[unit]}{Phase(int(found.phase[unit])).name}{found.microbatch[unit]}"
