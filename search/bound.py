"""Lower bounds on step time and peak memory, before anything is built.

Both hold for every order of the actions and every assignment of streams of a configuration (level 1), or for the
order that its family emits (level 2, by replaying the grid). A configuration whose bound is worse than the best
found so far cannot win.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import accumulate

from piper_core.arch.chunk import Chunk, Saved
from piper_core.ir.action import ActionKind, Slot
from piper_core.names import Collective, Phase
from piper_core.schedule.families import FAMILIES, get_family
from piper_core.schedule.grid import Grid, Layout, rows_of_stage
from piper_core.schedule.span import evaluate
from search.cost.base import CostModel
from search.space import Configuration
from search.stage_costs import PhaseSeconds, StageCosts

COMPUTE_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 2, 4, 12
"""Bytes a parameter: bf16 weight; fp32 accumulated gradient; fp32 master weight and two Adam moments."""
OVERLAPPING = ("dualpipev", "dualpipe")
"""Families whose overlap groups may hide the collectives inside a forward or backward."""


@dataclass(frozen=True, slots=True)
class RowParameters:
    """Parameters that one rank of a row holds when whole: dense ones, and sharded experts."""

    dense: float
    expert: float

    def over(self, dense: int, expert: int) -> float:
        """Return the parameters left on a rank when each class is sharded over its own group."""
        return self.dense / dense + self.expert / expert

    def __add__(self, other: RowParameters) -> RowParameters:
        return RowParameters(self.dense + other.dense, self.expert + other.expert)


@dataclass(slots=True)
class Shape:
    """What all configurations that differ in schedule, ZeRO stage and order alone have in common."""

    counts: tuple[int, ...]
    stages: tuple[PhaseSeconds, ...]
    numel: list[RowParameters]
    saved: list[float]
    mine: tuple[tuple[int, ...], ...]
    least_saved: list[float]
    message_s: float
    static: dict[int, list[float]] = field(default_factory=dict)
    ends: dict[tuple[int, bool], list[tuple[float, float, float]]] = field(default_factory=dict)
    busy: dict[tuple[bool, bool], list[tuple[float, float, float]]] = field(default_factory=dict)


class Bounds:
    """Bounds of all configurations of one model on one cluster."""

    def __init__(self, costs: StageCosts, cost: CostModel, context_bytes: float) -> None:
        self.costs, self.cost, self.context_bytes = costs, cost, context_bytes
        self.pieces = [costs.first, costs.layer, costs.last]
        self.numel = lru_cache(maxsize=None)(self._numel)
        self.saved = lru_cache(maxsize=None)(self._saved)
        self._shapes: dict[tuple[object, ...], Shape] = {}

    # what a row holds ----------------------------------------------------------------------------------------------

    def _numel(self, tp: int, ep: int) -> tuple[RowParameters, ...]:
        """Return the parameters of (embedding, one layer, head) on one rank."""
        found = []
        for chunks in self.pieces:
            dense = expert = 0.0
            for parameter in (p for chunk in chunks for p in chunk.parameters):
                share = parameter.numel / (tp if parameter.tensor else 1)
                if parameter.expert and ep > 1:
                    expert += share / ep
                else:
                    dense += share
            found.append(RowParameters(dense, expert))
        return tuple(found)

    def _saved(self, tp: int, sequence: bool, recompute: bool) -> tuple[float, ...]:
        """Return the bytes that (embedding, one layer, head) keep of one sequence from F to the backward."""

        def kept(chunks: list[Chunk], full: bool) -> float:
            held = chunks[:1] if full else chunks
            total = sum(((c.saved_full if full else c.saved) for c in held), Saved())
            return total.sharded / tp + total.replicated / (tp if sequence else 1)

        return tuple(kept(chunks, recompute and i == 1) for i, chunks in enumerate(self.pieces))

    def shape(self, config: Configuration) -> Shape:
        """Return what a configuration shares with others (kept)."""
        layout = config.layout
        key = (layout, config.pp, config.virtual_stages, config.cuts, config.tp, config.ep, config.dp,
               config.micro_batch, config.sequence_parallel, config.recompute)  # fmt: skip
        known = self._shapes.get(key)
        if known is not None:
            return known
        counts, stages = self.costs.of(config)
        embed, layer, head = self.numel(config.tp, config.ep)
        numel = [RowParameters(layer.dense * n, layer.expert * n) for n in counts]
        numel[0] = numel[0] + embed
        numel[-1] = numel[-1] + head
        first, each, last = self.saved(config.tp, config.sequence_parallel, config.recompute == "full")
        saved = [each * n for n in counts]
        saved[0] += first
        saved[-1] += last
        saved = [size * config.micro_batch for size in saved]
        mine = stages_of_row(layout, config.pp, config.virtual_stages)
        least = [min(saved[s] for s in held) for held in mine]
        shape = Shape(counts, stages, numel, saved, mine, least, self.costs.message_s(config))
        self._shapes[key] = shape
        return shape

    # memory --------------------------------------------------------------------------------------------------------

    def static_bytes(self, config: Configuration) -> list[float]:
        """Return parameters, gradients and optimiser state of one rank of each row, buffers left out."""
        shape = self.shape(config)
        known = shape.static.get(config.zero)
        if known is None:
            copies = 2 if config.layout is Layout.BIDIRECTIONAL else 1
            dense, expert = config.dp * copies, config.dp // config.ep * copies
            known = []
            for held in shape.mine:
                whole = sum(shape.numel[s].over(1, 1) for s in held)
                part = sum(shape.numel[s].over(dense, expert) for s in held)
                known.append(
                    COMPUTE_BYTES * (part if config.zero >= 3 else whole)
                    + GRADIENT_BYTES * (part if config.zero >= 2 else whole)
                    + OPTIMIZER_BYTES * (part if config.zero >= 1 else whole)
                )
            shape.static[config.zero] = known
        return known

    def memory_floor(self, config: Configuration) -> float:
        """Return bytes that the fullest row needs at least: static state, and activations of as many microbatches as
        its family keeps alive, each no larger than the smallest stage of the row."""
        shape = self.shape(config)
        alive = alive_chunks(config.schedule, config.pp, config.num_microbatches, config.virtual_stages)
        rows = zip(self.static_bytes(config), alive, shape.least_saved, strict=True)
        return max(static + n * least for static, n, least in rows) + self.context_bytes

    def memory_of_order(self, config: Configuration, grid: Grid) -> float:
        """Return bytes that the fullest row needs at least under the order of ``grid`` (level 2)."""
        saved = self.shape(config).saved
        worst = 0.0
        for static, slots in zip(self.static_bytes(config), grid.rows, strict=True):
            worst = max(worst, static + _peak(slots, saved))
        return worst + self.context_bytes

    # time ----------------------------------------------------------------------------------------------------------

    def time_bound(self, config: Configuration) -> float:
        """Return seconds that a step takes at least, whatever the order and the streams (level 1).

        A row is busy with its own work; it starts after the forwards of the stages before its first, and, where
        the backward is whole, the backwards of those stages follow its last action.
        """
        overlapping, split = config.schedule in OVERLAPPING, FAMILIES[config.schedule].splits_backward
        m = config.num_microbatches
        share = m / 2 if config.layout is Layout.BIDIRECTIONAL else m
        tails = not split and config.layout is Layout.LOOP
        best = 0.0
        busy = self._busy(config, overlapping, split)
        for (head, work, tail), (floor, late, update) in zip(busy, self._ends(config, split), strict=True):
            best = max(best, max(head + share * work + max(tail if tails else 0.0, late), floor) + update)
        return best

    def _busy(self, config: Configuration, overlapping: bool, split: bool) -> list[tuple[float, float, float]]:
        """Return, for each row, (seconds before it can start, work of one microbatch, seconds after its last)."""
        shape = self.shape(config)
        known = shape.busy.get((overlapping, split))
        if known is None:
            exchange = not overlapping
            forward = [s.forward(exchange=exchange) for s in shape.stages]
            backward = [_backward(s, split, exchange) for s in shape.stages]
            before = [0.0, *accumulate(f + shape.message_s for f in forward)]
            after = [0.0, *accumulate(s.backward() + shape.message_s for s in shape.stages)]
            known = []
            for held in shape.mine:
                talk = sum(s.f_exchange + min(s.b_exchange, s.bi_exchange) for s in (shape.stages[s] for s in held))
                work = max(sum(forward[s] + backward[s] for s in held), talk)
                known.append((before[min(held)], work, after[min(held)]))
            shape.busy[overlapping, split] = known
        return known

    def _ends(self, config: Configuration, split: bool) -> list[tuple[float, float, float]]:
        """Return, for each row, what data parallelism and the update add at least: (seconds of its busiest collective
        stream, seconds of reduction that no compute of the row can hide, seconds of the update)."""
        shape = self.shape(config)
        known = shape.ends.get((config.zero, split))
        if known is None:
            known = [self._end(config, shape, held, split) for held in shape.mine]
            shape.ends[config.zero, split] = known
        return known

    def _end(
        self, config: Configuration, shape: Shape, held: tuple[int, ...], split: bool
    ) -> tuple[float, float, float]:
        m, zero = config.num_microbatches, config.zero
        degrees = (config.dp, config.dp // config.ep) if zero else (1, 1)
        both = config.layout is Layout.BIDIRECTIONAL
        own = sum(shape.numel[s].over(*degrees) for s in held) / (2 if both and zero else 1)
        update = self.cost.update_s(own)
        if config.dp == 1 or both:
            return 0.0, 0.0, update

        def total(kind: Collective, width: int) -> float:
            return sum(self._sync(shape.numel[s], config, kind, width) for s in held)

        if zero >= 2:
            reduce = m * total(Collective.REDUCE_SCATTER, COMPUTE_BYTES)
            gather = total(Collective.ALL_GATHER, COMPUTE_BYTES) * (2 * m if zero == 3 else 1)
            return max(reduce, gather), 0.0, update
        reduce = total(Collective.REDUCE_SCATTER if zero else Collective.ALL_REDUCE, GRADIENT_BYTES)
        last = max((shape.stages[s].weight_backward() if split else shape.stages[s].backward()) for s in held)
        return 0.0, max(0.0, reduce / len(held) - last), update

    def _sync(self, held: RowParameters, config: Configuration, kind: Collective, width: int) -> float:
        """Return the seconds of one collective of all of a stage's parameters, ``width`` bytes each, as one bucket."""
        span, tp = config.dp * config.tp, config.tp
        seconds = 0.0
        for numel, step in ((held.dense, tp), (held.expert, config.ep * tp)):
            if numel and span > step:
                seconds += self.cost.collective_s(kind, numel * width, tuple(range(0, span, step)))
        return seconds

    def replay(self, config: Configuration, grid: Grid) -> float:
        """Return seconds that a step takes at least under the order of ``grid`` (level 2): the compute-only longest
        path with the quickest messages, and what the end of the step adds.

        Members of an overlap group take turns in the plan, piece by piece, which no order of whole actions bounds:
        families that overlap keep their level 1 bound.
        """
        least = self.time_bound(config)
        if config.schedule in OVERLAPPING:
            return least
        shape, split = self.shape(config), FAMILIES[config.schedule].splits_backward
        seconds: dict[tuple[int, Phase], float] = {}
        for s, piece in enumerate(shape.stages):
            seconds[s, Phase.F] = piece.forward()
            seconds[s, Phase.B] = piece.backward()
            seconds[s, Phase.BI] = piece.input_backward()
            seconds[s, Phase.BW] = piece.weight_backward()
        span = evaluate(grid, seconds, p2p_s=shape.message_s)
        least = max(least, span.makespan_s)
        for end, (floor, late, update) in zip(span.last_end_s, self._ends(config, split), strict=True):
            least = max(least, max(end + late, floor) + update)
        return least

    # partial assignments -------------------------------------------------------------------------------------------

    def partial(self, part: Configuration) -> tuple[float, float]:
        """Return (seconds, bytes) at least of every schedule, ZeRO stage and cut at the degrees of ``part``: the mean
        row's work, and its state under ZeRO-3 (two copies of each stage, of which ZeRO-1 shards the optimizer alone,
        take no less)."""
        embed, layer, head = self.costs.pieces(
            part.tp, part.ep, part.dp, part.micro_batch, part.sequence_parallel, part.recompute == "full"
        )
        whole = embed + layer.times(self.costs.model.layers) + head
        compute = whole.forward(exchange=False) + whole.backward(exchange=False)
        talk = whole.f_exchange + min(whole.b_exchange, whole.bi_exchange)
        seconds = part.num_microbatches * max(compute, talk) / part.pp
        held = [RowParameters(p.dense, p.expert) for p in self.numel(part.tp, part.ep)]
        layers = self.costs.model.layers
        dense = held[0].dense + layers * held[1].dense + held[2].dense
        expert = held[0].expert + layers * held[1].expert + held[2].expert
        least = RowParameters(dense, expert).over(part.dp, part.dp // part.ep)
        size = (COMPUTE_BYTES + GRADIENT_BYTES + OPTIMIZER_BYTES) * least / part.pp
        return seconds, size + self.context_bytes


def _backward(piece: PhaseSeconds, split: bool, exchange: bool) -> float:
    if split:
        return piece.input_backward(exchange=exchange) + piece.weight_backward(exchange=exchange)
    return piece.backward(exchange=exchange)


@cache
def stages_of_row(layout: Layout, pp: int, v: int) -> tuple[tuple[int, ...], ...]:
    """Return the stages that each row holds."""
    held: list[list[int]] = [[] for _ in range(pp)]
    for stage, rows in enumerate(rows_of_stage(layout, pp, v)):
        for row in rows:
            held[row].append(stage)
    return tuple(map(tuple, held))


@cache
def alive_chunks(schedule: str, pp: int, m: int, v: int) -> tuple[int, ...]:
    """Return how many (stage, microbatch) each row keeps alive at least at its fullest, between F and B or BI.

    Beyond 4 p microbatches only GPipe's number grows, so no longer grid is walked.
    """
    if schedule == "gpipe":
        return (m,) * pp
    family = get_family(schedule)
    legal = family.microbatches(pp, v)
    shorter = m if m <= 4 * pp or 4 * pp not in legal else 4 * pp
    ones = [1.0] * (pp * v)
    return tuple(int(_peak(row, ones)) for row in family.grid(pp, shorter, v).rows)


def _peak(slots: Sequence[Slot], saved: Sequence[float]) -> float:
    """Return the most that a row holds at once between F and B or BI; in an overlap group what ends counts first."""
    now = peak = 0.0
    for slot in slots:
        for action in slot:
            if action.kind in (ActionKind.B, ActionKind.BI):
                now -= saved[action.stage]
        for action in slot:
            if action.kind is ActionKind.F:
                now += saved[action.stage]
        peak = max(peak, now)
    return peak
