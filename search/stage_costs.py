"""Seconds and bytes of the stages of a configuration, from the chunk table, without building a DAG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise

from piper_core.arch.chunk import Chunk, ModelChunks
from piper_core.arch.contract import contract, payload_bytes
from piper_core.mesh import Mesh
from piper_core.names import Axis, Phase, Region, ShardKind
from piper_core.schedule.grid import Layout, rows_of_stage
from search.cost.base import CostModel
from search.space import Configuration


@dataclass(frozen=True, slots=True)
class PhaseSeconds:
    """Seconds of one piece of a model for one microbatch: ``compute`` alone, and ``exchange`` (its inner
    collectives), for F, BI and BW, and B, whose exchanges are not BI's and BW's added up."""

    f: float
    bi: float
    bw: float
    f_exchange: float
    b_exchange: float
    bi_exchange: float
    bw_exchange: float
    r: float = 0.0
    r_exchange: float = 0.0

    def __add__(self, other: PhaseSeconds) -> PhaseSeconds:
        return PhaseSeconds(
            self.f + other.f, self.bi + other.bi, self.bw + other.bw, self.f_exchange + other.f_exchange,
            self.b_exchange + other.b_exchange, self.bi_exchange + other.bi_exchange,
            self.bw_exchange + other.bw_exchange, self.r + other.r, self.r_exchange + other.r_exchange,
        )  # fmt: skip

    def times(self, n: int) -> PhaseSeconds:
        """Return ``n`` of these, one after the other."""
        return PhaseSeconds(
            self.f * n, self.bi * n, self.bw * n, self.f_exchange * n, self.b_exchange * n, self.bi_exchange * n,
            self.bw_exchange * n, self.r * n, self.r_exchange * n,
        )  # fmt: skip

    def forward(self, *, exchange: bool = True) -> float:
        return self.f + (self.f_exchange if exchange else 0.0)

    def backward(self, *, exchange: bool = True) -> float:
        """Seconds of the whole backward, with recompute."""
        return self.bi + self.bw + self.r + (self.b_exchange + self.r_exchange if exchange else 0.0)

    def input_backward(self, *, exchange: bool = True) -> float:
        return self.bi + self.r + (self.bi_exchange + self.r_exchange if exchange else 0.0)

    def weight_backward(self, *, exchange: bool = True) -> float:
        return self.bw + (self.bw_exchange if exchange else 0.0)


def mesh_of(config: Configuration) -> Mesh:
    """Return the mesh of a configuration: pp outermost, tp innermost (its groups stay inside a node), cp next to it
    where there is any; dp is cut into edp x ep where experts are sharded."""
    data = (("dp", config.dp),) if config.ep == 1 else (("edp", config.dp // config.ep), ("ep", config.ep))
    context = (("cp", config.cp),) if config.cp > 1 else ()
    return Mesh((("pp", config.pp), *data, *context, ("tp", config.tp)))


class StageCosts:
    """Costs of the pieces of one model on one cluster, kept by what they depend on."""

    def __init__(self, model: ModelChunks, cost: CostModel) -> None:
        self.model, self.cost = model, cost
        layers = model.layers
        self.first = [c for c in model.chunks if c.layer < 0]
        self.last = [c for c in model.chunks if c.layer >= layers]
        self.kinds, self.kind_of = _layer_kinds(model)
        self.composition = lru_cache(maxsize=None)(self._composition)
        self.pieces = lru_cache(maxsize=None)(self._pieces)
        self.outer = lru_cache(maxsize=None)(self._outer)
        self.layers_per_stage = lru_cache(maxsize=None)(self._layers_per_stage)
        self.stages = lru_cache(maxsize=100_000)(self._stages)

    def _composition(self, counts: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return, for each stage, how many layers of each kind it holds."""
        ends = [0, *accumulate(counts)]
        return tuple(tuple(self.kind_of[a:b].count(kind) for kind in range(len(self.kinds))) for a, b in pairwise(ends))

    def _pieces(
        self, tp: int, ep: int, dp: int, b: int, sequence: bool, recompute: bool
    ) -> tuple[PhaseSeconds, tuple[PhaseSeconds, ...], PhaseSeconds]:
        """Return the costs of (embedding, one layer of each kind, head)."""

        def total(chunks: list[Chunk], recompute: bool) -> PhaseSeconds:
            costs = (self._chunk(chunk, tp, ep, dp, b, sequence, recompute) for chunk in chunks)
            return sum(costs, PhaseSeconds(*[0.0] * 9))

        return total(self.first, False), tuple(total(kind, recompute) for kind in self.kinds), total(self.last, False)

    def _outer(
        self, tp: int, ep: int, dp: int, b: int, sequence: bool
    ) -> tuple[PhaseSeconds, PhaseSeconds, PhaseSeconds]:
        """Return the costs of (embedding, the first and the last chunk of a layer together, head); of several kinds of
        layer the most, field by field."""

        def cost(chunk: Chunk) -> PhaseSeconds:
            return self._chunk(chunk, tp, ep, dp, b, sequence, False)

        ends = [cost(kind[0]) + cost(kind[-1]) for kind in self.kinds]
        most = PhaseSeconds(*(max(getattr(end, name) for end in ends) for name in PhaseSeconds.__slots__))
        return cost(self.first[0]), most, cost(self.last[-1])

    def _chunk(self, chunk: Chunk, tp: int, ep: int, dp: int, b: int, sequence: bool, recompute: bool) -> PhaseSeconds:
        expert = ep if chunk.region is Region.EXPERT else 1
        kinds = [ShardKind.SEQUENCE if sequence else ShardKind.TENSOR] if tp > 1 else []
        kinds += [ShardKind.EXPERT] if expert > 1 else []
        groups = {Axis.TENSOR: tuple(range(tp)), Axis.SEQUENCE: tuple(range(tp)),
                  Axis.EXPERT: tuple(i * tp for i in range(expert))}  # fmt: skip

        def compute(phase: Phase) -> float:
            return self.cost.compute_s(chunk, phase, b, tp, sequence, 1, expert)

        def exchange(phase: Phase) -> float:
            return sum(
                self.cost.collective_s(e.collective, payload_bytes(e, chunk) * b, groups[e.axis])
                for kind in kinds
                for e in contract(chunk.region, kind, phase)
            )

        seconds = [compute(phase) for phase in (Phase.F, Phase.BI, Phase.BW)]
        seconds += [exchange(phase) for phase in (Phase.F, Phase.B, Phase.BI, Phase.BW)]
        again = [compute(Phase.R), exchange(Phase.F)] if recompute else [0.0, 0.0]
        return PhaseSeconds(*seconds, *again)

    def _layers_per_stage(
        self, layout: Layout, pp: int, v: int, cuts: str, weights: tuple[float, float, float]
    ) -> tuple[int, ...]:
        """Return layers per stage; ``weights`` are seconds of (embedding, layer, head) for one microbatch."""
        stages = pp if layout is Layout.BIDIRECTIONAL else pp * v
        if cuts == "even":
            short, longer = divmod(self.model.layers, stages)
            return tuple(short + (s < longer) for s in range(stages))
        return balanced_rows(self.model.layers, layout, pp, v, weights)

    def _stages(
        self,
        layout: Layout,
        pp: int,
        v: int,
        cuts: str,
        tp: int,
        ep: int,
        dp: int,
        b: int,
        sequence: bool,
        recompute: bool,
    ) -> tuple[tuple[int, ...], tuple[PhaseSeconds, ...]]:
        """Return layers per stage, and the costs of each stage."""
        embed, kinds, head = self.pieces(tp, ep, dp, b, sequence, recompute)
        mean = sum(kinds[kind].forward() + kinds[kind].backward() for kind in self.kind_of) / len(self.kind_of)
        weights = embed.forward() + embed.backward(), mean, head.forward() + head.backward()
        counts = self.layers_per_stage(layout, pp, v, cuts, weights)
        held = self.composition(counts)
        times = {each: mixed(kinds, each) for each in set(held)}
        costs = [times[each] for each in held]
        costs[0] = costs[0] + embed
        costs[-1] = costs[-1] + head
        return counts, tuple(costs)

    def of(self, config: Configuration) -> tuple[tuple[int, ...], tuple[PhaseSeconds, ...]]:
        """Return (layers per stage, costs of each stage) of a configuration."""
        return self.stages(
            config.layout, config.pp, config.virtual_stages, config.cuts, config.tp, config.ep, config.dp,
            config.micro_batch, config.sequence_parallel, config.recompute == "full",
        )  # fmt: skip

    def message_s(self, config: Configuration) -> float:
        """Return the seconds of the quickest message between neighbouring rows (0 without a pipeline)."""
        if config.pp == 1:
            return 0.0
        size = self.kinds[0][-1].output_bytes * config.micro_batch / (config.tp if config.sequence_parallel else 1)
        row = config.dp * config.tp
        return self.cost.send_s(size, tuple(range(row)), tuple(range(row, 2 * row)))


