"""Macro actions by stage and phase: their pieces, what each takes, holds and talks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from piper_core.ir.dag import Floats, Ints, Mask
from piper_core.names import Collective, Phase, Recompute
from search.direct.buckets import Buckets
from search.direct.kinds import Kinds
from search.direct.overlap import Opened, StageNodes, opened
from search.direct.prices import Talk
from search.simulator.lower import AXIS_KIND, COMM_KINDS


@dataclass(frozen=True, slots=True)
class Stages:
    """How chunks lie on stages: ``ends[s]`` to ``ends[s + 1]`` are the chunks of stage s; ``of`` (C,) their stage;
    ``again`` (C,) whether each is recomputed, ``policy`` how; ``way`` (S,) how each stage's row lies on nodes."""

    ends: tuple[int, ...]
    of: Ints
    again: Mask
    policy: Recompute
    way: Ints

    @property
    def count(self) -> int:
        """Number of stages."""
        return len(self.ends) - 1


@dataclass(frozen=True, slots=True)
class Pieces:
    """The macro actions of one phase, whole or cut into pieces.

    ``first`` and ``count`` (S,): the pieces of each stage. ``of`` (C,) is the piece of each chunk, ``repeat`` that of
    its recompute; ``opened_at`` that of each node of :class:`PhaseNodes` where some are opened. ``enter`` and ``leave``
    (S,) are the pieces, counted from the first, that take what comes in and make what goes out. ``beside``, shape (P,),
    is the collective that a piece is, a node (-1: it computes), and ``opened`` says of each stage how its pieces hang
    together (empty: one after the other).
    """

    first: Ints
    count: Ints
    of: Ints
    repeat: Ints
    enter: Ints
    leave: Ints
    beside: Ints
    opened: tuple[Opened | None, ...]
    opened_at: Ints | None = None

    def __len__(self) -> int:
        return len(self.beside)


