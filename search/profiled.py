"""Predictions by a profile: the same plan, priced with what was measured, with the range that measuring leaves open."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from piper_core.arch.closed_form import model_chunks
from piper_core.arch.record import Architecture
from piper_core.errors import ConfigError
from piper_core.ir.dag import Dag, training_dag
from piper_core.names import Axis, Collective, NodeKind
from piper_core.program.strategy import Strategy
from piper_core.schedule.compile import Compiled, compile_program
from profiler.fingerprint import Machine, machine
from profiler.record import Profile, Run
from profiler.residual import Residual
from profiler.spec import Cluster, Device, device_ids
from profiler.store import find, taken
from search.candidate import Score
from search.cost.profiled import Level, ProfiledCost, widened
from search.cost.roofline import RooflineCost
from search.evaluate import Evaluation, assess
from search.predict import Prediction
from search.problem import Problem
from search.simulator.lower import CommKind
from search.space import Configuration

SAME_MEMORY = 0.1
"""What the memory of a device may differ by from its record: drivers keep some of it."""
INNER = (Axis.TENSOR, Axis.SEQUENCE, Axis.EXPERT, Axis.CONTEXT)

INNER_KINDS = (CommKind.TENSOR, CommKind.EXPERT, CommKind.CONTEXT)
"""Kinds of communication inside chunks."""


@dataclass(frozen=True, slots=True)
class Profiled:
    """A prediction by a profile. ``low_s`` and ``high_s`` are the step with every cost at its low and its high end;
    ``recalibrated`` what the residual model makes of it, (seconds, low, high), None before any run."""

    found: Prediction
    cost: ProfiledCost
    low_s: float
    high_s: float
    recalibrated: tuple[float, float, float] | None

    def to_data(self) -> dict[str, Any]:
        """Return what the JSON form of the prediction gets beside its own."""
        return {
            "origins": self.cost.to_data(), "low_s": self.low_s, "high_s": self.high_s,
            "machine": str(self.cost.profile.machine), "recalibrated": self.recalibrated,
        }  # fmt: skip

    def lines(self) -> list[str]:
        """Return what the report gets beside its own."""
        step = self.found.score.step_time_s
        made = [
            f"by a profile of {self.cost.profile.machine}",
            self.cost.says(),
            f"step {step * 1e3:.2f} ms, {self.low_s * 1e3:.2f} to {self.high_s * 1e3:.2f} ms as costs are uncertain",
        ]
        if self.recalibrated is not None:
            seconds, low, high = (each * 1e3 for each in self.recalibrated)
            runs = len(self.cost.profile.runs)
            made.append(f"recalibrated by {runs} runs: {seconds:.2f} ms, 90 % between {low:.2f} and {high:.2f} ms")
        return made


def by_profile(
    found: Prediction, profile: Profile, architecture: Architecture, cluster: Cluster, *, where: str = "the profile"
) -> Profiled:
    """Price a predicted strategy's plan again, with a profile.

    Raises:
        ConfigError: the profile is of another model.
    """
    dag = in_dtype(found.compiled.dag, profile.dtype_bytes)
    compiled = Compiled(dag, found.compiled.plan)
    return _priced(found.strategy, compiled, profile, architecture, cluster, where, found.config)


def price_strategy(
    strategy: Strategy, profile: Profile, architecture: Architecture, cluster: Cluster, *, where: str = "the profile"
) -> Profiled:
    """Compile a strategy in the dtype of a profile, as a search does, and price it with that.

    Raises:
        ConfigError: the profile is of another model; DirectiveError: a directive does not apply; PlanError: a plan that
            would not run.
    """
    base = base_of(strategy, profile, architecture)
    compiled = compile_program(strategy.program, base, strategy.header.world)
    return _priced(strategy, compiled, profile, architecture, cluster, where, None)


def base_of(strategy: Strategy, profile: Profile, architecture: Architecture) -> Dag:
    """Return the DAG that a strategy's directives rewrite, in the dtype of a profile."""
    header = strategy.header
    model = widened(model_chunks(architecture, header.length(architecture)), profile.dtype_bytes)
    return training_dag(model, global_batch=header.global_batch, sync=header.sync)


def assess_by(
    strategy: Strategy, compiled: Compiled, profile: Profile, architecture: Architecture, cluster: Cluster, *,
    level: Level = "middle", where: str = "the profile",
) -> tuple[Evaluation, ProfiledCost]:  # fmt: skip
    """Price a strategy that is compiled in the dtype of a profile, with every cost at one end of its interval.

    Raises:
        ConfigError: the profile is of another model.
    """
    dag = compiled.dag
    ranks = len({rank for row in compiled.plan.rows for rank in row})
    cost = ProfiledCost(
        profile, RooflineCost(cluster), architecture, dag.model.seq_len, ranks=ranks,
        gpus_per_node=cluster.gpus_per_node, level=level, where=where,
    )  # fmt: skip
    batch = strategy.header.global_batch or dag.global_batch or max(1, dag.microbatches)
    made = assess(
        compiled, cost, cluster.device, seq_len=dag.model.seq_len, gpus=ranks, global_batch=batch,
        architecture=architecture,
    )  # fmt: skip
    return made, cost


