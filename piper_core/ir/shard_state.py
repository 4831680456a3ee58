"""How a node's tensors are divided over the ranks of its row: the interned record that directives update."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

Ranks: TypeAlias = tuple[int, ...]
Groups: TypeAlias = tuple[Ranks, ...]


@dataclass(frozen=True, slots=True)
class Replication:
    """What one ``replicate`` directive asked for; ``groups`` are its equal disjoint groups of ranks.

    ``bucket_bytes`` 0 means one bucket for each (stage, dense or expert) class. ``prefetch`` is how many
    gathers may be in flight or waiting ahead of the compute that uses them.
    """

    groups: Groups
    shard_grads: bool = False
    shard_params: bool = False
    shard_optimizer: bool = False
    bucket_bytes: int = 0
    prefetch: int = 1
    reduce_stream: str = "reduce"
    gather_stream: str = "gather"

    @property
    def zero_stage(self) -> int:
        """ZeRO stage 0-3 (arXiv 1910.02054): what is sharded of optimiser state, gradients, parameters."""
        if self.shard_params:
            return 3
        if self.shard_grads:
            return 2
        return 1 if self.shard_optimizer else 0


@dataclass(frozen=True, slots=True)
class ShardState:
    """Groups of ranks that share a node's work, for each kind; empty means not sharded in that way."""

    tensor: Groups = ()
    sequence: bool = False
    regather: bool = True
    expert: Groups = ()
    context: Groups = ()
    context_method: str = "ring"
    replication: Replication | None = None

    @property
    def tensor_degree(self) -> int:
        return len(self.tensor[0]) if self.tensor else 1

    @property
    def expert_degree(self) -> int:
        return len(self.expert[0]) if self.expert else 1

    @property
    def context_degree(self) -> int:
        return len(self.context[0]) if self.context else 1

    @property
    def zero_stage(self) -> int:
        return self.replication.zero_stage if self.replication else 0

    def slices(self, row: Ranks) -> tuple[tuple[int, int, int], ...]:
        """Return which part of the batch, of the sequence, and of a sequence-parallel activation each rank of ``row``
        holds, by position."""
        return _slices(self, row)

    def tensor_places(self, row: Ranks) -> tuple[int, ...]:
        """Return which tensor shard each rank of ``row`` holds, by position."""
        if not self.tensor:
            return (0,) * len(row)
        place = {rank: i for group in self.tensor for i, rank in enumerate(group)}
        return tuple(place.get(rank, 0) for rank in row)

    def data_degree(self, row: Ranks) -> int:
        """Number of ranks of ``row`` between which the batch is divided."""
        if self.replication is None:
            return 1
        members = set(row)
        sizes = {len(members.intersection(group)) for group in self.replication.groups} - {0}
        return max(sizes, default=1)


@lru_cache(maxsize=64)
def _slices(state: ShardState, row: Ranks) -> tuple[tuple[int, int, int], ...]:
    """Return :meth:`ShardState.slices`, which names every rank of a row and is asked for again and again."""
    members = set(row)
    data = state.replication.groups if state.replication else ()
    kinds = (data, state.context, state.tensor if state.sequence else ())
    places = [
        {rank: i for group in groups for i, rank in enumerate([r for r in group if r in members])} for groups in kinds
    ]
    columns = ([place.get(r, 0) for r in row] if place else [0] * len(row) for place in places)
    return tuple(zip(*columns, strict=True))


@lru_cache(maxsize=4096)
def reduction_groups(state: ShardState, rows: tuple[Ranks, ...]) -> Groups:
    """Ranks that hold the same shard of a parameter, over every row that holds its stage.

    Experts: DP x CP / EP; everything else: DP x CP (DESIGN: Reduction). Rows of one stage are joined at
    equal positions. Groups come sorted; a group of one needs no reduction.
    """
    parent = {rank: rank for row in rows for rank in row}

    def find(rank: int) -> int:
        while parent[rank] != rank:
            rank = parent[rank]
        return rank

    joined = [tuple(ranks) for ranks in zip(*rows, strict=True)] if len(rows) > 1 else []
    data = state.replication.groups if state.replication else ()
    for group in (*data, *state.context, *joined):
        inside = [rank for rank in group if rank in parent]
        for rank in inside[1:]:
            a, b = find(inside[0]), find(rank)
            parent[max(a, b)] = min(a, b)
    place = {rank: i for group in state.expert for i, rank in enumerate(group)}
    found: dict[tuple[int, int], list[int]] = {}
    for rank in sorted(parent):
        found.setdefault((find(rank), place.get(rank, 0)), []).append(rank)
    return tuple(tuple(group) for group in found.values())
