"""From a program to a verified plan: seconds of each step, microseconds a node, growth, memory. One core."""

from __future__ import annotations

import gc
import resource
import time
from itertools import pairwise
from statistics import median
from typing import Any

from piper_core import Program, compile_program, get_family, lower, synthetic, training_dag, verify
from piper_core.ir.action import format_slots

LIMIT_S = 0.15  # PP8 x DP4, 16 microbatches, 24 MoE layers, ZeRO-3, interleaved
LARGE_NODES, LARGE_S, LARGE_BYTES = 100_000, 4.0, 1e9
STEPS = ("model", "parse", "apply", "lower", "verify")


def directives(pp: int, dp: int, microbatches: int, virtual: int) -> list[dict[str, Any]]:
    """Return an interleaved program: ZeRO-3 and expert parallelism over the ranks of each row, as JSON data."""
    program: list[dict[str, Any]] = []
    for stage in range(pp * virtual):
        at, ranks = {"PP": stage}, [stage % pp * dp + i for i in range(dp)]
        program += [
            {"op": "place", "filter": at, "devices": ranks, "stream": "pp"},
            {"op": "replicate", "filter": at, "devices": ranks, "shard_grads": True, "shard_params": True,
             "reduce_stream": "reduce", "gather_stream": "gather"},
            {"op": "shard", "filter": at | {"EP": "*"}, "devices": ranks, "stream": "ep"},
        ]  # fmt: skip
    program.append({"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": microbatches})
    rows = get_family("interleaved_1f1b").grid(pp, microbatches, virtual).rows
    program.append({"op": "order", "actions": {str(row): format_slots(slots) for row, slots in enumerate(rows)}})
    return program


def measure(data: list[dict[str, Any]], layers: int, stages: int, repeats: int) -> dict[str, float]:
    """Return nodes, actions and the median seconds of each step."""
    rounds: list[list[float]] = []
    nodes = actions = 0
    for _ in range(repeats):
        gc.collect()
        laps = [time.perf_counter()]
        base = training_dag(synthetic(f"moe:{layers}", stages))
        laps.append(time.perf_counter())
        program = Program.parse(data)
        laps.append(time.perf_counter())
        dag = program.apply(base)
        laps.append(time.perf_counter())
        plan = lower(dag)
        laps.append(time.perf_counter())
        verify(plan)
        laps.append(time.perf_counter())
        rounds.append([end_s - start_s for start_s, end_s in pairwise(laps)])
        nodes, actions = len(dag), len(plan)
    steps = {step: median(times) for step, times in zip(STEPS, zip(*rounds, strict=True), strict=True)}
    return {"nodes": nodes, "actions": actions, **steps}


def main() -> int:
    """Print the tables; return 1 when a limit is broken."""
    # warm: imports and the caches of families
    compile_program(Program.parse(directives(2, 2, 2, 2)), training_dag(synthetic("moe:4", 4)))
    print(f"{'PP x v, m, layers':20}{'nodes':>9}{'actions':>9}", *(f"{step + ' s':>9}" for step in STEPS),
          f"{'total s':>9}{'us/node':>9}{'peak MB':>9}")  # fmt: skip
    kept = True
    for pp, microbatches, layers, repeats in (
        (8, 16, 24, 21), (8, 32, 24, 5), (8, 64, 24, 5), (8, 144, 24, 3), (8, 288, 24, 3), (16, 64, 120, 3),
    ):  # fmt: skip
        data = directives(pp, 4, microbatches, 2)
        found = measure(data, layers, 2 * pp, repeats)
        total_s = sum(found[step] for step in STEPS)
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(f"{f'{pp} x 2, {microbatches}, {layers}':20}{found['nodes']:9,}{found['actions']:9,}",
              *(f"{found[step]:9.4f}" for step in STEPS), f"{total_s:9.4f}{total_s / found['nodes'] * 1e6:9.2f}"
              f"{peak_bytes / 1e6:9.0f}")  # fmt: skip
        if microbatches == 16:
            kept &= total_s <= LIMIT_S
        else:
            share = max(1.0, found["nodes"] / LARGE_NODES)
            kept &= total_s <= LARGE_S * share and peak_bytes <= LARGE_BYTES * share
    print(f"limits: {LIMIT_S} s for the first; {LARGE_S} s and {LARGE_BYTES / 1e9:.0f} GB at {LARGE_NODES:,} nodes")
    return 0 if kept else 1
