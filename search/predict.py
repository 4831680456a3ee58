"""Predict one strategy: build its program, compile, simulate, count memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from piper_core.arch.chunk import ModelChunks
from piper_core.arch.closed_form import model_chunks
from piper_core.arch.huggingface import load_architecture
from piper_core.arch.record import Architecture
from piper_core.errors import ConfigError
from piper_core.ir.dag import Dag, training_dag
from piper_core.names import Sync
from piper_core.program.strategy import Header, Strategy, base_dag
from piper_core.schedule.compile import Compiled, compile_program
from piper_core.schedule.lower import lower
from profiler.spec import Cluster, load_cluster
from search.bound import Bounds
from search.candidate import Score
from search.cost.memory import Memory
from search.cost.roofline import RooflineCost
from search.cost.software import OWN, Software
from search.direct.asked import Asked
from search.evaluate import Evaluation, assess
from search.generators.recipe import program_of
from search.request import Kernels, Request
from search.simulator.run import Simulation
from search.space import Configuration
from search.stage_costs import StageCosts


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a strategy is predicted to do, and where that comes from.

    ``config`` is None for a strategy file, which may say what no configuration can.
    """

    strategy: Strategy
    config: Configuration | None
    compiled: Compiled
    score: Score
    simulation: Simulation
    memory: Memory

    def to_data(self) -> dict[str, Any]:
        """Return the JSON form: the score's fields, and the strategy in short."""
        dag = self.compiled.dag
        return {
            **self.score.to_data(),
            "model": dag.model.name,
            "cluster": self.strategy.header.cluster,
            "gpus": self.strategy.header.gpus,
            "strategy": None if self.config is None else describe(self.config) | {"layers_per_stage": layers_of(dag)},
        }


def predict(request: Request, *, proved: bool = True) -> Prediction:
    """Predict what is asked for; not ``proved``, the plan is simulated without the verifier, a third quicker.

    Raises:
        ConfigError, DirectiveError: numbers that do not go together; the text says which would do.
        PlanError: a plan that would not run.
    """
    config = request.resolve()
    batch = config.dp * config.micro_batch * config.num_microbatches
    model = _model(request.architecture, request.cluster, request.seq_len, request.kernels, request.software)
    layers = model.layers_per_stage(config, request.layers)
    bucket = model.bounds.bucket_mib(config.tp, config.ep) if request.bucket_mib is None else request.bucket_mib
    program, mesh = program_of(config, layers, bucket)
    header = Header(
        model=request.architecture.name, cluster=request.cluster.name, mesh=mesh, gpus=mesh.size, global_batch=batch,
        seq_len=request.seq_len, micro_batch=config.micro_batch, sync=request.sync, schedule=config.schedule,
    )  # fmt: skip
    base = model.base(batch, request.sync)
    return _predict(Strategy(header, program), base, model.cost, request.architecture, config, proved)


def quick(request: Request) -> Evaluation:
    """Predict as :func:`predict` does, plan unproved, in a tenth of the time: without a DAG where that says the same.

    Raises:
        As :func:`predict`.
    """
    config = request.resolve()
    model = _model(request.architecture, request.cluster, request.seq_len, request.kernels, request.software)
    asked = model.asked(request.sync)
    if not asked.covers(config):
        found = predict(request, proved=False)
        return Evaluation(found.score, found.simulation, found.memory)
    layers = None if isinstance(request.layers, str) else request.layers
    return asked.of(layers, request.bucket_mib).assess(config)


def predict_strategy(strategy: Strategy, cluster: Cluster | None = None, kernels: Kernels | None = None) -> Prediction:
    """Predict a strategy file, on the cluster that its header names or on another.

    Raises:
        ConfigError, ProgramError: a header without model or cluster, or with one that is unknown; ``kernels`` for a
            synthetic model, which has none.
        DirectiveError: a directive does not apply; PlanError: a plan that would not run.
    """
    header = strategy.header
    if cluster is None:
        if header.cluster is None:
            raise ConfigError("the strategy names no cluster; give one with --cluster, or a header field cluster")
        cluster = load_cluster(header.cluster)
    known = header.model and not header.model.startswith(("dense:", "moe:"))
    architecture = load_architecture(header.model) if header.model and known else None
    if kernels is None:
        base = base_dag(strategy)
    elif architecture is None:
        raise ConfigError(f"model {header.model} is synthetic, and has no kernels to choose; leave the option out")
    else:
        chunks = _chunks(architecture, header.length(architecture), kernels)
        base = training_dag(chunks, global_batch=header.global_batch, sync=header.sync)
    return _predict(strategy, base, _cost(cluster), architecture, None, True)


