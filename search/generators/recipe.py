"""From a configuration to the program of directives that says it: the one way in which search builds anything."""

from __future__ import annotations

from typing import Any

from piper_core.directives import Order, Place, RecomputeDirective, Replicate, Shard, Split, Stage
from piper_core.ir.filter import Filter
from piper_core.mesh import Mesh
from piper_core.names import Recompute, ShardKind
from piper_core.program.program import Program
from piper_core.schedule.families import get_family
from piper_core.schedule.grid import Layout, rows_of_stage
from search.space import Configuration
from search.stage_costs import mesh_of

EVERYTHING = Filter(())
EXPERTS = Filter((("REGION", "expert"),))


def program_of(config: Configuration, layers_per_stage: tuple[int, ...], bucket_mib: int) -> tuple[Program, Mesh]:
    """Return the program of a configuration and the mesh that it names.

    Buckets hold about one layer (``bucket_mib``). Experts are sharded over ep consecutive data ranks;
    everything else is replicated over all of dp.
    """
    mesh, p, m = mesh_of(config), config.pp, config.num_microbatches
    row_size = config.dp * config.tp
    directives: list[Any] = [Stage(layers_per_stage=layers_per_stage), Split(EVERYTHING, m)]
    for stage, rows in enumerate(rows_of_stage(config.layout, p, config.virtual_stages)):
        for half, row in enumerate(rows):
            where: tuple[tuple[str, Any], ...] = (("PP", stage),)
            if len(rows) > 1:
                where += (("MB", f"{half * m // 2}-{(half + 1) * m // 2 - 1}"),)
            directives.append(Place(Filter(where), tuple(range(row * row_size, (row + 1) * row_size))))
    if config.ep > 1:
        directives.append(Shard(EXPERTS, kind=ShardKind.EXPERT, axis="ep"))
    if config.tp > 1:
        kind = ShardKind.SEQUENCE if config.sequence_parallel else ShardKind.TENSOR
        directives.append(Shard(EVERYTHING, kind=kind, axis="tp"))
    if config.dp > 1 or config.layout is Layout.BIDIRECTIONAL:
        directives.append(
            Replicate(
                EVERYTHING, bucket_size=bucket_mib, shard_optimizer=config.zero == 1, shard_grads=config.zero >= 2,
                shard_params=config.zero == 3, axis="dp" if config.ep == 1 else "edp+ep",
            )
        )  # fmt: skip
    if config.recompute == "full":
        directives.append(RecomputeDirective(EVERYTHING, Recompute.FULL))
    grid = get_family(config.schedule).grid(p, m, config.virtual_stages)
    directives.append(Order(actions=tuple(enumerate(grid.rows))))
    return Program(tuple(directives)), mesh
