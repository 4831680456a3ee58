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
REPEATS = 5


def bounded_per_s(run: Run, threshold_s: float) -> tuple[float, float]:
    """Return how many partial assignments and configurations a core bounds in a second of its own, until nothing left
    can beat ``threshold_s``, and how much slower the slowest of ``REPEATS`` was; with the space, pricing included."""
    rates = []
    for _ in range(REPEATS):
        problem, space = problem_of(run)
        start_s, spent_s = time.process_time(), 0.0
        generator = BestFirst(space, problem.bounds, problem.cluster.device.memory_bytes)
        while True:
            batch = generator.ask(8, threshold_s)
            spent_s += time.process_time() - start_s
            if not batch:
                break
            for config in batch:
                generator.tell(config, problem.score(config))
            start_s = time.process_time()
        rates.append((generator.bounded + generator.partials) / spent_s)
    return median(rates), max(rates) / min(rates) - 1


def problem_of(run: Run) -> tuple[Problem, Space]:
    """Return the problem and the space of a run."""
    architecture, cluster = preset(run.model), load_cluster(run.cluster)
    problem = Problem(architecture, cluster, GPUS, GLOBAL_BATCH, SEQ_LEN)
    return problem, Space(architecture, GPUS, cluster.gpus_per_node, GLOBAL_BATCH, SEQ_LEN, parse_fix(run.fix))


def simulated_per_s(run: Run, count: int = 12) -> float:
    """Return how many configurations a core builds, verifies and simulates a second: the first that search asks for."""
    problem, space = problem_of(run)
    batch = BestFirst(space, problem.bounds, problem.cluster.device.memory_bytes).ask(count, inf)
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
    rates = [simulated_per_s(run) for run in RUNS]
    columns = ("wall s", "N", "simulated", "gap", "best s", "bounded/s", "spread", "simulated/s")
    print(f"\n{'piper-search':28}", *(f"{name:>13}" for name in columns))
    worst = 0.0
    for run, simulated in zip(RUNS, rates, strict=True):
        data, wall_s = search(run)
        worst = max(worst, wall_s)
        space, best_s = data["space"], data["best"]["predicted"]["step_time_s"]
        bounded, spread = bounded_per_s(run, best_s)
        cells = (
            f"{wall_s:.1f}", f"{space['size']:,}", f"{space['simulated']:,}", f"{data['proof_gap']:.2%}",
            f"{best_s:.3f}", f"{bounded:,.0f}", f"{spread:.0%}", f"{simulated:.1f}",
        )  # fmt: skip
        print(f"{run!s:28}", *(f"{cell:>13}" for cell in cells))
    print(f"limit: wall {LIMIT_WALL_S:.0f} s, start to finish, on two cores")
    return 0 if worst <= LIMIT_WALL_S else 1
