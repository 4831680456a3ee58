"""Scores of what a person asks for: layers and buckets that no configuration names, and other programs' habits."""

from __future__ import annotations

from copy import copy

from piper_core.schedule.grid import Layout
from search.cost.software import OWN
from search.direct.groups import row_groups
from search.direct.order import Order
from search.direct.plan import Built
from search.direct.score import Direct
from search.space import Configuration
from search.stage_costs import mesh_of


class Asked(Direct):
    """Scores of strategies of one program; ``layers`` (a stage) and ``bucket_mib``, where given, are as asked for."""

    layers: tuple[int, ...] | None = None
    bucket_mib: int | None = None

    def of(self, layers: tuple[int, ...] | None, bucket_mib: int | None) -> Asked:
        """Return the same with layers a stage and a bucket size of its own; what it has priced is shared."""
        made = copy(self)
        made.layers, made.bucket_mib = layers, bucket_mib
        return made

    def covers(self, config: Configuration) -> bool:
        """Return whether a configuration can be scored so (see :meth:`Direct.covers`); of other programs those are left
        out that have stages on two rows, or share optimiser state in a part of a group that lies unevenly on nodes."""
        software = self.cost.software
        if software == OWN:
            return super().covers(config)
        if self.steps is None or config.layout is Layout.BIDIRECTIONAL:
            return False
        if not software.shard_group:
            return True
        held = (row_groups(mesh_of(config), (row,), self.cluster.gpus_per_node) for row in range(config.pp))
        return all(least == most for row in held for (_, _, least, most), _ in (*row.dense_sync, *row.expert_sync))

    def build(self, config: Configuration, order: Order | None = None) -> Built:
        """Return the plan of a configuration, with the seconds of its actions (see :meth:`Direct.build`)."""
        assert self.steps is not None
        layers = self.bounds.costs.of(config)[0] if self.layers is None else self.layers
        own = self.bounds.bucket_mib(config.tp, config.ep, config.bucket)
        bucket, order = own if self.bucket_mib is None else self.bucket_mib, order or self.order(config)
        return self.builder.build(self.steps.of(config, layers, bucket, order.phases), order)
