"""The main command from start to finish, in a process of its own: how long, how much it looked at, how sure it is."""

from __future__ import annotations

import time
from math import inf
from statistics import median

from piper_core.arch import preset
from profiler.spec import load_cluster
from search.engine import Problem
from search.generators.best_first import BestFirst
from search.space import Space, parse_fix
from tests.benchmarks.runs import GLOBAL_BATCH, GPUS, RUNS, SEQ_LEN, Run, search

LIMIT_WALL_S = 20.0


def bounded_per_s(run: Run, least: int = 5000) -> tuple[float, float]:
    """Return how many configurations a core bounds a second, and the seconds until the first batch is known."""
    architecture, cluster = preset(run.model), load_cluster(run.cluster)
    start_s = time.perf_counter()
    problem = Problem(architecture, cluster, GPUS, GLOBAL_BATCH, SEQ_LEN)
    space = Space(architecture, GPUS, cluster.gpus_per_node, GLOBAL_BATCH, SEQ_LEN, parse_fix(run.fix))
    generator = BestFirst(space, problem.bounds, cluster.device.memory_bytes)
    generator.ask(8, inf)
    first_s = time.perf_counter() - start_s
    while generator.bounded + generator.partials < least and generator.ask(8, inf):
        pass
    return (generator.bounded + generator.partials) / (time.perf_counter() - start_s), first_s


def simulated_per_s(run: Run, count: int = 12) -> float:
    """Return how many configurations a core builds, verifies and simulates a second: the first that search asks for."""
    architecture, cluster = preset(run.model), load_cluster(run.cluster)
    problem = Problem(architecture, cluster, GPUS, GLOBAL_BATCH, SEQ_LEN)
    space = Space(architecture, GPUS, cluster.gpus_per_node, GLOBAL_BATCH, SEQ_LEN, parse_fix(run.fix))
    batch = BestFirst(space, problem.bounds, cluster.device.memory_bytes).ask(count, inf)
    times = []
    for config in batch:
        start_s = time.perf_counter()
        problem.score(config)
        times.append(time.perf_counter() - start_s)
    print(f"  {run}: one takes {min(times) * 1e3:.0f} to {max(times) * 1e3:.0f} ms, median {median(times) * 1e3:.0f}")
    return len(times) / sum(times)


def main() -> int:
    """Print the table; return 1 when a limit is broken."""
    print("building, verifying and simulating on one core:")
    rates = [(bounded_per_s(run), simulated_per_s(run)) for run in RUNS]
    columns = ("wall s", "N", "simulated", "gap", "best s", "first batch s", "bounded/s", "simulated/s")
    print(f"\n{'piper-search':28}", *(f"{name:>13}" for name in columns))
    worst = 0.0
    for run, ((bounded, first_s), simulated) in zip(RUNS, rates, strict=True):
        data, wall_s = search(run)
        worst = max(worst, wall_s)
        space = data["space"]
        cells = (
            f"{wall_s:.1f}", f"{space['size']:,}", f"{space['simulated']:,}", f"{data['proof_gap']:.2%}",
            f"{data['best']['predicted']['step_time_s']:.3f}", f"{first_s:.2f}", f"{bounded:,.0f}", f"{simulated:.1f}",
        )  # fmt: skip
        print(f"{run!s:28}", *(f"{cell:>13}" for cell in cells))
    print(f"limit: wall {LIMIT_WALL_S:.0f} s, start to finish, on two cores")
    return 0 if worst <= LIMIT_WALL_S else 1
