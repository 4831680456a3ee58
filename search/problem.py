"""A model on a cluster, and what its configurations are: programs, plans, scores."""

from __future__ import annotations

from dataclasses import dataclass, replace

from piper_core.arch.chunk import ModelChunks
from piper_core.arch.closed_form import model_chunks
from piper_core.arch.record import Architecture
from piper_core.ir.dag import Dag, training_dag
from piper_core.mesh import Mesh
from piper_core.program.program import Program
from piper_core.schedule.compile import Compiled, compile_program
from profiler.spec import Cluster
from search.bound import Bounds
from search.candidate import Score
from search.cost.base import CostModel
from search.cost.memory import USABLE
from search.cost.roofline import RooflineCost
from search.direct.score import Direct
from search.evaluate import evaluate
from search.generators.recipe import program_of
from search.objective import Objective
from search.rounds import extended, representative, rounds
from search.space import Configuration
from search.stage_costs import StageCosts

LONG = 20_000
"""Chunks times microbatches from which a step is scored by shorter ones: the same within 0.1 % (1e-9 below ZeRO-2)."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration that was simulated."""

    config: Configuration
    layers_per_stage: tuple[int, ...]
    score: Score

    @property
    def key(self) -> tuple[float, int, Configuration]:
        """Rank: step time, ties by how much is unusual, then by the configuration itself."""
        return self.score.step_time_s, self.config.unusual, self.config

    def value(self, objective: Objective) -> float:
        """Return what the objective makes small: seconds, or bytes."""
        return self.score.worst_row_bytes if objective == "memory" else self.score.step_time_s

    def rank(self, objective: Objective) -> tuple[float, float, int, Configuration]:
        """Return the rank under an objective; ties by step time, then as :attr:`key` has it."""
        return self.value(objective), *self.key


class Problem:
    """A model on a cluster, with what every evaluation shares."""

    def __init__(
        self, architecture: Architecture, cluster: Cluster, gpus: int, global_batch: int, seq_len: int
    ) -> None:
        self.architecture, self.cluster = architecture, cluster
        self.gpus, self.global_batch, self.seq_len = gpus, global_batch, seq_len
        self.price_with(model_chunks(architecture, seq_len), RooflineCost(cluster))

    def price_with(self, model: ModelChunks, cost: CostModel) -> None:
        """Set the chunk table and the costs that all evaluations and bounds share."""
        self.model, self.cost = model, cost
        self.costs = StageCosts(model, cost)
        device = self.cluster.device
        self.bounds = Bounds(self.costs, cost, device.context_bytes, USABLE * device.memory_bytes)
        self.base = training_dag(model, global_batch=self.global_batch)
        self.direct = Direct(self.architecture, model, self.cluster, cost, self.bounds)

    def bucket_mib(self, config: Configuration) -> int:
        """Return the bucket size of a configuration (0: one bucket a stage)."""
        return self.bounds.bucket_mib(config.tp, config.ep, config.bucket)

    def program(self, config: Configuration) -> tuple[Program, Mesh, tuple[int, ...]]:
        """Return the program of a configuration, its mesh, and its layers per stage."""
        counts, _ = self.costs.of(config)
        grid = self.direct.grid(config) if config.order == "list" else None
        program, mesh = program_of(config, counts, self.bucket_mib(config), grid)
        return program, mesh, counts

    def compile(self, config: Configuration) -> Compiled:
        """Return the applied DAG and the verified plan of a configuration."""
        program, mesh, _ = self.program(config)
        return compile_program(program, self.base, mesh)

    def score(self, config: Configuration) -> Score:
        """Simulate a configuration: directly where that says the same as :meth:`confirmed`, which is far slower.

        Raises:
            DirectiveError, PlanError, InfeasibleError: it does not apply, would not run, or cannot be ordered.
        """
        return self.direct.score(config) if self.direct.covers(config) else self._slow(config)

    def confirmed(self, config: Configuration) -> Score:
        """Score a configuration whose program was applied, and whose plan was proved to run; of a long step of a large
        model the proof is of one with fewer microbatches.

        Raises:
            DirectiveError, PlanError, InfeasibleError: as :meth:`score`.
        """
        if not (self._long(config) and self.direct.covers(config)):
            return self._slow(config)
        fewer = representative(config) if config.order == "family" else config.num_microbatches
        if fewer is None:
            return self._slow(config)
        base = replace(self.base, global_batch=config.dp * config.micro_batch * fewer)
        program, mesh, _ = self.program(replace(config, num_microbatches=fewer))
        compile_program(program, base, mesh)
        return self.direct.score(config)

    def _long(self, config: Configuration) -> bool:
        return config.num_microbatches * len(self.model.chunks) >= LONG

    def _slow(self, config: Configuration) -> Score:
        """Build, verify and simulate a configuration; a long one of a large model by two with fewer microbatches."""
        shorter = rounds(config) if config.order == "family" and self._long(config) else None
        if shorter is None:
            return self._score(config, self.base)

        def of(m: int) -> Score:
            base = replace(self.base, global_batch=config.dp * config.micro_batch * m)
            return self._score(replace(config, num_microbatches=m), base)

        return extended(of(shorter[0]), of(shorter[1]), config, shorter)

    def _score(self, config: Configuration, base: Dag) -> Score:
        program, mesh, _ = self.program(config)
        return evaluate(
            compile_program(program, base, mesh), self.cost, self.cluster.device, seq_len=self.seq_len, gpus=self.gpus,
            global_batch=base.global_batch, architecture=self.architecture,
        )  # fmt: skip
