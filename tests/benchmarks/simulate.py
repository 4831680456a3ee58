"""Pricing, simulating and scoring compiled plans: milliseconds of each step. One core."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

from piper_core import Program, get_family, lower, model_chunks, preset, training_dag
from piper_core.ir.action import format_slots
from piper_core.ir.dag import Dag
from piper_core.schedule.plan import Plan
from profiler.spec import load_cluster
from search.cost import RooflineCost
from search.cost.memory import memory
from search.cost.price import node_seconds
from search.simulator import action_seconds, loops, lower_plan, simulate

LIMIT_PRICE_S = 0.005  # 10,000 nodes
LIMIT_RUN_S = 0.001  # PP4, 64 microbatches, after lowering
LIMIT_LARGE_RUN_S = 0.050  # 50,000 actions, after lowering
SLOWDOWN = 1.126


def compiled(pp: int, dp: int, microbatches: int, zero: int, bucket: int | None) -> tuple[Dag, Plan]:
    """Return a llama9b compiled as 1F1B."""
    layers = preset("llama9b").layers
    data: list[dict[str, Any]] = [
        {"op": "stage", "layers_per_stage": [layers // pp] * pp},
        {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": microbatches},
    ]
    for stage in range(pp):
        ranks = [stage * dp + i for i in range(dp)]
        data += [
            {"op": "place", "filter": {"PP": stage}, "devices": ranks},
            {"op": "replicate", "filter": {"PP": stage}, "devices": ranks, "shard_optimizer": zero == 1,
             "shard_grads": zero >= 2, "shard_params": zero == 3, **({"bucket_size": bucket} if bucket else {})},
        ]  # fmt: skip
    rows = get_family("1f1b").grid(pp, microbatches, 1).rows
    data.append({"op": "order", "actions": {str(row): format_slots(slots) for row, slots in enumerate(rows)}})
    base = training_dag(model_chunks(preset("llama9b"), 4096), global_batch=microbatches * dp)
    dag = Program.parse(data).apply(base)
    return dag, lower(dag)


def quickest(work: Callable[[], object], repeats: int = 15) -> float:
    """Return the median seconds of processor time of some runs, after one that warms the caches."""
    work()
    times = []
    for _ in range(repeats):
        start_s = time.process_time()
        work()
        times.append(time.process_time() - start_s)
    return median(times)


def without_numba(work: Callable[[], object]) -> object:
    """Run with the loops as a process runs them that has simulated little yet."""
    kept, loops._compiled = loops._compiled, None
    spent, loops._spent = loops._spent, 0
    try:
        return work()
    finally:
        loops._compiled, loops._spent = kept, spent


def main() -> int:
    """Print the table; return 1 when a limit is broken."""
    cluster = load_cluster("p4de")
    cost = RooflineCost(cluster)
    columns = ("price", "durations", "lower", "plain run", "run", "contended", "memory", "exposed")
    print(f"{'PP x DP, m, ZeRO':22}{'nodes':>9}{'actions':>9}", *(f"{name + ' ms':>13}" for name in columns))
    kept = True
    loops.pick(loops.COLD + 1)  # compiles them, or loads them
    for pp, dp, microbatches, zero, bucket in ((4, 8, 64, 1, None), (4, 8, 64, 3, 200), (4, 8, 128, 3, 200)):
        dag, plan = compiled(pp, dp, microbatches, zero, bucket)
        seconds = action_seconds(dag, plan, node_seconds(dag, cost))
        lowered = lower_plan(plan)
        simulation = simulate(lowered, seconds)
        nodes = node_seconds(dag, cost)
        work: tuple[Callable[[], object], ...] = (
            partial(node_seconds, dag, cost), partial(action_seconds, dag, plan, nodes), partial(lower_plan, plan),
            partial(without_numba, partial(simulate, lowered, seconds)), partial(simulate, lowered, seconds),
            partial(simulate, lowered, seconds, slowdown=SLOWDOWN), partial(memory, dag, simulation, cluster.device),
            simulation.exposed_communication_s,
        )  # fmt: skip
        found = dict(zip(columns, map(quickest, work), strict=True))
        name = f"{pp} x {dp}, {microbatches}, {zero}" + (f", {bucket} MiB" if bucket else "")
        print(f"{name:22}{len(dag):9,}{len(plan):9,}", *(f"{found[column] * 1e3:13.2f}" for column in columns))
        kept &= found["price"] <= LIMIT_PRICE_S * max(1.0, len(dag) / 10_000)
        share = max(1.0, len(plan) / 50_000)
        kept &= found["contended"] <= (LIMIT_RUN_S if len(plan) < 5000 else LIMIT_LARGE_RUN_S * share)
    print(f"limits: price {LIMIT_PRICE_S * 1e3:.0f} ms for 10,000 nodes; contended {LIMIT_RUN_S * 1e3:.0f} ms for the")
    print(f"first, {LIMIT_LARGE_RUN_S * 1e3:.0f} ms for 50,000 actions")
    return 0 if kept else 1
