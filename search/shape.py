"""What configurations that differ in schedule, ZeRO stage and order alone have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from math import inf

from piper_core.ir.dag import Floats
from piper_core.names import Recompute
from piper_core.schedule.grid import Layout
from search.cost.base import CostModel
from search.partial_bound import PartialBounds, total
from search.passage import Route
from search.row_parts import Frame, RowEnds, RowParameters, RowWork, flows_of, stages_of_row, sum_parameters
from search.space import Configuration
from search.stage_costs import PhaseSeconds, StageCosts, StageTimes, shards_of


@dataclass(slots=True)
class Held:
    """What stages hold, in elements and bytes: parameters of a rank, activations of a microbatch, the workspace with
    which a backward begins, what stays from BI to BW; of each row the least of its stages' activations and workspaces,
    the most that one microbatch holds there when a backward begins (``one``), and its parameters on a rank, whole and
    divided by data parallelism (``rows``)."""

    numel: list[RowParameters]
    saved: list[float]
    workspace: list[float]
    stash: list[float]
    least_saved: list[float]
    least_workspace: list[float]
    one: list[float]
    rows: list[tuple[float, float]]
    static: dict[int, list[float]] = field(default_factory=dict)


@dataclass(slots=True)
class Shape:
    """Layers of each stage, and how many of each kind; seconds of stages; the stages of each row; seconds of a message;
    and what is found from these when asked for."""

    counts: tuple[int, ...]
    kinds: tuple[tuple[int, ...], ...]
    stages: tuple[PhaseSeconds, ...]
    mine: tuple[tuple[int, ...], ...]
    message_s: float
    times: StageTimes
    held: Held | None = None
    ends: dict[tuple[int, bool, bool], RowEnds] = field(default_factory=dict)
    busy: dict[tuple[bool, bool], RowWork] = field(default_factory=dict)
    routes: dict[tuple[bool, bool], Route] = field(default_factory=dict)
    visits: dict[tuple[bool, bool], Floats] = field(default_factory=dict)
    frames: dict[tuple[int, bool, bool], Frame] = field(default_factory=dict)
    ways: dict[tuple[int, bool, bool], float] = field(default_factory=dict)


class Shapes(PartialBounds):
    """The shapes of all configurations of one model on one cluster, kept."""

    def __init__(self, costs: StageCosts, cost: CostModel, context_bytes: float, capacity_bytes: float = inf) -> None:
        PartialBounds.__init__(self, costs, cost, context_bytes, capacity_bytes)
        self._shapes: dict[tuple[object, ...], Shape] = {}
        self._last: tuple[Configuration | None, Shape | None] = None, None

    def shape(self, config: Configuration) -> Shape:
        """Return what a configuration shares with others."""
        last, known = self._last
        if known is not None and last is config:
            return known
        layout = config.layout
        key = (layout, config.pp, config.virtual_stages, config.cuts, config.tp, config.ep, config.dp, config.cp,
               config.outer, config.micro_batch, config.sequence_parallel, config.recompute)  # fmt: skip
        known = self._shapes.get(key)
        if known is None:
            times = self.costs.times(config)
            rows = stages_of_row(layout, config.pp, config.virtual_stages)
            message_s = self.costs.message_s(config)
            known = Shape(times.counts, self.costs.composition(times.counts), times.stages, rows, message_s, times)
            self._shapes[key] = known
        self._last = config, known
        return known

    def held(self, config: Configuration, shape: Shape) -> Held:
        """Return what the stages of a configuration's shape hold."""
        if shape.held is None:
            embed, layers, head = self.numel(config.tp, config.ep)
            each = {kinds: sum_parameters(layers, kinds) for kinds in set(shape.kinds)}
            numel = [each[kinds] for kinds in shape.kinds]
            numel[0] = numel[0] + embed
            numel[-1] = numel[-1] + head
            saved, workspace = self._saved_of_stages(config, shape), self._workspaces(config, shape)
            least = [min([saved[s] for s in row]) for row in shape.mine]
            work = [min([workspace[s] for s in row]) for row in shape.mine]
            one = [max([held + workspace[s] for flow in flows_of(config.layout, row)
                        for s, held in zip(flow, accumulate([saved[t] for t in flow]), strict=True)])
                   for row in shape.mine]  # fmt: skip
            stash = self._stashes(config, shape)
            shape.held = Held(numel, saved, workspace, stash, least, work, one, self._rows(config, shape, numel))
        return shape.held

    def _rows(self, config: Configuration, shape: Shape, numel: list[RowParameters]) -> list[tuple[float, float]]:
        """Return the parameters of each row on a rank, whole and divided."""
        copies = 2 if config.layout is Layout.BIDIRECTIONAL else 1
        dense, expert = config.dp * config.cp * copies, config.dp // config.ep * config.cp * copies
        each = {id(n): (n.over(1, 1), n.over(dense, expert)) for n in {id(n): n for n in numel}.values()}
        sizes = [each[id(n)] for n in numel]
        return [(sum([sizes[s][0] for s in row]), sum([sizes[s][1] for s in row])) for row in shape.mine]

    def _saved_of_stages(self, config: Configuration, shape: Shape) -> list[float]:
        """Return the bytes that each stage keeps of a microbatch."""
        shard, policy = shards_of(config), config.recompute
        whole = Recompute.NONE if policy.isdecimal() else Recompute(policy)
        first, each, last = self.saved(shard, whole)
        sizes = {kinds: total(each, kinds) for kinds in set(shape.kinds)}
        saved = [sizes[kinds] for kinds in shape.kinds]
        if policy.isdecimal():
            less = [full - none for full, none in zip(self.saved(shard, Recompute.FULL)[1], each, strict=True)]
            again = self.costs.repeated(shape.counts, policy)
            freed = {kinds: total(less, kinds) for kinds in set(again)}
            saved = [size + freed[kinds] for size, kinds in zip(saved, again, strict=True)]
        saved[0] += first
        saved[-1] += last
        return [size * config.micro_batch for size in saved]

    def _stashes(self, config: Configuration, shape: Shape) -> list[float]:
        """Return the bytes that each stage keeps of a microbatch from BI to BW."""
        first, each, last = self.stash(shards_of(config))
        sizes = {kinds: total(each, kinds) for kinds in set(shape.kinds)}
        stash = [sizes[kinds] for kinds in shape.kinds]
        stash[0] += first
        stash[-1] += last
        return [size * config.micro_batch for size in stash]

    def _workspaces(self, config: Configuration, shape: Shape) -> list[float]:
        """Return, for each stage, the largest transient of the first chunk of its backward, when all is still held."""
        kinds, kind_of = self.costs.kinds, self.costs.kind_of
        first = [kinds[kind_of[end - 1]][-1] if end else self.costs.first[-1] for end in accumulate(shape.counts)]
        first[-1] = self.costs.last[-1]
        share = config.micro_batch / (config.tp * config.cp)
        return [chunk.workspace_bytes * share for chunk in first]
