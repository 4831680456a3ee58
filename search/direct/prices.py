"""Seconds and bytes of every kind of chunk under one division of the work; each is asked of the cost model once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from piper_core.arch.contract import Exchange, contract, payload_bytes
from piper_core.ir.dag import Floats
from piper_core.mesh import Mesh
from piper_core.names import Axis, Collective, Phase, Recompute, Region, ShardKind
from search.cost.base import CostModel
from search.direct.groups import RowGroups, Several, row_groups
from search.direct.kinds import REGIONS, Kinds

SHARDS = (ShardKind.EXPERT, ShardKind.TENSOR, ShardKind.SEQUENCE, ShardKind.CONTEXT)
"""In the order in which the directives put their collectives around compute, outermost first."""


@dataclass(frozen=True, slots=True)
class Talk:
    """One collective around the chunks of a region in one phase: ``seconds`` (ways of lying on nodes, kinds),
    ``bytes`` (kinds,)."""

    region: int
    shard: ShardKind
    exchange: Exchange
    seconds: Floats
    bytes: Floats


@dataclass(frozen=True, slots=True)
class Division:
    """How work is divided, and what a microbatch is."""

    tp: int
    ep: int
    cp: int
    sequence: bool
    micro_batch: int

    @property
    def shards(self) -> tuple[ShardKind, ...]:
        """The kinds of sharding, outermost first."""
        tensor = ShardKind.SEQUENCE if self.sequence else ShardKind.TENSOR
        on = {ShardKind.EXPERT: self.ep > 1, tensor: self.tp > 1, ShardKind.CONTEXT: self.cp > 1}
        return tuple(kind for kind in SHARDS if on.get(kind, False))

    @property
    def share(self) -> float:
        """Sequences of a microbatch that a rank holds."""
        return float(self.micro_batch) / float(self.cp)


class Prices:
    """What the chunks of a model take under a division; ``collective`` remembers groups by how they lie on nodes."""

    def __init__(self, kinds: Kinds, cost: CostModel, gpus_per_node: int) -> None:
        self.kinds, self.cost, self.gpus_per_node = kinds, cost, gpus_per_node
        self._collective: dict[tuple[object, ...], float] = {}
        self._sends: dict[Mesh, dict[tuple[float, int, int], float]] = {}
        self._compute: dict[tuple[object, ...], Floats] = {}
        self._talks: dict[tuple[object, ...], tuple[Talk, ...]] = {}
        self.ways = lru_cache(maxsize=1024)(self._ways)
        self._present = [int(kind) for kind in dict.fromkeys(kinds.region.tolist())]
        self._present.sort()
        self._region_of_kind = [REGIONS.index(chunk.region) for chunk in kinds.chunks]

    def outer(self, kind: Collective, size: float, groups: Several) -> float:
        """Return the seconds of a collective outside chunks on the slowest of some groups."""
        seconds = self.collective(kind, size, groups)
        return seconds + self.cost.meeting_s if seconds else 0.0

    def collective(self, kind: Collective, size: float, groups: Several) -> float:
        """Return the seconds of a collective on the slowest of some groups."""
        slowest = 0.0
        for shape, ranks in groups:
            key = (kind, size, shape)
            known = self._collective.get(key)
            if known is None:
                known = self._collective[key] = self.cost.collective_s(kind, size, ranks)
            slowest = max(slowest, known)
        return slowest

    def sends(
        self, mesh: Mesh, rows: tuple[tuple[int, ...], ...], messages: Iterable[tuple[float, int, int]]
    ) -> list[float]:
        """Return the seconds of messages of so many bytes from one row to another."""
        known, found = self._sends.setdefault(mesh, {}), list[float]()
        for each in messages:
            if each not in known:
                size, a, b = each
                known[each] = self.cost.send_s(size, rows[a], rows[b])
            found.append(known[each])
        return found

    def compute(self, division: Division, phase: Phase, policy: Recompute = Recompute.FULL) -> Floats:
        """Return the seconds of a phase of each kind of chunk, shape (kinds,)."""
        key = (division, phase, policy)
        known = self._compute.get(key)
        if known is None:
            d, b = division, float(division.micro_batch)
            known = self._compute[key] = np.asarray(
                [
                    self.cost.compute_s(
                        chunk, phase, b, d.tp, d.sequence, d.cp, d.ep if chunk.region is Region.EXPERT else 1, policy
                    )
                    for chunk in self.kinds.chunks
                ]
            )
        return known

    def _ways(self, mesh: Mesh, rows: int) -> tuple[list[int], list[RowGroups]]:
        """Return in which way each row lies on nodes, and the groups of each way."""
        found: dict[tuple[object, ...], int] = {}
        way, groups = list[int](), list[RowGroups]()
        for row in range(rows):
            held = row_groups(mesh, (row,), self.gpus_per_node)
            key = tuple(tuple(shape for shape, _ in some) for some in (held.tensor, held.context, held.expert))
            way.append(found.setdefault(key, len(groups)))
            if way[-1] == len(groups):
                groups.append(held)
        return way, groups

    def talks(self, division: Division, phase: Phase, mesh: Mesh, ways: list[RowGroups]) -> tuple[Talk, ...]:
        """Return the collectives around chunks in a phase, as the directives add them."""
        shapes = tuple(tuple(s for s, _ in some) for way in ways for some in (way.tensor, way.context, way.expert))
        key = (division, phase, shapes)
        known = self._talks.get(key)
        if known is None:
            known = self._talks[key] = self._make_talks(division, phase, ways)
        return known

    def _make_talks(self, division: Division, phase: Phase, ways: list[RowGroups]) -> tuple[Talk, ...]:
        found: list[Talk] = []
        for shard in division.shards:
            for region in self._present:
                if shard is ShardKind.EXPERT and REGIONS[region] is not Region.EXPERT:
                    continue
                exchanges = contract(REGIONS[region], shard, phase)
                before = [exchange for exchange in exchanges if exchange.before]
                after = [exchange for exchange in exchanges if not exchange.before]
                found += [self._talk(division, shard, region, each, phase, ways) for each in (*before, *after[::-1])]
        return tuple(found)

    def _talk(
        self, division: Division, shard: ShardKind, region: int, exchange: Exchange, phase: Phase, ways: list[RowGroups]
    ) -> Talk:
        ring, context = exchange.collective is Collective.RING_EXCHANGE, exchange.axis is Axis.CONTEXT
        share = float(division.micro_batch) / (1 if ring else division.cp) / (division.tp if context else 1)
        sizes = [payload_bytes(exchange, chunk) * share for chunk in self.kinds.chunks]
        bytes_ = np.asarray(sizes)
        tensor = exchange.axis in (Axis.TENSOR, Axis.SEQUENCE)
        kind, part = exchange.collective, 1.0
        if tensor and self.cost.software.gathers_loss(REGIONS[region], phase, kind):
            kind, sizes = Collective.ALL_GATHER, [chunk.stash.sharded * float(division.micro_batch) / division.cp
                                                  for chunk in self.kinds.chunks]  # fmt: skip
        elif tensor:
            part = self.cost.software.exposed(REGIONS[region], phase, kind)
        seconds = np.zeros((len(ways), len(sizes)))
        for w, way in enumerate(ways):
            groups = way.tensor if tensor else way.expert if exchange.axis is Axis.EXPERT else way.context
            for each, size in enumerate(sizes):
                if self._region_of_kind[each] == region:
                    seconds[w, each] = self.collective(kind, size, groups) * part
        return Talk(region, shard, exchange, seconds, bytes_)