def _predict(
    strategy: Strategy, base: Dag, cost: RooflineCost, architecture: Architecture | None,
    config: Configuration | None, proved: bool,
) -> Prediction:  # fmt: skip
    header, program = strategy.header, strategy.program
    if proved:
        compiled = compile_program(program, base, header.world)
    else:
        dag = program.apply(base, header.world)
        compiled = Compiled(dag, lower(dag))
    gpus = header.world.size if header.world else len({rank for row in compiled.plan.rows for rank in row})
    found = assess(
        compiled, cost, cost.cluster.device, seq_len=base.model.seq_len, gpus=gpus,
        global_batch=header.global_batch, architecture=architecture,
    )  # fmt: skip
    return Prediction(strategy, config, compiled, found.score, found.simulation, found.memory)


def describe(config: Configuration) -> dict[str, Any]:
    """Return a configuration's fields under the names that reports use."""
    return {
        "pp": config.pp, "tp": config.tp, "dp": config.dp, "ep": config.ep, "cp": config.cp,
        "schedule": config.schedule, "virtual_stages": config.virtual_stages, "zero_stage": config.zero,
        "micro_batch": config.micro_batch, "num_microbatches": config.num_microbatches,
        "recompute": config.recompute, "sequence_parallel": config.sequence_parallel, "outer": config.outer,
        "prefetch": config.prefetch,
    }  # fmt: skip


def layers_of(dag: Dag) -> list[int]:
    """Return how many layers each stage of a compiled DAG holds."""
    stage, layer = dag.nodes.stage[dag.compute], dag.chunk_tag("LAYER")[dag.nodes.chunk[dag.compute]]
    held = {(int(s), int(a)) for s, a in zip(stage, layer, strict=True) if 0 <= a < dag.model.layers}
    return [sum(s == each for s, _ in held) for each in range(dag.stages)]


@dataclass(frozen=True, slots=True)
class _Model:
    """A model on a cluster with what all its predictions share: chunk table, prices, costs of stages, and what scores
    without a DAG, by ``sync``."""

    architecture: Architecture
    cost: RooflineCost
    costs: StageCosts
    bounds: Bounds
    direct: dict[Sync, Asked] = field(default_factory=dict)

    def asked(self, sync: Sync) -> Asked:
        """Return what scores without a DAG."""
        if sync not in self.direct:
            self.direct[sync] = Asked(
                self.architecture, self.costs.model, self.cost.cluster, self.cost, self.bounds, sync
            )
        return self.direct[sync]

    def base(self, global_batch: int, sync: Sync) -> Dag:
        return training_dag(self.costs.model, global_batch=global_batch, sync=sync)

    def layers_per_stage(self, config: Configuration, layers: tuple[int, ...] | str) -> tuple[int, ...]:
        return self.costs.of(config)[0] if isinstance(layers, str) else layers


@lru_cache(maxsize=64)
def _model(architecture: Architecture, cluster: Cluster, seq_len: int, kernels: Kernels, software: Software) -> _Model:
    chunks = _chunks(architecture, seq_len, kernels)
    cost = _cost(cluster, software)
    costs = StageCosts(chunks, cost)
    return _Model(architecture, cost, costs, Bounds(costs, cost, cluster.device.context_bytes))


def _chunks(architecture: Architecture, seq_len: int, kernels: Kernels) -> ModelChunks:
    return model_chunks(
        architecture, seq_len, attention=kernels.attention, norm=kernels.norm, activation=kernels.activation,
        dropout=kernels.dropout, loss=kernels.loss,
    )  # fmt: skip


@lru_cache(maxsize=16)
def _cost(cluster: Cluster, software: Software = OWN) -> RooflineCost:
    return RooflineCost(cluster, software)