class Contents(NamedTuple):
    """What pieces take and hold, shape (P,): ``seconds`` with all collectives inside; ``start_bytes``, ``end_bytes``
    and ``late_bytes`` are changes of activations when one starts, when its results are there, and after it;
    ``workspace`` and ``recomputed`` the largest transients of a kernel and of a layer that is whole again, ``gathered``
    what inner collectives gather."""

    seconds: Floats
    start_bytes: Floats
    end_bytes: Floats
    late_bytes: Floats
    workspace: Floats
    recomputed: Floats
    gathered: Floats


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of each chunk for one microbatch on one rank, shape (C,): what a forward leaves (``kept``), and would leave
    without recompute (``saved``), ``stash`` from BI to BW, ``workspace`` of its backward."""

    kept: Floats
    saved: Floats
    stash: Floats
    workspace: Floats


@dataclass(frozen=True, slots=True)
class PhaseNodes:
    """What runs in one phase for one microbatch, in the order of the DAG's nodes: chunk, seconds, bytes gathered (0 for
    compute and reductions), kind of communication and which of ``talks`` it is (-1: compute), whether it is
    recomputed."""

    chunk: Ints
    seconds: Floats
    gathered: Floats
    comm: Ints
    talk: Ints
    again: Mask
    talks: tuple[Talk, ...]


def cuts_of(buckets: Buckets, kinds: Kinds, stages: Stages, zero: int, shared: Mask, phase: Phase) -> Ints:
    """Return the segment of each chunk where macro actions of a phase are cut, shape (C,).

    A cut lies before the first user of a bucket that is gathered, and after the last of one that is reduced.
    ``shared`` (B,) says which buckets more than one rank holds.
    """
    chunks = len(kinds.of)
    at: list[Ints] = []
    low, high = buckets.low[shared], buckets.high[shared]
    if phase is Phase.F and zero:
        at.append(low)
    if phase in (Phase.B, Phase.BI) and zero == 3:
        at.append(high)
    if phase in (Phase.B, Phase.BW):
        at.append(low - 1)
    mark = np.zeros(chunks + 1, np.int32)
    if at:
        mark[np.concatenate(at)] = 1
    starts = np.asarray(stages.ends[:-1])
    if phase is Phase.F:
        mark[starts] = 0
        total = np.cumsum(mark[:-1])
        return np.asarray(total - total[starts][stages.of])
    lasts = np.asarray(stages.ends[1:]) - 1
    mark[lasts] = 0
    total = np.cumsum(mark[:-1][::-1])[::-1]
    return np.asarray(total - total[lasts][stages.of])


def phase_nodes(
    kinds: Kinds, stages: Stages, phase: Phase, compute: Floats, talks: tuple[Talk, ...], again: Floats,
    repeated: tuple[Talk, ...],
) -> PhaseNodes:  # fmt: skip
    """Return what runs in a phase; ``compute`` and ``again`` (the recompute's) are seconds by kind, ``repeated`` what a
    recompute communicates."""
    each, step = (*talks, *repeated), 1 if phase is Phase.F else -1
    parts: list[tuple[Ints, int]] = [(np.arange(len(kinds.of))[::step], -1)]
    parts += [(kinds.regions[talk.region][::step], i) for i, talk in enumerate(talks)]
    first = len(parts)
    if phase in (Phase.B, Phase.BI) and stages.policy is not Recompute.NONE:
        parts.append((np.flatnonzero(stages.again), -1))
        for i, talk in enumerate(repeated):
            mine = kinds.regions[talk.region]
            parts.append((mine[stages.again[mine]], len(talks) + i))
    sizes = [len(mine) for mine, _ in parts]
    chunk, number = np.concatenate([mine for mine, _ in parts]), np.repeat([i for _, i in parts], sizes)
    rerun = np.arange(len(chunk)) >= sum(sizes[:first])
    kind, none = kinds.of[chunk], np.zeros((1, len(compute)))
    ways = len(each[0].seconds) if each else 1
    line = np.where(number < 0, rerun, 2 + number * ways + (stages.way[stages.of[chunk]] if ways > 1 else 0))
    seconds = np.concatenate([[compute, again], *(talk.seconds for talk in each)])[line, kind]
    moves = [talk.bytes if talk.exchange.collective is not Collective.ALL_REDUCE else none[0] for talk in each]
    comm = np.asarray([*(AXIS_KIND[int(talk.exchange.axis)] for talk in each), -1])[number]
    return PhaseNodes(chunk, seconds, np.asarray([*moves, none[0]])[number, kind], comm, number, rerun, each)


def pieces_of(kinds: Kinds, stages: Stages, phase: Phase, segment: Ints) -> Pieces:
    """Return the pieces of a phase's macro actions, cut where ``segment`` (C,) steps."""
    starts, lasts = np.asarray(stages.ends[:-1]), np.asarray(stages.ends[1:]) - 1
    count = segment[lasts if phase is Phase.F else starts] + 1
    first = np.cumsum(count) - count
    of = first[stages.of] + segment
    repeat = of[kinds.last_of_layer]  # a layer is recomputed as a whole, before its backward starts
    ends = np.zeros_like(count), count - 1
    beside = np.full(int(count.sum()), -1)
    return Pieces(first, count, of, repeat, *ends, beside, ())


def opened_pieces(
    kinds: Kinds, stages: Stages, phase: Phase, nodes: PhaseNodes, segment: Ints, chosen: Mask,
    known: dict[StageNodes, Opened],
) -> Pieces:  # fmt: skip
    """Return the pieces of the macro actions of a phase in overlap groups; only those of ``chosen`` stages are opened.

    ``known`` remembers what was opened before.
    """
    count, (enter, leave) = np.ones(stages.count, np.int64), np.zeros((2, stages.count), np.int64)
    local = np.zeros(len(nodes.chunk), np.int64)
    stage_of = stages.of[nodes.chunk]
    before = tuple(talk.exchange.before for talk in nodes.talks)
    beside: list[Ints] = []
    made: list[Opened | None] = []
    for s in range(stages.count):
        if not chosen[s]:
            beside.append(np.full(1, -1))
            made.append(None)
            continue
        mine = np.flatnonzero(stage_of == s)
        low, high = stages.ends[s], stages.ends[s + 1]
        last = kinds.last_of_layer[low:high]
        columns = nodes.chunk[mine] - low, nodes.talk[mine], nodes.again[mine]
        chunk, talk, again = (tuple(column.tolist()) for column in columns)
        cut, repeat_cut, ends = (tuple(each.tolist()) for each in (segment[low:high], segment[last], last - low))
        at = StageNodes(
            phase, chunk, talk, again, before, cut, repeat_cut, ends,
            tuple((u - low, v - low) for u, v in kinds.edges_from(low, high)), stages.policy is Recompute.FULL,
            high == len(kinds.of),
        )  # fmt: skip
        found = known.get(at)
        if found is None:
            found = known[at] = opened(at)
        local[mine] = found.piece
        count[s], enter[s], leave[s] = len(found.talk), found.enter, found.exit
        beside.append(np.asarray([mine[node] if node >= 0 else -1 for node in found.talk]))
        made.append(found)
    first = np.cumsum(count) - count
    where = first[stage_of] + local
    computes = nodes.talk < 0
    of, repeat = np.zeros(len(kinds.of), np.int64), np.zeros(len(kinds.of), np.int64)
    of[nodes.chunk[computes & ~nodes.again]] = where[computes & ~nodes.again]
    repeat[:] = of
    repeat[nodes.chunk[computes & nodes.again]] = where[computes & nodes.again]
    return Pieces(first, count, of, repeat, enter, leave, np.concatenate(beside), tuple(made), where)


def contents(kinds: Kinds, stages: Stages, phase: Phase, nodes: PhaseNodes, held: Held, pieces: Pieces) -> Contents:
    """Return what the pieces of a phase take and hold."""
    size, of, repeat = len(pieces), pieces.of, pieces.repeat
    where = pieces.opened_at
    if where is None:
        where = np.where(nodes.again, repeat[nodes.chunk], of[nodes.chunk])

    def total(at: Ints, weights: Floats) -> Floats:
        return np.bincount(at, weights=weights, minlength=size).astype(np.float64)

    def most(at: Ints, weights: Floats) -> Floats:
        found = np.zeros(size)
        np.maximum.at(found, at, weights)
        return found

    none = np.zeros(size)
    start, end, late, workspace, recomputed = none, none, none, none, none
    if phase is Phase.F:
        start = total(of, held.kept)
    elif phase is Phase.BW:
        late = total(of, -held.stash)
    else:
        gone = held.kept
        if stages.policy is not Recompute.NONE:
            apart, extra = stages.again & (repeat != of), held.saved - held.kept
            start, gone = total(repeat[apart], extra[apart]), np.where(apart, held.saved, gone)
            some, layers = np.flatnonzero(stages.again & ~apart & (extra > 0)), int(kinds.layer.max()) + 2
            sums = np.bincount(of[some] * layers + kinds.layer[some] + 1, weights=extra[some]).astype(np.float64)
            used = np.flatnonzero(sums)
            recomputed = most(used // layers, sums[used])
        end = total(of, held.stash - gone if phase is Phase.BI else -gone)
        workspace = most(of, held.workspace)
    seconds, gathered = total(where, nodes.seconds), most(where, nodes.gathered)
    return Contents(seconds, start, end, late, workspace, recomputed, gathered)


def inner_seconds(nodes: PhaseNodes, stages: Stages) -> Floats:
    """Return the seconds of a macro action's inner collectives by stage and kind, shape (S, kinds)."""
    talking = np.flatnonzero(nodes.comm >= 0)
    kinds = len(COMM_KINDS)
    cell = stages.of[nodes.chunk[talking]] * kinds + nodes.comm[talking]
    found = np.bincount(cell, weights=nodes.seconds[talking], minlength=stages.count * kinds)
    return found.astype(np.float64).reshape(-1, kinds)
