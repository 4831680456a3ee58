"""Seconds and bytes of the stages of a configuration, from the chunk table, without building a DAG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise
from operator import add
from typing import NamedTuple

import numpy as np

from piper_core.arch.chunk import Chunk, ModelChunks
from piper_core.arch.contract import contract, exchanged_bytes
from piper_core.ir.dag import Ints
from piper_core.mesh import Mesh
from piper_core.names import Axis, Phase, Recompute, Region, ShardKind
from piper_core.schedule.grid import Layout, rows_of_stage
from search.cost.base import CostModel
from search.space import Configuration


class PhaseSeconds(NamedTuple):
    """Seconds of one piece of a model for one microbatch: ``compute`` alone, and ``exchange`` (its inner
    collectives), for F, BI and BW, and B, whose exchanges are not BI's and BW's added up. ``tensor``, ``expert`` and
    ``context`` are of the exchanges of a forward, a backward (whole, or BI and BW) and what is recomputed those over
    each axis, at least."""

    f: float
    bi: float
    bw: float
    f_exchange: float
    b_exchange: float
    bi_exchange: float
    bw_exchange: float
    r: float = 0.0
    r_exchange: float = 0.0
    tensor: float = 0.0
    expert: float = 0.0
    context: float = 0.0

    def __add__(self, other: PhaseSeconds) -> PhaseSeconds:  # type: ignore[override]  # pieces add up, not tuples
        return PhaseSeconds._make(map(add, self, other))

    def times(self, n: int) -> PhaseSeconds:
        """Return ``n`` of these, one after the other."""
        return PhaseSeconds._make([each * n for each in self])

    def forward(self, *, exchange: bool = True) -> float:
        return self.f + (self.f_exchange if exchange else 0.0)

    def backward(self, *, exchange: bool = True) -> float:
        """Seconds of the whole backward, with recompute."""
        return self.bi + self.bw + self.r + (self.b_exchange + self.r_exchange if exchange else 0.0)

    def input_backward(self, *, exchange: bool = True) -> float:
        return self.bi + self.r + (self.bi_exchange + self.r_exchange if exchange else 0.0)

    def weight_backward(self, *, exchange: bool = True) -> float:
        return self.bw + (self.bw_exchange if exchange else 0.0)


NOTHING = PhaseSeconds(*[0.0] * 9)


class StageTimes(NamedTuple):
    """Layers per stage, the costs of each stage, the different ones among those, that of the first stage first and that
    of the last one last, and which of them each stage has."""

    counts: tuple[int, ...]
    stages: tuple[PhaseSeconds, ...]
    distinct: tuple[PhaseSeconds, ...]
    number: Ints


class Shards(NamedTuple):
    """How the chunks of a model are divided, the batch aside."""

    tp: int
    ep: int
    cp: int
    sequence: bool


@cache
def inner_groups(tp: int, ep: int, cp: int) -> dict[Axis, tuple[int, ...]]:
    """Return the first group of each inner axis; tp is innermost, then cp, then ep, whatever is outermost."""
    tensor = tuple(range(tp))
    return {
        Axis.TENSOR: tensor,
        Axis.SEQUENCE: tensor,
        Axis.CONTEXT: tuple(i * tp for i in range(cp)),
        Axis.EXPERT: tuple(i * cp * tp for i in range(ep)),
    }


def shards_of(config: Configuration) -> Shards:
    """Return how a configuration divides chunks."""
    return Shards(config.tp, config.ep, config.cp, config.sequence_parallel)


def mesh_of(config: Configuration) -> Mesh:
    """Return the mesh of a configuration: tp innermost, so that its groups stay inside a node, cp next to it; dp is cut
    into edp x ep where experts are sharded. ``outer`` says whether pp or (e)dp is outermost."""
    return _mesh(config.pp, config.tp, config.dp, config.ep, config.cp, config.outer)


@lru_cache(maxsize=4096)
def _mesh(pp: int, tp: int, dp: int, ep: int, cp: int, outer: str) -> Mesh:
    context = (("cp", cp),) if cp > 1 else ()
    pipeline = (("pp", pp),)
    data = (("dp", dp),) if ep == 1 else (("edp", dp // ep),)
    inner = (("ep", ep),) if ep > 1 else ()
    first = pipeline + data if outer == "pp" else data + pipeline
    return Mesh((*first, *inner, *context, ("tp", tp)))


@dataclass(frozen=True, slots=True)
class Ranks:
    """Which ranks of a mesh belong together: for each row its ranks, and the first group over which its dense and its
    expert parameters are reduced."""

    rows: tuple[tuple[int, ...], ...]
    dense: tuple[tuple[int, ...], ...]
    experts: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=4096)
def ranks_of(mesh: Mesh) -> Ranks:
    """Return the groups of a mesh of :func:`mesh_of`."""

    def groups(*names: str) -> tuple[tuple[int, ...], ...]:
        return mesh.groups(*(name for name in names if name in mesh.names))

    def first(found: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        """The group of each row that holds the row's first rank."""
        starts = {group[0]: group for group in found}
        return tuple(starts[row[0]] for row in rows)

    rows = groups("dp", "edp", "ep", "cp", "tp")
    return Ranks(rows, first(groups("dp", "edp", "ep", "cp")), first(groups("dp", "edp", "cp")))