def mixed(kinds: Sequence[PhaseSeconds], counts: Sequence[int]) -> PhaseSeconds:
    """Return the costs of some layers of each kind, one after the other."""
    parts = (kind.times(n) for kind, n in zip(kinds, counts, strict=True))
    return sum(parts, PhaseSeconds(*[0.0] * 9))


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
    and head allow.
    """
    embed, layer, head = weights
    stages = pp if layout is Layout.BIDIRECTIONAL else pp * v
    rows = rows_of_stage(layout, pp, v)
    share = [1.0 / len(held) for held in rows]  # of a stage's microbatches that a row meets
    load = [0.0] * pp
    counts = [1] * stages
    for s, held in enumerate(rows):
        for row in held:
            load[row] += share[s] * (layer + (embed if s == 0 else 0.0) + (head if s == stages - 1 else 0.0))
    extra = [0.0] * stages
    extra[0] += embed
    extra[-1] += head

    def after(s: int) -> tuple[float, float, int]:
        """Rank of giving stage s the next layer: its rows' load then, its own, itself."""
        return max(load[row] for row in rows[s]) + share[s] * layer, counts[s] * layer + extra[s], s

    waiting = [after(s) for s in range(stages)]
    heapify(waiting)
    for _ in range(layers - stages):
        while (now := after(waiting[0][2])) != waiting[0]:  # its row took a layer since: ranks only grow
            heapreplace(waiting, now)
        best = waiting[0][2]
        counts[best] += 1
        for row in rows[best]:
            load[row] += share[best] * layer
    return tuple(counts)
