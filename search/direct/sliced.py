"""The macro actions of a step under an order in pieces: cut for collectives of buckets, opened in overlap groups."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from piper_core.ir.dag import Ints, Mask
from piper_core.names import Phase
from search.direct.kinds import Kinds
from search.direct.order import Order
from search.direct.overlap import Opened, StageNodes
from search.direct.pieces import Contents, PhaseNodes, Pieces, Stages, contents, cuts_of, opened_pieces, pieces_of
from search.direct.shape import Step


@dataclass(frozen=True, slots=True)
class Sliced:
    """``pieces[phase]`` are macro actions whole and cut (``cut`` (M,) says which are), and where the order has overlap
    groups in which one talks (``overlapped`` (M,) are their members), both opened."""

    pieces: dict[Phase, tuple[Pieces, ...]]
    cut: Mask
    overlapped: Mask

    def contents(self, kinds: Kinds, step: Step) -> Contents:
        """Return what all pieces take and hold, phase by phase, set by set, in a step of the same form."""
        found: list[Contents] = []
        for phase, some in self.pieces.items():
            known: dict[int, Contents] = {}  # what is nowhere cut is the same set twice
            for each in some:
                if id(each) not in known:
                    known[id(each)] = contents(kinds, step.stages, phase, step.nodes[phase], step.held, each)
                found.append(known[id(each)])
        return Contents(*map(np.concatenate, zip(*found, strict=True)))


def slice_step(kinds: Kinds, step: Step, order: Order, known: dict[StageNodes, Opened]) -> Sliced:
    """Return the macro actions of a step under an order in pieces; ``known`` remembers what was opened before."""
    stages = step.stages
    cut, overlapped = _cut(order, step.config.zero), _overlapped(order, step.nodes, stages)
    pieces: dict[Phase, tuple[Pieces, ...]] = {}
    for phase in order.phases:
        nodes = step.nodes[phase]
        segment = cuts_of(step.buckets, kinds, stages, step.config.zero, step.shared, phase)
        segments: list[Ints] = [np.zeros_like(segment), segment] if segment.any() else [segment]
        some = [pieces_of(kinds, stages, phase, each) for each in segments]
        some += some[-1:] * (len(some) % 2)
        mine = np.flatnonzero(overlapped & (order.phase == phase))
        for cuts in (False, True) if len(mine) else ():
            chosen = np.zeros(stages.count, np.bool_)
            chosen[order.stage[mine[cut[mine] == cuts]]] = True
            some.append(opened_pieces(kinds, stages, phase, nodes, segments[-1 if cuts else 0], chosen, known))
        pieces[phase] = tuple(some)
    return Sliced(pieces, cut, overlapped)


def _cut(order: Order, zero: int) -> Mask:
    """Return which macro actions are cut, shape (M,), since collectives of buckets need it: each under ZeRO-3, and
    after ZeRO-2's reductions; else the first forward of a stage and its last whole or weight backward."""
    cut: Mask = np.asarray([zero == 3, zero >= 2, zero == 3, zero >= 2])[order.phase]
    cut[order.first_of] = cut[order.last_of] = True
    return cut


def _overlapped(order: Order, nodes: dict[Phase, PhaseNodes], stages: Stages) -> Mask:
    """Return which macro actions are in an overlap group of which some member communicates inside, shape (M,)."""
    if not order.grouped:
        return np.zeros(len(order), np.bool_)
    talks = np.zeros((4, stages.count), np.bool_)
    for phase, found in nodes.items():
        talks[phase, stages.of[found.chunk[found.talk >= 0]]] = True
    group = np.arange(len(order)) - order.turn
    some = np.bincount(group, weights=talks[order.phase, order.stage], minlength=len(order)) > 0
    return np.asarray(some[group] & (order.among > 1))
