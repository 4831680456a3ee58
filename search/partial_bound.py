"""Lower bounds on step time and peak memory of partial assignments, whatever their schedule, ZeRO stage and cuts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import inf
from typing import NamedTuple, assert_never

from piper_core.arch.chunk import Chunk, Saved
from piper_core.names import Collective, Recompute, Region
from search.cost.base import CostModel
from search.row_parts import RowParameters, count_parameters, sum_parameters
from search.space import SOME, Configuration, Degrees, divisors
from search.stage_costs import PhaseSeconds, Shards, StageCosts, mesh_of, mixed, ranks_of, shards_of

COMPUTE_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 2, 4, 12
"""Bytes a parameter: bf16 weight; fp32 accumulated gradient; fp32 master weight and two Adam moments."""
OVERLAPPING = ("dualpipev", "dualpipe")
"""Families whose overlap groups may hide the collectives inside a forward or backward."""


class Pace(NamedTuple):
    """Seconds of one microbatch on one row that does it all: its ``work``, or that of the busier of the streams of its
    inner collectives where overlap groups may hide them; ``compute``, without these; its ``forward`` with all
    collectives, and without what may be hidden (``own_forward``)."""

    work: float
    compute: float
    forward: float
    own_forward: float


class PartialBounds:
    """Bounds of partial assignments of one model on one cluster, of what needs at most ``capacity_bytes``."""

    def __init__(self, costs: StageCosts, cost: CostModel, context_bytes: float, capacity_bytes: float = inf) -> None:
        self.costs, self.cost = costs, cost
        self.context_bytes, self.capacity_bytes = context_bytes, capacity_bytes
        (self._layers,) = costs.composition((costs.model.layers,))
        self.numel = lru_cache(maxsize=None)(self._numel)
        self.saved = lru_cache(maxsize=None)(self._saved)
        self.stash = lru_cache(maxsize=None)(self._stash)
        self.whole = lru_cache(maxsize=None)(self._whole)
        self.rate = lru_cache(maxsize=None)(self._rate)
        self.syncs = lru_cache(maxsize=None)(self._syncs_of)
        self.pace = lru_cache(maxsize=None)(self._pace)
        self.states = lru_cache(maxsize=None)(self._states_of)
        self.saved_of_model = lru_cache(maxsize=None)(self._saved_of_model)

    # what a row holds ----------------------------------------------------------------------------------------------

    def _numel(self, tp: int, ep: int) -> tuple[RowParameters, list[RowParameters], RowParameters]:
        """Return the parameters of (embedding, one layer of each kind, head) on one rank."""
        first, last = (count_parameters(chunks, tp, ep) for chunks in (self.costs.first, self.costs.last))
        return first, [count_parameters(kind, tp, ep) for kind in self.costs.kinds], last

    def _saved(self, shard: Shards, policy: Recompute) -> tuple[float, list[float], float]:
        """Return the bytes that (embedding, one layer of each kind, head) keep of a sequence from F to the backward."""

        def kept(chunks: list[Chunk], policy: Recompute) -> float:
            match policy:
                case Recompute.NONE:
                    return sum(_size(c.saved, shard) for c in chunks)
                case Recompute.SELECTIVE:
                    saved = [c.saved_selective if c.region is Region.ATTENTION else c.saved for c in chunks]
                    return sum(_size(each, shard) for each in saved)
                case Recompute.FULL:
                    return _size(chunks[0].saved_full, shard)
                case _:
                    assert_never(policy)

        layers = [kept(kind, policy) for kind in self.costs.kinds]
        return kept(self.costs.first, Recompute.NONE), layers, kept(self.costs.last, Recompute.NONE)

    def _stash(self, shard: Shards) -> tuple[float, list[float], float]:
        """Return the bytes that (embedding, one layer of each kind, head) keep of a sequence from BI to BW."""
        first, *layers, last = (
            sum(_size(chunk.stash, shard) for chunk in chunks)
            for chunks in (self.costs.first, *self.costs.kinds, self.costs.last)
        )
        return first, layers, last

    # partial assignments -------------------------------------------------------------------------------------------

    def partial(self, part: Configuration, gap: float = 0.0) -> tuple[float, float]:
        """Return (seconds, bytes) at least of every schedule, ZeRO stage and cut at the degrees of ``part``, among the
        schedules that have overlap groups or those that have none, as its own.

        Seconds are the mean row's work and, before its first backward, what it waits for a microbatch's forwards on all
        rows, since it can do no more of its own than there are or than memory holds; or what its collectives take of
        data parallelism, of the ZeRO stages that fit the best. Bytes are the mean row's: its state under ZeRO-3 (two
        copies of each stage, of which ZeRO-1 shards the optimizer alone, take no less), and one microbatch's
        activations, all of which are there when its backward begins. A number of layers to recompute stands for every
        number: bytes are those of all, seconds those of as many as memory asks for where layers are worth what the best
        kind is.
        """
        shard, b, policy = shards_of(part), part.micro_batch, part.recompute
        some = policy == SOME or policy.isdecimal()
        state, exchange, m = self._states(part), not overlaps(part), part.num_microbatches
        pace = self.pace(shard, b, Recompute.NONE if some else Recompute(policy), exchange)
        work = (1 + gap) * b * self.costs.last[-1].workspace_bytes / (part.tp * part.cp)
        each, more = (1 + gap) * b, 0.0
        room = part.pp * (self.capacity_bytes - self.context_bytes) - work
        saved = self.saved_of_model(shard, Recompute.NONE if some else Recompute(policy)) * each
        if some:
            more = max(0.0, state[3] + saved - room) * self._seconds_a_byte(shard, b, gap, exchange=exchange)
            saved = self.saved_of_model(shard, Recompute.FULL) * each
        seconds, compute = m * (pace.work + more) / part.pp, m * (pace.compute + more) / part.pp
        mine = m * pace.own_forward / part.pp
        rate = 0.0 if some else self.rate(shard, b, Recompute(policy), exchange) / ((1 + gap) * part.pp)
        gather, reduce = self.syncs(Degrees(part.pp, part.tp, part.dp, part.ep, part.cp, part.outer))
        best = inf
        for zero, held in enumerate(state):
            if held + saved > room:
                continue
            until = min(mine, (room - held) * rate) if rate else mine
            talk = max(m * reduce, (2 * m if zero == 3 else 1) * gather) if zero >= 2 else 0.0
            best = min(best, max(seconds, compute + pace.forward - until, talk))
        size = (state[3] + work + saved) / part.pp + self.context_bytes
        return (seconds if best == inf else best), size

    def degrees(self, part: Configuration) -> tuple[float, float]:
        """Return (seconds, bytes) at least of all configurations with the degrees of ``part``, whose microbatch is the
        largest: a sequence takes least time in that, or, by costs that promise no such thing, in the best of all that
        divide it. Nothing is recomputed or kept."""
        largest = part.micro_batch
        sizes = [largest] if self.cost.regular else divisors(largest)
        shard, exchange = shards_of(part), not overlaps(part)
        each = min(self.pace(shard, b, Recompute.NONE, exchange).work / b for b in sizes)
        return part.num_microbatches * largest * each / part.pp, self.partial_state(part)

    def _whole(self, shard: Shards, b: int) -> PhaseSeconds:
        """Return the costs of the whole model for a microbatch of ``b``."""
        embed, kinds, head = self.costs.pieces(shard, b)
        return embed + mixed(kinds, self._layers) + head

    def _pace(self, shard: Shards, b: int, policy: Recompute, exchange: bool) -> Pace:
        """Return what a microbatch takes on one row that does it all; ``exchange`` says whether its collectives are not
        hidden."""
        whole = self.whole(shard, b)
        if policy is not Recompute.NONE:
            whole += mixed(self.costs.repeats(shard, b, policy), self._layers)
        own = whole.forward(exchange=exchange)
        compute = own + min(backward_s(whole, split, exchange) for split in (False, True))
        return Pace(max(compute, talk_s(whole)), compute, whole.forward(), own)

    def partial_state(self, part: Configuration) -> float:
        """Return the bytes of :meth:`partial` without activations: at least of every microbatch and recompute."""
        return self._states(part)[3] / part.pp + self.context_bytes

    def _states(self, part: Configuration) -> list[float]:
        """Return the bytes of all rows' state under each ZeRO stage."""
        return self.states(part.tp, part.ep, part.dp * part.cp, part.dp // part.ep * part.cp)

    def _states_of(self, tp: int, ep: int, dense: int, expert: int) -> list[float]:
        """Return those whose parameters are shared by so many ranks, ``dense`` ones and experts."""
        model = self._model(tp, ep)
        whole, share = model.over(1, 1), model.over(dense, expert)
        return [
            COMPUTE_BYTES * (share if zero >= 3 else whole) + GRADIENT_BYTES * (share if zero >= 2 else whole)
            + OPTIMIZER_BYTES * (share if zero >= 1 else whole)
            for zero in range(4)
        ]  # fmt: skip

    def _model(self, tp: int, ep: int) -> RowParameters:
        first, each, last = self.numel(tp, ep)
        return first + sum_parameters(each, self._layers) + last

    def _syncs_of(self, degrees: Degrees) -> tuple[float, float]:
        """Return the seconds in which some row gathers its parameters, and reduces a microbatch's gradients: it has no
        fewer of either class than the mean row."""
        part = Configuration(*degrees[:4], "1f1b", 1, 0, 1, 1, "none", False, "", degrees.cp, degrees.outer)
        held, ranks = self._model(part.tp, part.ep), ranks_of(mesh_of(part))
        found = []
        for kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER):
            pairs = [(held.dense, ranks.dense), (held.expert, ranks.experts)]
            found.append(max([
                min(self.cost.collective_s(kind, numel / part.pp * COMPUTE_BYTES, members) for members in groups)
                for numel, groups in pairs if numel and len(groups[0]) > 1
            ], default=0.0))  # fmt: skip
        return found[0], found[1]

    def _rate(self, shard: Shards, b: int, policy: Recompute, exchange: bool) -> float:
        """Return the most seconds of forward for each byte that it leaves."""
        (first, layers, last), pieces = self.saved(shard, policy), self.costs.pieces(shard, b)
        each = zip((first, *layers, last), (pieces[0], *pieces[1], pieces[2]), strict=True)
        return max(piece.forward(exchange=exchange) / (size * b) if size else inf for size, piece in each)

    def _saved_of_model(self, shard: Shards, policy: Recompute) -> float:
        """Return the bytes that one sequence keeps over all stages."""
        first, each, last = self.saved(shard, policy)
        return first + total(each, self._layers) + last

    def _seconds_a_byte(self, shard: Shards, b: int, gap: float, *, exchange: bool) -> float:
        """Return what recomputing layers takes for each byte that it frees, of the kind that frees most for least."""
        again = self.costs.repeats(shard, b, Recompute.FULL)
        pairs = zip(self.saved(shard, Recompute.NONE)[1], self.saved(shard, Recompute.FULL)[1], strict=True)
        freed = [(none - full) * b * (1 + gap) for none, full in pairs]
        spent = [each.r + (each.r_exchange if exchange else 0.0) for each in again]
        return min((s / size for s, size in zip(spent, freed, strict=True) if size > 0), default=0.0)


def _size(each: Saved, shard: Shards) -> float:
    """Return the bytes of a sequence's activation on one rank."""
    return (each.sharded / shard.tp + each.replicated / (shard.tp if shard.sequence else 1)) / shard.cp


def overlaps(config: Configuration) -> bool:
    """Say whether overlap groups may hide collectives inside a forward or backward: there are both."""
    return config.schedule in OVERLAPPING and config.tp * config.ep * config.cp > 1


def total(sizes: Sequence[float], counts: Sequence[int]) -> float:
    return sum(size * n for size, n in zip(sizes, counts, strict=True))


def talk_s(piece: PhaseSeconds) -> float:
    """Return the seconds of a microbatch on the busiest of the streams of its inner collectives: each axis has one."""
    return max(piece.tensor, piece.expert, piece.context)


def compute_s(piece: PhaseSeconds) -> float:
    """Return the compute of a microbatch."""
    return piece.f + piece.bi + piece.bw + piece.r


def backward_s(piece: PhaseSeconds, split: bool, exchange: bool) -> float:
    if split:
        return piece.input_backward(exchange=exchange) + piece.weight_backward(exchange=exchange)
    return piece.backward(exchange=exchange)