def _priced(
    strategy: Strategy, compiled: Compiled, profile: Profile, architecture: Architecture, cluster: Cluster, where: str,
    config: Configuration | None,
) -> Profiled:  # fmt: skip
    def at(level: Level) -> tuple[Evaluation, ProfiledCost]:
        return assess_by(strategy, compiled, profile, architecture, cluster, level=level, where=where)

    middle, cost = at("middle")
    low, high = at("low")[0].score.step_time_s, at("high")[0].score.step_time_s
    made = Prediction(strategy, config, compiled, middle.score, middle.simulation, middle.memory)
    recalibrated = None
    if profile.runs:
        recalibrated = Residual.of(profile.runs).apply(middle.score.step_time_s, features(middle.score))
    return Profiled(made, cost, low, high, recalibrated)


def features(found: Score) -> dict[str, float]:
    """Return the shares of a predicted step that the residual model looks at."""
    step = found.step_time_s or 1.0
    exposed = found.exposed_communication_s
    inner = sum(seconds for kind, seconds in exposed.items() if kind in INNER_KINDS)
    return {
        "exposed": (sum(exposed.values()) - inner) / step, "bubble": found.breakdown.get("waiting", 0.0) / step,
        "inner": inner / step,
    }  # fmt: skip


def run_of(name: str, digest: str, when: str, sample: Any, predicted: Score) -> Run:
    """Return the record of a measured step, for the profile's history."""
    return Run(name, digest, when, sample, predicted.step_time_s, features(predicted))


def in_dtype(dag: Dag, dtype_bytes: int) -> Dag:
    """Return a compiled DAG whose weights and activations are of another width; buckets hold what they held.

    Gradients are reduced in their own width, whatever that of the weights is.
    """
    by = dtype_bytes / dag.model.dtype_bytes
    if by == 1:
        return dag
    nodes = dag.nodes
    gathers = (nodes.axis == Axis.DATA) & (nodes.collective == Collective.ALL_GATHER)
    wider = np.isin(nodes.kind, (NodeKind.SEND, NodeKind.RECV))
    wider |= (nodes.kind == NodeKind.COLLECTIVE) & (np.isin(nodes.axis, INNER) | gathers)
    payload = np.where(wider, nodes.payload * by, nodes.payload)
    model = widened(dag.model, dtype_bytes)
    return replace(dag, nodes=nodes.with_(payload=payload), model=model)


def local_profile(architecture: Architecture, cluster: Cluster, ranks: int = 2) -> Path | None:
    """Return the store's profile of a model on this machine, if the cluster is of this machine's devices; ``ranks``
    share its cores."""
    try:
        if cluster.name == "cpu":
            return find(architecture, machine("cpu", threads_of(ranks)), "float32")
        if not taken(architecture, "bfloat16"):  # asking for GPUs takes longer than looking at names
            return None
        here = machine("cuda")
    except ConfigError:  # no torch or no GPU: nothing of this machine was measured
        return None
    return find(architecture, here, "bfloat16") if _is(cluster.device, here) else None


def threads_of(ranks: int) -> int:
    """Return the threads that each of some ranks on this machine's cores computes with."""
    return max(1, (os.cpu_count() or 1) // ranks)


def _chip(device: Device) -> str:
    return device.name.split("-")[0]


def _words(here: Machine) -> list[str]:
    return here.device.replace("-", " ").split()


def _is(device: Device, here: Machine) -> bool:
    """Say whether a hardware record is of a machine's devices: the same chip, board and memory."""
    said = _words(here)
    same_board = ("PCIe" in device.name.split("-")) == ("PCIe" in said)
    return _chip(device) in said and same_board and abs(here.memory_bytes / device.memory_bytes - 1) < SAME_MEMORY


def check_device(profile: Profile, cluster: Cluster, where: str) -> None:
    """Reject a profile of one kind of device for a cluster of another: its times would stand beside that one's.
    Clusters of devices that the package does not know are a person's own business.

    Raises:
        ConfigError: it is.
    """
    here, device = profile.machine, cluster.device
    own = cluster.name != "cpu" and device.name.lower() not in device_ids()
    same = cluster.name == "cpu" if here.kind == "cpu" else cluster.name != "cpu" and _chip(device) in _words(here)
    if not same and not own:
        instead = "--cluster cpu" if here.kind == "cpu" else "a --cluster of that device (piper-search clusters)"
        raise ConfigError(
            f"{where} is of {here.device}, and cluster {cluster.name} is of {device.name}: times of both would be "
            f"mixed; give {instead}, a profile taken there, or --profile none"
        )


def use_profile(problem: Problem, profile: Profile, where: str = "the profile") -> ProfiledCost:
    """Let a search price with a profile, before it begins; return the cost model, which says where answers came from.

    Raises:
        ConfigError: the profile is of another model.
    """
    cost = ProfiledCost(
        profile, problem.cost, problem.architecture, problem.seq_len, ranks=problem.gpus,
        gpus_per_node=problem.cluster.gpus_per_node, where=where,
    )  # fmt: skip
    problem.price_with(widened(problem.model, profile.dtype_bytes), cost)
    return cost
