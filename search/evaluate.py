"""From a compiled strategy to its score: price, simulate, count memory."""

from __future__ import annotations

from dataclasses import dataclass

from piper_core.arch.record import Architecture
from piper_core.ir.dag import Dag
from piper_core.schedule.compile import Compiled
from profiler.spec import Device
from search.candidate import Score
from search.cost.base import CostModel
from search.cost.memory import Memory, memory
from search.cost.price import node_seconds
from search.hosts import with_hosts, with_messages
from search.simulator.lower import action_seconds
from search.simulator.run import Simulation, simulate


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What simulating a compiled strategy says: its score, and when and where it comes from."""

    score: Score
    simulation: Simulation
    memory: Memory


def evaluate(
    compiled: Compiled,
    cost: CostModel,
    device: Device,
    *,
    seq_len: int,
    gpus: int,
    global_batch: int | None = None,
    architecture: Architecture | None = None,
) -> Score:
    """Return the score of a compiled strategy (see :func:`assess`)."""
    return assess(
        compiled, cost, device, seq_len=seq_len, gpus=gpus, global_batch=global_batch, architecture=architecture
    ).score


def assess(
    compiled: Compiled,
    cost: CostModel,
    device: Device,
    *,
    seq_len: int,
    gpus: int,
    global_batch: int | None = None,
    architecture: Architecture | None = None,
) -> Evaluation:
    """Price and simulate a compiled strategy, and count its memory.

    Args:
        seq_len: tokens of one sequence.
        gpus: devices that the step's tokens are counted against.
        global_batch: sequences of a step (default: the DAG's own; one for each microbatch where it has none).
        architecture: says the model FLOPs of a token; without it they are the chunks' own, recompute left out.
    """
    dag, plan = compiled.dag, compiled.plan
    alone = with_messages(plan, action_seconds(dag, plan, node_seconds(dag, cost)), cost.software)
    seconds = with_hosts(plan, alone, cost.host_s)
    simulation = simulate(plan, seconds, slowdown=cost.overlap_slowdown)
    used = memory(dag, simulation, device, cost.software)
    batch = global_batch or dag.global_batch or max(1, dag.microbatches)
    flops = architecture.model_flops_per_token(seq_len) if architecture else _flops_per_token(dag, seq_len)
    tokens = float(batch) * seq_len
    return Evaluation(
        score(simulation, used, tokens=tokens, flops_per_token=flops, gpus=gpus, device=device), simulation, used
    )


def score(
    simulation: Simulation, used: Memory, *, tokens: float, flops_per_token: float, gpus: int, device: Device
) -> Score:
    """Return the score of a simulated plan that trains ``tokens`` a step."""
    period = simulation.step_time_s
    rate = tokens / period / gpus if period else 0.0
    exposed = simulation.exposed_communication_s()
    inner = float(simulation.seconds.inner.sum(axis=1).mean())
    update = float(simulation.seconds.update.mean())
    busy = float(simulation.busy_s.mean())
    slower = float(simulation.contention_s.mean())
    breakdown = {"compute": busy - inner - update - slower, "update": update}
    breakdown |= {"contention": slower} if slower else {}
    breakdown |= {kind: seconds for kind, seconds in exposed.items() if seconds}
    breakdown["waiting"] = max(0.0, period - sum(breakdown.values()))
    return Score(
        step_time_s=period,
        tokens_per_s_per_gpu=rate,
        model_tflops_per_gpu=rate * flops_per_token / 1e12,
        mfu=rate * flops_per_token / device.matmul_flops,
        peak_memory_bytes=used.peaks,
        margin_bytes=used.margin_bytes,
        fits=used.fits,
        bubble_ratio=simulation.bubble_ratio,
        exposed_communication_s=exposed,
        breakdown=breakdown,
        memory=tuple(row.breakdown() for row in used.rows),
    )


def _flops_per_token(dag: Dag, seq_len: int) -> float:
    return sum(chunk.flops for chunk in dag.chunks) / seq_len
