"""All pieces of a step in one table, and where the macro actions of an order lie on their rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from piper_core.ir.action import ActionKind
from piper_core.ir.dag import Floats, Ints
from piper_core.names import Collective, Phase
from piper_core.schedule.plan import CODE
from search.direct.order import Order
from search.direct.pieces import Pieces
from search.direct.shape import Step, shard_stream
from search.direct.sliced import Sliced

CODE_OF_PHASE = np.asarray([CODE[ActionKind(name)] for name in ("F", "B", "BI", "BW")], np.int64)
VERBS = np.asarray([[CODE[ActionKind(f"{verb}_{way}")] for way in "BF"] for verb in ("COMM", "ALL_TO_ALL")])
"""Codes of inner collectives on streams of their own: (all_to_all, ahead)."""
CUT, OPENED = 1, 2
"""Bits of a macro action's variant: cut where collectives of buckets need it, opened in an overlap group."""
VARIANTS = 4


@dataclass(frozen=True, slots=True)
class Table:
    """All pieces of a step in one table; ``start``, shape (phases, variants, S), is where those of a stage begin.

    Pieces are counted from the first of their macro action in what follows. By stage, shape (phases, variants, S):
    their ``count``; which one takes what comes in (``enter``), makes what goes out (``leave``), computes last
    (``final``). By bucket, (phases, variants, B): the ``first`` and the ``last`` that use it, and the
    one in which its gradient ``began``. By chunk, (variants, C):
    ``forward``, the one that computes its forward. By piece: ``code`` of its action, its ``queue`` (-1: compute) and
    what communication it is (``comm``, -1: none).
    """

    start: Ints
    count: Ints
    enter: Ints
    leave: Ints
    final: Ints
    first: Ints
    last: Ints
    began: Ints
    forward: Ints
    code: Ints
    queue: Ints
    comm: Ints


def table_of(step: Step, sliced: Sliced) -> Table:
    """Return the table of a step's pieces."""
    buckets, stages = step.buckets, step.stages
    start, count, enter, leave, final = np.zeros((5, 4, VARIANTS, stages.count), np.int64)
    first, last, began = np.zeros((3, 4, VARIANTS, len(buckets)), np.int64)
    forward = np.zeros((VARIANTS, len(stages.of)), np.int64)
    again, low = stages.again[buckets.parts], np.asarray(stages.ends[:-1])
    codes, queues, comms = list[Ints](), list[Ints](), list[Ints]()
    at = 0
    for phase, some in sliced.pieces.items():
        for variant, each in enumerate(some):
            here = phase, variant
            start[here], count[here], enter[here], leave[here] = at + each.first, each.count, each.enter, each.leave
            final[here] = each.of[low] - each.first
            at += len(each)
            base = each.first[buckets.stage]
            lows, highs = each.of[buckets.low] - base, each.of[buckets.high] - base
            began[here] = highs
            if phase is Phase.F:
                first[here], last[here] = lows, highs
                forward[variant] = each.of - each.first[stages.of]
            else:
                users = each.of[buckets.parts]
                users = np.where(again, np.minimum(users, each.repeat[buckets.parts]), users)
                first[here], last[here] = np.minimum.reduceat(users, buckets.start[:-1]) - base, lows
            code, queue, comm = _actions(step, phase, each)
            codes.append(code)
            queues.append(queue)
            comms.append(comm)
    columns = (np.concatenate(each) for each in (codes, queues, comms))
    return Table(start, count, enter, leave, final, first, last, began, forward, *columns)


def _actions(step: Step, phase: Phase, pieces: Pieces) -> tuple[Ints, Ints, Ints]:
    """Return the code, the queue and the communication of each piece of a set."""
    code = np.full(len(pieces.beside), CODE_OF_PHASE[phase])
    queue, comm = np.full(len(code), -1), np.full(len(code), -1)
    beside = np.flatnonzero(pieces.beside >= 0)
    if len(beside):
        nodes = step.nodes[phase]
        node = pieces.beside[beside]
        names = [step.streams.index(shard_stream(step.config, talk.shard)) for talk in nodes.talks]
        exchanges = [talk.exchange.collective is Collective.ALL_TO_ALL for talk in nodes.talks]
        ahead = nodes.again[node] | (phase is Phase.F)
        to_all = np.asarray(exchanges)[nodes.talk[node]]
        code[beside] = VERBS[to_all.astype(int), ahead.astype(int)]
        queue[beside] = np.asarray(names)[nodes.talk[node]] * (2 * len(step.rows) + 2)
        comm[beside] = nodes.comm[node]
    return code, queue, comm


@dataclass(slots=True)
class Macros:
    """Where the macro actions of an order lie among the units: their ``variant`` and first unit (``base``), and for
    each of their pieces its macro, its place in the table, and its place on its row."""

    variant: Ints
    base: Ints
    macro: Ints
    piece: Ints
    place: Floats


def macros_of(sliced: Sliced, order: Order, table: Table) -> Macros:
    """Place the macro actions of an order; members of an overlap group take turns."""
    variant = sliced.cut * CUT + sliced.overlapped * OPENED
    where = order.phase, variant, order.stage
    pieces = table.count[where]
    base = np.cumsum(pieces) - pieces
    macro = np.repeat(np.arange(len(order)), pieces)
    local = np.arange(len(macro)) - base[macro]
    scale = 2.0 * (int(pieces.max()) + 1)
    place = np.asarray(order.position[macro] * scale + local, np.float64)
    if sliced.overlapped.any():
        _take_turns(sliced, order, table, variant, base, place, scale)
    return Macros(variant, base, macro, table.start[where][macro] + local, place)


def _take_turns(
    sliced: Sliced, order: Order, table: Table, variant: Ints, base: Ints, place: Floats, scale: float
) -> None:
    """Place the pieces of overlap groups: members take turns, each as far as the share of its compute that it has done.

    Groups of the same macro actions are alike, and are placed together.
    """
    members = np.flatnonzero(sliced.overlapped)
    heads = members[order.turn[members] == 0]
    what = (order.phase[members] * VARIANTS + variant[members]) * int(order.stage.max() + 1) + order.stage[members]
    alike: dict[tuple[int, ...], list[int]] = {}
    kinds, at = what.tolist(), np.searchsorted(members, heads).tolist()
    for head, low, size in zip(heads.tolist(), at, order.among[heads].tolist(), strict=True):
        alike.setdefault(tuple(kinds[low : low + size]), []).append(head)
    for some in alike.values():
        parts = range(some[0], some[0] + int(order.among[some[0]]))
        starts = [int(table.start[order.phase[m], variant[m], order.stage[m]]) for m in parts]
        counts = [int(table.count[order.phase[m], variant[m], order.stage[m]]) for m in parts]
        shares, turns = list[Floats](), np.repeat(np.arange(len(counts)), counts)
        for start, count in zip(starts, counts, strict=True):
            computes = np.cumsum(table.queue[start : start + count] < 0)
            shares.append((2 * computes - 1) / (2 * computes[-1]))
        local = np.concatenate([np.arange(count) for count in counts])
        by = np.lexsort((local, turns, np.concatenate(shares)))
        first = np.asarray(some)
        units = (base[first][:, None] + np.arange(len(local))[by]).ravel()
        place[units] = (order.group[first][:, None] * scale + np.arange(len(local))).ravel()
