"""What a configuration's step is made of: stages, pieces, buckets, and what each takes."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from piper_core.ir.dag import Floats, Ints, Mask
from piper_core.mesh import Mesh
from piper_core.names import Axis, Collective, Phase, Recompute, Region, ShardKind
from piper_core.schedule.grid import Layout, rows_of_stage
from search.cost.memory import GATHERED
from search.cost.software import BLOCKS, Software
from search.direct.buckets import Buckets, make_buckets
from search.direct.groups import RowGroups, Shape, first_members, pair_groups, row_groups
from search.direct.kinds import REGIONS, Kinds
from search.direct.pieces import (
    Held,
    PhaseNodes,
    Stages,
    inner_seconds,
    phase_nodes,
)
from search.direct.prices import Division, Prices
from search.generators.recipe import SHARED
from search.space import Configuration
from search.stage_costs import mesh_of, ranks_of

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Sync:
    """Seconds of reducing and of gathering each bucket, shape (B,), and the bytes that each moves; ``ranks`` (B,) hold
    the same shard."""

    ranks: Ints
    reduce: Floats
    reduce_bytes: Floats
    gather: Floats
    gather_bytes: Floats


@dataclass(frozen=True, slots=True)
class Tie:
    """One copy of a tied parameter that lies on several rows: its bucket, whether it is reduced after its bucket, and
    the seconds of the all_reduce over the rows."""

    name: str
    stage: int
    bucket: int
    late: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class Step:
    """A configuration's step, whatever its order.

    ``inner[phase]`` (S, kinds) are the seconds of collectives inside macro actions, ``held`` what chunks hold.
    ``rows_of`` are the rows of each stage. ``shared`` (B,) says which buckets are synchronised. ``update`` (S,)
    seconds. ``streams`` are the names of queues beside messages, as the directives add them;
    ``message_bytes`` (S,) is what a stage hands to the next one. Under one order, steps of one model whose ``form`` is
    equal have the same pieces, buckets and collectives in the same places, whatever these take and hold, as long as no
    overlap group is opened and no bucket gathered for each use; else those also whose ``inside`` is.
    """

    config: Configuration
    mesh: Mesh
    rows: tuple[tuple[int, ...], ...]
    rows_of: tuple[tuple[int, ...], ...]
    stages: Stages
    buckets: Buckets
    sync: Sync
    shared: Mask
    held: Held
    nodes: dict[Phase, PhaseNodes]
    inner: dict[Phase, Floats]
    update: Floats
    ties: tuple[Tie, ...]
    streams: tuple[str, ...]
    message_bytes: Floats
    software: Software
    form: tuple[Hashable, ...]
    inside: tuple[Hashable, ...]


def stages_of(kinds: Kinds, counts: tuple[int, ...], policy: str, way: Ints) -> Stages:
    """Return how chunks lie on stages of so many layers each."""
    layers = sum(counts)
    ends = np.cumsum([0, *counts])
    stage_of_layer = np.repeat(np.arange(len(counts)), counts)
    of = stage_of_layer[np.clip(kinds.layer, 0, layers - 1)]
    of = np.where(kinds.layer < 0, 0, np.where(kinds.layer >= layers, len(counts) - 1, of))
    each = Recompute.FULL if policy.isdecimal() else Recompute(policy)
    most = int(policy) if policy.isdecimal() else layers
    again = {
        Recompute.NONE: np.zeros(len(of), np.bool_), Recompute.SELECTIVE: kinds.attention,
        Recompute.FULL: kinds.layered & (kinds.layer - ends[of] < most),
    }[each]  # fmt: skip
    bounds = np.searchsorted(of, np.arange(len(counts) + 1))
    return Stages(tuple(bounds.tolist()), of, again, each, way)


def held_of(kinds: Kinds, stages: Stages, division: Division, software: Software) -> Held:
    """Return what each chunk holds for one microbatch on one rank; ``software`` may keep what it gathered."""
    tensor, sequence = float(division.tp), float(division.tp if division.sequence else 1)
    share = division.share

    def size(what: str) -> Floats:
        sharded, replicated = kinds.saved(what)
        return (sharded / tensor + replicated / sequence) * share

    saved = size("saved")
    if software.keeps_gathered:
        whole = np.where(_among(kinds, (*BLOCKS, Region.HEAD)), kinds.field("hidden_bytes"), 0.0)
        saved = saved + whole * (1 - 1 / sequence) * share
    kept = saved
    if stages.policy is Recompute.SELECTIVE:
        kept = np.where(stages.again, size("saved_selective"), saved)
    elif stages.policy is Recompute.FULL:
        kept = np.where(stages.again, np.where(kinds.fed, size("saved_full"), 0.0), saved)
    each = kinds.field("workspace_bytes")
    workspace = each / tensor
    if software.gathers_logits and division.tp > 1:
        workspace = np.where(_among(kinds, (Region.HEAD,)), each * GATHERED, workspace)
    return Held(kept, saved, size("stash"), workspace * share)


def _among(kinds: Kinds, regions: tuple[Region, ...]) -> Mask:
    """Return which chunks are of some regions, shape (C,)."""
    return np.isin(kinds.region, [REGIONS.index(region) for region in regions])


class Steps:
    """Steps of configurations of one model on one cluster."""

    def __init__(self, kinds: Kinds, prices: Prices, dtype_bytes: int) -> None:
        self.kinds, self.prices, self.dtype_bytes = kinds, prices, dtype_bytes
        self.buckets = lru_cache(maxsize=1024)(partial(make_buckets, kinds))
        self.groups = lru_cache(maxsize=1024)(self._groups)

    def of(
        self, config: Configuration, counts: tuple[int, ...], bucket_mib: int, phases: tuple[Phase, ...]
    ) -> Step:  # fmt: skip
        """Return the step of a configuration with so many layers a stage, of which some phases occur."""
        kinds, prices, mesh = self.kinds, self.prices, mesh_of(config)
        division = Division(config.tp, config.ep, config.cp, config.sequence_parallel, config.micro_batch)
        rows_of = rows_of_stage(config.layout, config.pp, config.virtual_stages)
        way, ways = prices.ways(mesh, config.pp)
        stages = stages_of(kinds, counts, config.recompute, np.asarray([way[rows[0]] for rows in rows_of]))
        replicated = config.dp * config.cp > 1 or config.layout is Layout.BIDIRECTIONAL
        limit = bucket_mib * MIB // self.dtype_bytes if replicated else 0
        buckets = self.buckets(stages.ends, config.tp, config.ep, limit)
        sync = self._sync(config, mesh, rows_of, buckets)
        shared, held = sync.ranks > 1, held_of(kinds, stages, division, prices.cost.software)
        talks = {phase: prices.talks(division, phase, mesh, ways) for phase in phases}
        context_only = stages.policy is Recompute.SELECTIVE
        repeated = tuple(
            t
            for t in prices.talks(division, Phase.R, mesh, ways)
            if not context_only or t.exchange.axis is Axis.CONTEXT
        )
        again = prices.compute(division, Phase.R, stages.policy)
        nodes, inner = dict[Phase, PhaseNodes](), dict[Phase, Floats]()
        for phase in phases:
            compute = prices.compute(division, phase)
            found = nodes[phase] = phase_nodes(kinds, stages, phase, compute, talks[phase], again, repeated)
            inner[phase] = inner_seconds(found, stages)
        share = float(division.micro_batch) / config.cp / (config.tp if config.sequence_parallel else 1)
        boundary = kinds.boundary_bytes[np.asarray(stages.ends[1:]) - 1] * share
        ties = self._ties(config, mesh, rows_of, buckets, sync)
        streams = streams_of(config, division, bool(shared.any()))
        form = (
            phases, rows_of, stages.ends, buckets.form, shared.tobytes(), config.zero, config.prefetch, config.streams,
            tuple((tie.name, tie.stage, tie.bucket, tie.late) for tie in ties),
        )  # fmt: skip
        inside = (
            stages.policy, stages.again.tobytes(), streams,
            tuple(tuple((t.region, t.shard, t.exchange) for t in some) for some in (*talks.values(), repeated)),
        )  # fmt: skip
        return Step(
            config, mesh, ranks_of(mesh).rows, rows_of, stages, buckets, sync, shared, held, nodes, inner,
            self._update(config, buckets, sync, stages.count),
            ties, streams, boundary, prices.cost.software, form, inside,
        )  # fmt: skip

    def _sync(self, config: Configuration, mesh: Mesh, rows_of: tuple[tuple[int, ...], ...], buckets: Buckets) -> Sync:
        """Return what synchronising each bucket takes."""
        each = config.zero >= 2
        software = self.prices.cost.software
        group = software.shard_group if config.zero == 1 else 0  # gradients meet everywhere, parameters in the group
        kind = Collective.REDUCE_SCATTER if config.zero and not group else Collective.ALL_REDUCE
        width = self.dtype_bytes if each else software.gradient_bytes
        ranks, seconds = np.zeros(len(buckets), np.int64), np.zeros((2, len(buckets)))
        held = self.groups(mesh, rows_of)
        columns = (buckets.stage.tolist(), buckets.expert.tolist(), buckets.numel.tolist())
        known: dict[tuple[tuple[Shape, ...], int], tuple[int, float, float]] = {}
        for k, (stage, expert, size) in enumerate(zip(*columns, strict=True)):
            groups = held[stage].expert_sync if expert else held[stage].dense_sync
            key = tuple(shape for shape, _ in groups), size
            if key not in known:
                members, reduce, gather = groups[0][0][0], 0.0, 0.0
                if members > 1:
                    reduce = self.prices.outer(kind, float(size * width), groups)
                if members > 1 and config.zero:
                    near = first_members(groups, group, self.prices.gpus_per_node) if group else groups
                    gather = self.prices.outer(Collective.ALL_GATHER, float(size * self.dtype_bytes), near)
                known[key] = members, reduce, gather
            ranks[k], seconds[0, k], seconds[1, k] = known[key]
        numel = buckets.numel.astype(np.float64)
        sizes = numel * width, numel * self.dtype_bytes
        return Sync(ranks, seconds[0], sizes[0], seconds[1], sizes[1])

    def _groups(self, mesh: Mesh, rows_of: tuple[tuple[int, ...], ...]) -> list[RowGroups]:
        """Return the groups of the rows of each stage."""
        return [row_groups(mesh, rows, self.prices.gpus_per_node) for rows in rows_of]

    def _update(self, config: Configuration, buckets: Buckets, sync: Sync, stages: int) -> Floats:
        """Return the seconds of the optimiser step of each stage."""
        owned: list[list[float]] = [[] for _ in range(stages)]
        columns = buckets.stage.tolist(), buckets.numel.tolist(), sync.ranks.tolist()
        for stage, numel, ranks in zip(*columns, strict=True):
            owned[stage].append(numel / self.prices.cost.software.owners(ranks, config.zero))
        return np.asarray([self.prices.cost.update_s(sum(some)) for some in owned])

    def _ties(
        self, config: Configuration, mesh: Mesh, rows_of: tuple[tuple[int, ...], ...], buckets: Buckets, sync: Sync
    ) -> tuple[Tie, ...]:
        """Return the copies of tied parameters that lie on different rows."""
        found: list[Tie] = []
        for name in self.kinds.ties:
            held = [(chunk, k) for (tie, chunk), k in buckets.tied.items() if tie == name]
            rows = tuple(sorted({rows_of[int(buckets.stage[k])][0] for _, k in held}))
            if len(rows) < 2:
                continue
            groups = pair_groups(mesh, rows, self.prices.gpus_per_node)
            for chunk, k in sorted(held):
                pieces = self.kinds.parameters[int(self.kinds.of[chunk])]
                size = next(p.numel for p in pieces if p.tie == name) // config.tp
                late = config.zero >= 2 and int(sync.ranks[k]) > 1
                size = -(-size // int(sync.ranks[k])) if late else size
                seconds = self.prices.outer(Collective.ALL_REDUCE, 4.0 * size, groups)
                found.append(Tie(name, int(buckets.stage[k]), k, late, seconds))
        return tuple(found)


def streams_of(config: Configuration, division: Division, synchronised: bool) -> tuple[str, ...]:
    """Return the names of queues beside messages, in the order in which the directives add them."""
    shared = SHARED if config.streams != "own" else None
    names = ["compute", *(shard_stream(config, kind) for kind in division.shards)]
    if synchronised:
        names += [shared or "reduce", shared or "gather"]
    return tuple(dict.fromkeys(names))


def shard_stream(config: Configuration, kind: ShardKind) -> str:
    """Return the queue of the collectives of a kind of sharding."""
    return SHARED if kind is ShardKind.EXPERT and config.streams == "all" else str(kind)
