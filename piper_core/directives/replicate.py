"""replicate: data parallelism, and what ZeRO shards of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from piper_core.directives.base import Directive, Domain
from piper_core.directives.read import (
    check_fields,
    read_bool,
    read_devices,
    read_filter,
    read_int,
    read_text,
    resolve,
    write_devices,
)
from piper_core.directives.shard import check_product, consecutive, strided
from piper_core.errors import DirectiveError
from piper_core.ir.dag import Dag, Mask
from piper_core.ir.edit import attached, distinct, distinct_pairs, update_states, whole_chunks
from piper_core.ir.filter import Filter
from piper_core.ir.shard_state import Groups, Ranks, Replication, ShardState
from piper_core.passes.gradient_sync import gradient_sync

if TYPE_CHECKING:
    from piper_core.mesh import Mesh

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ReplicateEdit:
    """Compute nodes whose batch is divided (mask over n), and how their parameters are kept in step."""

    mask: Mask
    replication: Replication
    filter: str


@dataclass(frozen=True, slots=True)
class Replicate(Directive[ReplicateEdit]):
    """Divide the batch over groups of ranks that hold the same parameters, and keep those in step.

    Rewrite::

        BW0, BW1 -> Update    becomes   BW0, BW1 -> reduce(bucket) -> Update       (ZeRO-0/1, plus a gather)
                                        gather -> F0; gather -> B0 -> reduce_scatter   (ZeRO-3)

    ``shard_optimizer`` alone is ZeRO-1, ``shard_grads`` ZeRO-2, both with ``shard_params`` ZeRO-3.
    ``bucket_size`` is in MiB of compute dtype (absent: one bucket a stage and class); ``prefetch`` is how many
    gathers may run ahead of compute.
    """

    op: ClassVar[str] = "replicate"
    filter: Filter
    devices: Groups = ()
    reduce_stream: str | None = None
    gather_stream: str | None = None
    bucket_size: int | None = None
    shard_grads: bool = False
    shard_params: bool = False
    shard_optimizer: bool = False
    prefetch: int = 1
    axis: str | None = None

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Replicate:
        axis = read_text(data, "axis", None)
        where = "axis" if axis is not None else "device" if "device" in data and "devices" not in data else "devices"
        check_fields(
            data,
            ("filter", where),
            (
                "reduce_stream",
                "gather_stream",
                "bucket_size",
                "shard_grads",
                "shard_params",
                "shard_optimizer",
                "prefetch",
            ),
        )
        size = None if data.get("bucket_size") is None else read_int(data, "bucket_size", least=1)
        return cls(
            read_filter(data),
            () if axis is not None else read_devices(data),
            read_text(data, "reduce_stream", None),
            read_text(data, "gather_stream", None),
            size,
            read_bool(data, "shard_grads"),
            read_bool(data, "shard_params"),
            read_bool(data, "shard_optimizer"),
            read_int(data, "prefetch", least=0, default=1),
            axis,
        )

    def to_data(self) -> dict[str, Any]:
        data: dict[str, Any] = {"op": self.op, "filter": self.filter.to_data()}
        data |= {"axis": self.axis} if self.axis else {"devices": write_devices(self.devices)}
        for name in ("reduce_stream", "gather_stream", "bucket_size"):
            data |= {name: getattr(self, name)} if getattr(self, name) is not None else {}
        for name in ("shard_grads", "shard_params", "shard_optimizer"):
            data |= {name: True} if getattr(self, name) else {}
        return data | ({"prefetch": self.prefetch} if self.prefetch != 1 else {})

    def check(self, dag: Dag, mesh: Mesh | None = None) -> ReplicateEdit:
        groups = resolve(self.devices, self.axis, mesh)
        mask = whole_chunks(self.filter, dag, self.op)
        if dag.buckets:
            raise DirectiveError("parameters are already replicated", expected="all replicate directives together")
        if (dag.nodes.group[mask] < 0).any():
            raise DirectiveError(f"filter {self.filter} matches compute that is not placed", hint="place it first")
        if self.shard_params and not self.shard_grads:
            raise DirectiveError(
                "shard_params without shard_grads", expected="ZeRO-3 shards both", hint="add shard_grads: true"
            )
        if self.shard_grads:
            _one_row(dag, mask)
        rows = [dag.groups[g] for g in distinct(dag.nodes.group[mask]).tolist()]
        for row in rows:
            _cover(groups, row)
        _one_model_part(dag, groups)
        if not self.axis:
            known = {rank for row in rows for rank in row}
            stray = sorted({rank for group in groups for rank in group} - known)
            if stray:
                raise DirectiveError(
                    f"rank {stray[0]} does not hold what {self.filter} matches",
                    expected=f"ranks of {[list(row) for row in rows[:4]]}",
                )
        for index, group in distinct_pairs(dag.nodes.state[mask], dag.nodes.group[mask]):
            state, members = dag.states[index], set(dag.groups[group])
            if state.replication is not None:
                raise DirectiveError(f"filter {self.filter} matches compute that is already replicated")
            inside = tuple(g for g in groups if members.intersection(g))
            check_product(inside, state.tensor, "replicate")
            check_product(inside, state.context, "replicate")
        if dag.global_batch is not None:
            degree = max(Replicate._degree(groups, row) for row in rows)
            divided = max(1, dag.microbatches) * degree
            if dag.global_batch % divided:
                raise DirectiveError(
                    f"global batch {dag.global_batch} does not divide into {degree} replicas x "
                    f"{max(1, dag.microbatches)} microbatches",
                    expected=f"a multiple of {divided}",
                )
        size = (self.bucket_size or 0) * MIB
        return ReplicateEdit(
            mask,
            Replication(
                groups,
                self.shard_grads,
                self.shard_params,
                self.shard_optimizer,
                size,
                self.prefetch,
                self.reduce_stream or "reduce",
                self.gather_stream or "gather",
            ),
            str(self.filter),
        )

    @staticmethod
    def _degree(groups: Groups, row: Ranks) -> int:
        return ShardState(replication=Replication(groups)).data_degree(row)

    @classmethod
    def rewrite(cls, dag: Dag, edits: Sequence[ReplicateEdit]) -> Dag:
        taken = np.zeros(len(dag), np.bool_)
        for edit in edits:
            if (taken & edit.mask).any():
                raise DirectiveError(f"filter {edit.filter} replicates compute twice", expected="each chunk once")
            taken |= edit.mask

            def change(state: ShardState, row: Ranks, edit: ReplicateEdit = edit) -> ShardState:
                return replace(state, replication=edit.replication)

            index = attached(dag, edit.mask)
            dag = update_states(dag, index, change)
            degrees = {
                g: Replicate._degree(edit.replication.groups, dag.groups[g])
                for g in distinct(dag.nodes.group[index]).tolist()
            }
            factor = np.asarray([degrees.get(g, 1) for g in range(len(dag.groups))], np.int32)
            splits = dag.nodes.splits.copy()
            splits[index] *= factor[dag.nodes.group[index]]
            dag = replace(dag, nodes=dag.nodes.with_(splits=splits))
        return gradient_sync(dag) if edits else dag

    @classmethod
    def domain(cls, dag: Dag, mesh: Mesh | None = None) -> Domain:
        fields = {
            "devices": "equal groups that cover the placement",
            "bucket_size": ">= 1 MiB",
            "prefetch": ">= 0",
            "shard_*": "none, optimizer, grads, grads and params",
        }

        def draw(rng: Random) -> Replicate:
            placed = dag.compute & (dag.nodes.group >= 0)
            if not placed.any():
                raise DirectiveError("nothing is placed")
            stage = int(dag.nodes.stage[rng.choice(np.flatnonzero(placed).tolist())])
            base = Filter((("PP", stage),)) if dag.stages else Filter(())
            rows = [dag.groups[g] for g in distinct(dag.nodes.group[placed & (dag.nodes.stage == stage)]).tolist()]
            zero = rng.randrange(4 if len(rows) == 1 else 2)
            options = []
            ways = zip(*([*consecutive(row), *strided(row), (row,)] for row in rows), strict=True)
            for parts in ways:
                groups = tuple(group for part in parts for group in part)
                made = cls(
                    base,
                    groups,
                    bucket_size=rng.choice([None, 1, 16]),
                    shard_optimizer=zero == 1,
                    shard_grads=zero >= 2,
                    shard_params=zero == 3,
                    prefetch=rng.randrange(3),
                )
                if made.legal(dag, mesh):
                    options.append(made)
            if not options:
                raise DirectiveError("no replicate directive is legal here")
            return rng.choice(options)

        return Domain(fields, draw, dag, mesh)

    def neighbours(self, dag: Dag, mesh: Mesh | None = None) -> Iterator[Replicate]:
        """Other ZeRO stages, half and double the bucket, one gather more or less ahead."""
        near = [
            replace(self, shard_optimizer=zero == 1, shard_grads=zero >= 2, shard_params=zero == 3) for zero in range(4)
        ]
        near += [replace(self, prefetch=self.prefetch + step) for step in (-1, 1) if self.prefetch + step >= 0]
        if self.bucket_size:
            near += [replace(self, bucket_size=max(1, size)) for size in (self.bucket_size // 2, self.bucket_size * 2)]
        for replicate in near:
            if replicate != self and replicate.legal(dag, mesh):
                yield replicate


def _one_row(dag: Dag, mask: Mask) -> None:
    """Refuse a stage on two rows, each of which reduces its own microbatches."""
    held = distinct_pairs(dag.nodes.stage[mask], dag.nodes.group[mask])
    stages, rows = np.unique([stage for stage, _ in held], return_counts=True)
    if (rows > 1).any():
        at = int(np.flatnonzero(rows > 1)[0])
        raise DirectiveError(f"stage {stages[at]} lives on {rows[at]} rows, which cannot reduce a microbatch together",
                             expected="ZeRO-0 or ZeRO-1", hint="drop shard_grads and shard_params")  # fmt: skip


def _one_model_part(dag: Dag, groups: Groups) -> None:
    """Refuse a group that joins rows without a stage in common: their ranks hold different parameters."""
    index = np.flatnonzero(dag.compute & (dag.nodes.group >= 0))
    width = len(dag.groups) + 1
    held: dict[int, set[int]] = {}
    for pair in distinct(dag.nodes.stage[index].astype(np.int64) * width + dag.nodes.group[index]).tolist():
        held.setdefault(pair % width, set()).add(pair // width)
    row_of = {rank: group for group in held for rank in dag.groups[group]}
    for group in groups:
        joined = sorted({row_of[rank] for rank in group if rank in row_of})
        for other in joined[1:]:
            if not held[joined[0]] & held[other]:
                rows = " and ".join(str(list(dag.groups[g])[:8]) for g in (joined[0], other))
                raise DirectiveError(
                    f"replicate group {list(group)[:8]} joins rows {rows}, which hold different stages",
                    expected="groups inside one placement (or the placements of one stage)",
                    hint="check which ranks place gives each stage, and the order of the mesh's axes",
                )


def _cover(groups: Groups, row: Ranks) -> None:
    """Refuse groups that leave out a rank of a row, or that meet it in unequal parts."""
    members = set(row)
    parts = [len(members.intersection(group)) for group in groups]
    if sum(parts) != len(row):
        missing = sorted(members.difference(rank for group in groups for rank in group))
        raise DirectiveError(
            f"replicate groups leave out rank {missing[0]} of row {list(row)}",
            expected="groups that cover the placement",
        )
    if len({part for part in parts if part}) > 1:
        raise DirectiveError(f"replicate groups meet row {list(row)} in unequal parts", expected="one size")
