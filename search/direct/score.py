"""The score of a configuration, straight from its numbers."""

from __future__ import annotations

from piper_core.arch.chunk import ModelChunks
from piper_core.arch.record import Architecture
from piper_core.names import Sync
from piper_core.schedule.grid import Grid, Layout
from profiler.spec import Cluster
from search.bound import Bounds
from search.candidate import Score
from search.cost.base import CostModel
from search.cost.software import OWN
from search.direct.kinds import kinds_of
from search.direct.memory import memory
from search.direct.order import Order, family_order, order_of
from search.direct.plan import Builder, Built
from search.direct.prices import Prices
from search.direct.shape import Steps
from search.evaluate import Evaluation, score
from search.hosts import with_hosts
from search.list_order import list_grids
from search.simulator.run import simulate
from search.space import Configuration
from search.stage_costs import mesh_of


class Direct:
    """Scores of a model's configurations on a cluster, without a DAG."""

    def __init__(
        self, architecture: Architecture, model: ModelChunks, cluster: Cluster, cost: CostModel, bounds: Bounds,
        sync: Sync = Sync.GLOBAL_NORM,
    ) -> None:  # fmt: skip
        self.architecture, self.model, self.cluster, self.cost = architecture, model, cluster, cost
        self.bounds = bounds
        kinds = kinds_of(model)
        self.steps: Steps | None = None
        if kinds is not None:
            self.steps = Steps(kinds, Prices(kinds, cost, cluster.gpus_per_node), model.dtype_bytes)
            self.builder = Builder(self.steps.prices, sync)
        self._flops = architecture.model_flops_per_token(model.seq_len)

    def covers(self, config: Configuration) -> bool:
        """Return whether a configuration can be scored so: what cannot goes through apply, plan and lower.

        Left out are models in which data crosses layers by more than one way, programs of other habits than this
        project's runtime, and stages on two rows that lie on nodes differently, share a tied parameter or reduce each
        microbatch.
        """
        if self.steps is None or self.cost.software != OWN:
            return False
        if config.layout is not Layout.BIDIRECTIONAL:
            return True
        if config.zero >= 2 or self.steps.kinds.ties:
            return False
        way, _ = self.steps.prices.ways(mesh_of(config), config.pp)
        return len(set(way)) == 1

    def build(self, config: Configuration, order: Order | None = None) -> Built:
        """Return the plan of a configuration, with the seconds of its actions; under its own order unless one is given.

        Raises:
            InfeasibleError: the list scheduler finds no order that keeps the memory of some row.
            PlanError: the plan would not run.
        """
        assert self.steps is not None
        counts, _ = self.bounds.costs.of(config)
        bucket = self.bounds.bucket_mib(config.tp, config.ep, config.bucket)
        order = order or self.order(config)
        return self.builder.build(self.steps.of(config, counts, bucket, order.phases), order)

    def order(self, config: Configuration) -> Order:
        """Return the order of a configuration's compute."""
        m, v = config.num_microbatches, config.virtual_stages
        if config.order == "list":
            return order_of(self.grid(config), config.stages, m)
        return family_order(config.schedule, config.pp, m, v, config.stages)

    def grid(self, config: Configuration) -> Grid:
        """Return the list scheduler's order, the quickest of several that fit. It is kept with the bounds: bucket,
        prefetch and streams do not change it.

        Raises:
            InfeasibleError: no order keeps the memory of some row.
        """
        plain, orders = config.plain, self.bounds.orders
        if plain not in orders:
            grids = list_grids(plain, self.bounds)

            def rank(grid: Grid) -> tuple[bool, float]:
                found = self.assess(plain, order_of(grid, plain.stages, plain.num_microbatches)).score
                return found.fits != "yes", found.step_time_s

            orders[plain] = min(grids, key=rank) if len(grids) > 1 and self.covers(plain) else grids[0]
        return orders[plain]

    def assess(self, config: Configuration, order: Order | None = None) -> Evaluation:
        """Simulate a configuration, under its own order unless one is given, and count its memory.

        Raises:
            InfeasibleError, PlanError: as :meth:`build`.
        """
        built = self.build(config, order)
        seconds = with_hosts(built.plan, built.seconds, self.cost.host_s)
        simulation = simulate(built.lowered, seconds, slowdown=self.cost.overlap_slowdown)
        used = memory(built, simulation, self.cluster.device, self.model.dtype_bytes)
        sequences = float(config.dp * config.micro_batch * config.num_microbatches)
        found = score(
            simulation, used, tokens=sequences * self.model.seq_len, flops_per_token=self._flops,
            gpus=mesh_of(config).size, device=self.cluster.device,
        )  # fmt: skip
        return Evaluation(found, simulation, used)

    def score(self, config: Configuration) -> Score:
        """Return the score of a configuration (see :meth:`assess`)."""
        return self.assess(config).score
