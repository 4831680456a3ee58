"""From a configuration to the program of directives that says it: the one way in which search builds anything."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from piper_core.directives import Order, Place, RecomputeDirective, Replicate, Shard, Split, Stage
from piper_core.ir.filter import Filter
from piper_core.mesh import Mesh
from piper_core.names import Recompute, ShardKind
from piper_core.program.program import Program
from piper_core.schedule.families import get_family
from piper_core.schedule.grid import Grid, Layout, rows_of_stage
from search.space import Configuration
from search.stage_costs import mesh_of, ranks_of

EVERYTHING = Filter(())
EXPERTS = Filter((("REGION", "expert"),))
SHARED = "collectives"
"""Stream of the collectives that share one."""


def program_of(
    config: Configuration, layers_per_stage: tuple[int, ...], bucket_mib: int, grid: Grid | None = None
) -> tuple[Program, Mesh]:
    """Return the program of a configuration and the mesh that it names.

    Buckets hold about one layer (``bucket_mib``; 0 for one bucket a stage). Experts are sharded over ep consecutive
    data ranks; everything else is replicated over all of dp.
    """
    mesh, p, m = mesh_of(config), config.pp, config.num_microbatches
    ranks = ranks_of(mesh).rows
    directives: list[Any] = [Stage(layers_per_stage=layers_per_stage), Split(EVERYTHING, m)]
    for stage, rows in enumerate(rows_of_stage(config.layout, p, config.virtual_stages)):
        for half, row in enumerate(rows):
            where: tuple[tuple[str, Any], ...] = (("PP", stage),)
            if len(rows) > 1:
                where += (("MB", f"{half * m // 2}-{(half + 1) * m // 2 - 1}"),)
            directives.append(Place(Filter(where), ranks[row]))
    shared = SHARED if config.streams != "own" else None
    if config.ep > 1:
        stream = shared if config.streams == "all" else None
        directives.append(Shard(EXPERTS, kind=ShardKind.EXPERT, axis="ep", stream=stream))
    if config.cp > 1:
        directives.append(Shard(EVERYTHING, kind=ShardKind.CONTEXT, axis="cp"))
    if config.tp > 1:
        kind = ShardKind.SEQUENCE if config.sequence_parallel else ShardKind.TENSOR
        directives.append(Shard(EVERYTHING, kind=kind, axis="tp"))
    if config.dp * config.cp > 1 or config.layout is Layout.BIDIRECTIONAL:
        directives.append(
            Replicate(
                EVERYTHING, bucket_size=bucket_mib or None, shard_optimizer=config.zero == 1,
                shard_grads=config.zero >= 2, shard_params=config.zero == 3, prefetch=config.prefetch,
                gather_stream=shared, reduce_stream=shared, axis="dp" if config.ep == 1 else "edp+ep",
            )
        )  # fmt: skip
    directives += _recompute(config.recompute, layers_per_stage)
    grid = grid or get_family(config.schedule).grid(p, m, config.virtual_stages)
    directives.append(Order(actions=tuple(enumerate(grid.rows))))
    return Program(tuple(directives)), mesh


def _recompute(policy: str, layers_per_stage: tuple[int, ...]) -> list[RecomputeDirective]:
    """Return the directive of a policy: none, selective, full, or the number of layers of each stage, its first ones,
    that run again (Megatron's ``--recompute-method block``)."""
    if not policy.isdecimal():
        return [RecomputeDirective(EVERYTHING, Recompute(policy))] if policy != Recompute.NONE else []
    ends = [*accumulate(layers_per_stage)]
    chosen = [
        layer
        for count, end in zip(layers_per_stage, ends, strict=True)
        for layer in range(end - count, min(end, end - count + int(policy)))
    ]
    return [RecomputeDirective(Filter((("LAYER", tuple(chosen)),)), Recompute.FULL)]