class StageCosts:
    """Costs of the pieces of one model on one cluster, kept by what they depend on."""

    def __init__(self, model: ModelChunks, cost: CostModel) -> None:
        self.model, self.cost = model, cost
        layers = model.layers
        self.first = [c for c in model.chunks if c.layer < 0]
        self.last = [c for c in model.chunks if c.layer >= layers]
        self.kinds, self.kind_of = _layer_kinds(model)
        self._messages: dict[tuple[object, ...], float] = {}
        self.composition = lru_cache(maxsize=None)(self._composition)
        self.pieces = lru_cache(maxsize=None)(self._pieces)
        self.repeats = lru_cache(maxsize=None)(self._repeats)
        self.repeated = lru_cache(maxsize=None)(self._repeated)
        self.outer = lru_cache(maxsize=None)(self._outer)
        self.layers_per_stage = lru_cache(maxsize=None)(self._layers_per_stage)
        self.weights = lru_cache(maxsize=None)(self._weights)
        self.mixed = lru_cache(maxsize=100_000)(self._mixed)
        self.stages = lru_cache(maxsize=100_000)(self._stages)

    def _composition(self, counts: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return, for each stage, how many layers of each kind it holds."""
        ends = [0, *accumulate(counts)]
        return tuple(tuple(self.kind_of[a:b].count(kind) for kind in range(len(self.kinds))) for a, b in pairwise(ends))

    def _pieces(self, shard: Shards, b: int) -> tuple[PhaseSeconds, tuple[PhaseSeconds, ...], PhaseSeconds]:
        """Return the costs of (embedding, one layer of each kind, head), nothing recomputed."""

        def total(chunks: list[Chunk]) -> PhaseSeconds:
            return sum((self._chunk(chunk, shard, b) for chunk in chunks), NOTHING)

        return total(self.first), tuple(total(kind) for kind in self.kinds), total(self.last)

    def _repeats(self, shard: Shards, b: int, policy: Recompute) -> tuple[PhaseSeconds, ...]:
        """Return what one layer of each kind takes to be recomputed."""

        def total(chunks: list[Chunk]) -> PhaseSeconds:
            return sum((self._repeat(chunk, shard, b, policy) for chunk in chunks), NOTHING)

        return tuple(total(kind) for kind in self.kinds)

    def _outer(self, shard: Shards, b: int) -> tuple[PhaseSeconds, PhaseSeconds, PhaseSeconds]:
        """Return the costs of (embedding, the first and the last chunk of a layer together, head); of several kinds of
        layer the most, field by field."""

        def cost(chunk: Chunk) -> PhaseSeconds:
            return self._chunk(chunk, shard, b)

        ends = [cost(kind[0]) + cost(kind[-1]) for kind in self.kinds]
        most = PhaseSeconds(*(max(getattr(end, name) for end in ends) for name in PhaseSeconds._fields))
        return cost(self.first[0]), most, cost(self.last[-1])

    def _compute(self, chunk: Chunk, shard: Shards, b: int, phase: Phase, policy: Recompute = Recompute.FULL) -> float:
        expert = shard.ep if chunk.region is Region.EXPERT else 1
        return self.cost.compute_s(chunk, phase, b, shard.tp, shard.sequence, shard.cp, expert, policy)

    def _exchange(
        self, chunk: Chunk, shard: Shards, b: int, phase: Phase, *, context_only: bool = False
    ) -> tuple[float, float, float]:
        """Return the seconds of a chunk's inner collectives over (tp, ep, cp); each moves what tokens its rank
        has."""
        groups = inner_groups(shard.tp, shard.ep, shard.cp)

        def seconds(kind: ShardKind) -> float:
            return sum(
                self.cost.collective_s(e.collective, exchanged_bytes(e, chunk, shard.tp, shard.cp) * b, groups[e.axis])
                * (self.cost.software.exposed(chunk.region, phase, e.collective) if phase is Phase.R else 1.0)
                for e in contract(chunk.region, kind, phase)
            )

        tensor = ShardKind.SEQUENCE if shard.sequence else ShardKind.TENSOR
        return (
            seconds(tensor) if shard.tp > 1 and not context_only else 0.0,
            seconds(ShardKind.EXPERT)
            if shard.ep > 1 and chunk.region is Region.EXPERT and not context_only else 0.0,
            seconds(ShardKind.CONTEXT) if shard.cp > 1 else 0.0,
        )  # fmt: skip

    def _chunk(self, chunk: Chunk, shard: Shards, b: int) -> PhaseSeconds:
        seconds = [self._compute(chunk, shard, b, phase) for phase in (Phase.F, Phase.BI, Phase.BW)]
        axes = [self._exchange(chunk, shard, b, phase) for phase in (Phase.F, Phase.B, Phase.BI, Phase.BW)]
        tensor, expert, context = (f + min(whole, bi + bw) for f, whole, bi, bw in zip(*axes, strict=True))
        (f, bi, bw), (f_ex, b_ex, bi_ex, bw_ex) = seconds, map(sum, axes)
        return PhaseSeconds(f, bi, bw, f_ex, b_ex, bi_ex, bw_ex, 0.0, 0.0, tensor, expert, context)

    def _repeat(self, chunk: Chunk, shard: Shards, b: int, policy: Recompute) -> PhaseSeconds:
        """Return R: all of a chunk with its collectives, or the attention core with those of context parallelism."""
        if policy is Recompute.SELECTIVE and chunk.region is not Region.ATTENTION:
            return NOTHING
        seconds = self._compute(chunk, shard, b, Phase.R, policy)
        tensor, expert, context = self._exchange(chunk, shard, b, Phase.R, context_only=policy is Recompute.SELECTIVE)
        talk = tensor + expert + context
        return NOTHING._replace(r=seconds, r_exchange=talk, tensor=tensor, expert=expert, context=context)

    def _layers_per_stage(
        self, layout: Layout, pp: int, v: int, cuts: str, weights: tuple[float, float, float]
    ) -> tuple[int, ...]:
        """Return layers per stage; ``weights`` are what (embedding, layer, head) take, to a thousandth of a layer."""
        stages = pp if layout is Layout.BIDIRECTIONAL else pp * v
        if cuts == "even":
            short, longer = divmod(self.model.layers, stages)
            return tuple(short + (s < longer) for s in range(stages))
        return balanced_rows(self.model.layers, layout, pp, v, weights)

    def _weights(self, shard: Shards, b: int, policy: str) -> tuple[float, float, float]:
        """Return what (embedding, layer, head) take by their mean layer, to a thousandth of it."""
        embed, kinds, head = self.pieces(shard, b)
        each: Sequence[PhaseSeconds] = kinds
        if policy != Recompute.NONE and not policy.isdecimal():
            each = [a + r for a, r in zip(kinds, self.repeats(shard, b, Recompute(policy)), strict=True)]
        (layers,) = self.composition((self.model.layers,))
        mean = sum(n * (kind.forward() + kind.backward()) for kind, n in zip(each, layers, strict=True)) / sum(layers)
        ends = embed.forward() + embed.backward(), head.forward() + head.backward()
        return round(ends[0] / mean, 3), 1.0, round(ends[1] / mean, 3)

    def counts(
        self, layout: Layout, pp: int, v: int, cuts: str, shard: Shards, b: int, policy: str
    ) -> tuple[int, ...]:  # fmt: skip
        """Return the layers of each stage of a cut."""
        return self.layers_per_stage(layout, pp, v, cuts, self.weights(shard, b, policy))

    def _stages(self, counts: tuple[int, ...], shard: Shards, b: int, policy: str) -> StageTimes:
        """Return the costs of stages of so many layers each."""
        embed, _, head = self.pieces(shard, b)
        pairs = list(zip(self.composition(counts), self.repeated(counts, policy), strict=True))
        how = Recompute.SELECTIVE if policy == Recompute.SELECTIVE else Recompute.FULL
        times = {pair: self.mixed(shard, b, how, *pair) for pair in set(pairs)}
        costs = [times[pair] for pair in pairs]
        costs[0] = costs[0] + embed
        costs[-1] = costs[-1] + head
        distinct = {id(each): each for each in costs}
        number = {at: i for i, at in enumerate(distinct)}
        return StageTimes(
            counts, tuple(costs), tuple(distinct.values()), np.asarray([number[id(c)] for c in costs], np.int32)
        )

    def _mixed(
        self, shard: Shards, b: int, policy: Recompute, held: tuple[int, ...], again: tuple[int, ...]
    ) -> PhaseSeconds:
        """Return the costs of so many layers of each kind, of which so many are recomputed."""
        return mixed(self.pieces(shard, b)[1], held) + mixed(self.repeats(shard, b, policy), again)

    def _repeated(self, counts: tuple[int, ...], policy: str) -> tuple[tuple[int, ...], ...]:
        """Return, for each stage, how many layers of each kind are recomputed: all, none, or its first ones."""
        most = 0 if policy == Recompute.NONE else int(policy) if policy.isdecimal() else self.model.layers
        starts = [0, *accumulate(counts)]
        return tuple(
            tuple(self.kind_of[a : a + min(n, most)].count(kind) for kind in range(len(self.kinds)))
            for a, n in zip(starts, counts, strict=False)
        )

    def of(self, config: Configuration) -> tuple[tuple[int, ...], tuple[PhaseSeconds, ...]]:
        """Return (layers per stage, costs of each stage) of a configuration."""
        return self.times(config)[:2]

    def times(self, config: Configuration) -> StageTimes:
        """Return the costs of a configuration's stages."""
        shard, b, policy = shards_of(config), config.micro_batch, config.recompute
        counts = self.counts(config.layout, config.pp, config.virtual_stages, config.cuts, shard, b, policy)
        return self.stages(counts, shard, b, policy)

    def message_s(self, config: Configuration) -> float:
        """Return the seconds of the quickest message between neighbouring rows (0 without a pipeline)."""
        degrees = config.pp, config.tp, config.dp, config.ep, config.cp, config.outer
        key = degrees, config.micro_batch, config.sequence_parallel
        known = self._messages.get(key)
        if known is None:
            known = self._messages[key] = self._message_s(config)
        return known

    def _message_s(self, config: Configuration) -> float:
        if config.pp == 1:
            return 0.0
        size = self.kinds[0][-1].output_bytes * config.micro_batch / config.cp
        size /= config.tp if config.sequence_parallel else 1
        return min(self.cost.send_s(size, a, b) for a, b in pairwise(ranks_of(mesh_of(config)).rows))


def mixed(kinds: Sequence[PhaseSeconds], counts: Sequence[int]) -> PhaseSeconds:
    """Return the costs of some layers of each kind, one after the other."""
    parts = (kind.times(n) for kind, n in zip(kinds, counts, strict=True))
    return sum(parts, NOTHING)


def _layer_kinds(model: ModelChunks) -> tuple[list[list[Chunk]], tuple[int, ...]]:
    """Return the chunks of one layer of each kind, and the kind of each layer."""
    layers: list[list[Chunk]] = [[] for _ in range(model.layers)]
    for chunk in model.chunks:
        if 0 <= chunk.layer < model.layers:
            layers[chunk.layer].append(chunk)
    known: dict[tuple[object, ...], int] = {}
    kinds: list[list[Chunk]] = []
    kind_of = []
    for chunks in layers:
        key = tuple((c.region, c.numel, c.forward.flops, c.saved) for c in chunks)
        if key not in known:
            known[key] = len(kinds)
            kinds.append(chunks)
        kind_of.append(known[key])
    return kinds, tuple(kind_of)


def balanced_rows(layers: int, layout: Layout, pp: int, v: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Return layers per stage such that the busiest row is as light as can be, at least one layer a stage.

    Layers are taken to weigh the same (their mean where they differ), so giving each next layer to the row that it
    leaves lightest is exact; rows then spread theirs over their stages, earlier stages no heavier where embedding
    and head allow. Rows that have the same stages are one.
    """
    (embed, layer, head), homes = weights, rows_of_stage(layout, pp, v)
    share = layer / len(homes[0])  # of a layer's microbatches, those that a row meets
    counts, extra = [1] * len(homes), [0.0] * len(homes)
    extra[0] += embed
    extra[-1] += head
    rows: dict[int, list[tuple[float, int]]] = {}  # a row's stages, the lightest first
    for s, home in enumerate(homes):
        rows.setdefault(min(home), []).append((layer + extra[s], s))
    waiting = []
    for held in rows.values():
        load = sum(share / layer * weight for weight, _ in held)
        heapify(held)
        waiting.append((load + share, held[0], held))
    heapify(waiting)
    for _ in range(layers - len(homes)):
        load, (_, s), held = waiting[0]
        counts[s] += 1
        heapreplace(held, (counts[s] * layer + extra[s], s))
        heapreplace(waiting, (load + share, held[0], held))
    return tuple(counts)
