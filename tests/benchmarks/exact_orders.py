"""What an exact solver finds where the search takes the list scheduler's order: CP-SAT over all actions of a step.

The same tasks, seconds, messages and memory; the list scheduler's order is where CP-SAT begins. ``gain`` is how much
shorter the step's compute becomes in its time, ``at most`` by how much any order could be shorter, by its own bound
(-: it has none by then). A window of an order is part of this: it can gain no more. Collectives beside compute are left
out on both sides.
"""

from __future__ import annotations

from itertools import pairwise

from ortools.sat.python import cp_model

from piper_core.arch import preset
from piper_core.schedule.list_decode import Network, replay
from piper_core.schedule.list_problem import ListProblem
from piper_core.schedule.list_scheduler import list_schedule
from profiler.spec import load_cluster
from search.list_order import problem_of
from search.problem import Problem
from search.space import Configuration

LIMIT_S = 40.0
TICK_S = 1e-4
CASES = (
    ("llama9b", "p4de", Configuration(2, 1, 16, 1, "zbv", 2, 1, 1, 32, "none", False, "balanced")),
    ("llama9b", "p4de", Configuration(2, 1, 16, 1, "interleaved_1f1b", 5, 1, 1, 32, "none", False, "balanced")),
    ("llama9b", "p4de", Configuration(4, 1, 8, 1, "zbv", 2, 1, 1, 64, "none", False, "balanced")),
    ("piper-9b", "p4de", Configuration(4, 1, 4, 1, "zbv", 2, 1, 4, 32, "none", False, "balanced", 2)),
)
"""Winners of searches on 32 GPUs, and what came near."""


def exact(problem: ListProblem, start_s: list[float], limit_s: float) -> tuple[float, float]:
    """Return (makespan, a bound on any) in seconds, from an order that starts tasks at ``start_s``."""
    model = cp_model.CpModel()
    ticks = [max(1, round(seconds / TICK_S)) for seconds in problem.seconds]
    horizon = sum(ticks)
    start = [model.new_int_var(0, horizon, "") for _ in ticks]
    for task, preds in enumerate(problem.preds):
        for pred, delay in preds:
            model.add(start[task] >= start[pred] + ticks[pred] + round(delay / TICK_S))
    for row in range(problem.rows):
        mine = [task for task in range(len(ticks)) if problem.row[task] == row]
        model.add_no_overlap([model.new_fixed_size_interval_var(start[t], ticks[t], "") for t in mine])
        takes = [(start[t], round(problem.hold_bytes[t] / 2**20)) for t in mine if problem.hold_bytes[t]]
        gives = [(start[t] + ticks[t], -round(problem.release_bytes[t] / 2**20)) for t in mine
                 if problem.release_bytes[t]]  # fmt: skip
        times, changes = zip(*takes, *gives, strict=True)
        model.add_reservoir_constraint(times, changes, -(2**31), int(problem.limit_bytes[row] / 2**20))
    alike: dict[tuple[int, int], list[int]] = {}
    for task, (stage, phase, _) in enumerate(problem.key):
        alike.setdefault((stage, phase), []).append(task)
    for tasks in alike.values():  # microbatches are alike: let them come in order
        for one, two in pairwise(sorted(tasks, key=lambda t: problem.key[t][2])):
            model.add(start[one] + ticks[one] <= start[two])
    end = model.new_int_var(0, horizon, "")
    model.add_max_equality(end, [first + n for first, n in zip(start, ticks, strict=True)])
    for variable, first in zip(start, start_s, strict=True):
        model.add_hint(variable, round(first / TICK_S))
    model.minimize(end)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds, solver.parameters.num_workers = limit_s, 2
    status = solver.solve(model)
    found = solver.objective_value * TICK_S if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else float("inf")
    return found, solver.best_objective_bound * TICK_S


def main() -> int:
    """Print a line for each case."""
    print(f"{'configuration':58}{'actions':>8}{'list s':>9}{'exact s':>9}{'gain':>8}{'at most':>9}", flush=True)
    for name, cluster, config in CASES:
        batch = config.dp * config.micro_batch * config.num_microbatches
        whole = Problem(preset(name), load_cluster(cluster), config.pp * config.row_size, batch, 4096)
        split = config.schedule != "interleaved_1f1b"
        problem = problem_of(config, whole.bounds, split=split)
        listed = replay(Network.of(problem), list_schedule(problem))
        assert listed is not None
        found, bound = exact(problem, listed.start_s, LIMIT_S)
        ours = listed.makespan_s
        print(f"{name} pp{config.pp} {config.schedule} v{config.virtual_stages} m{config.num_microbatches}".ljust(58)
              + f"{len(problem.seconds):8}{ours:9.3f}{min(found, ours):9.3f}{max(0.0, 1 - found / ours):8.2%}"
              f"{f'{max(0.0, 1 - bound / ours):.2%}' if bound > 0 else '-':>9}", flush=True)  # fmt: skip
    return 0
