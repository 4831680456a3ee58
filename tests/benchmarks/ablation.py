"""How much slower the best becomes with each dimension held to what Megatron users take by default.

A dimension that never matters is suspect: the last line names those that cost less than 0.1 % everywhere.
"""

from __future__ import annotations

from math import inf

from piper_core.arch import preset
from piper_core.errors import InfeasibleError
from profiler.spec import load_cluster
from search.engine import Problem, search
from search.space import Space, parse_fix

BUDGET_S = 15.0
CASES = (
    ("llama9b", 32, "p4de"), ("piper-9b", 32, "p4de"), ("llama3-70b", 64, "p4d"), ("llama3-70b", 64, "p4de"),
)  # fmt: skip
HELD = (
    "schedule=1f1b,interleaved_1f1b", "zero=1", "recompute=none,full", "micro_batch=1", "sequence_parallel=on,off",
    "cuts=even", "cp=1", "ep=1", "tp=8", "pp=1", "outer=pp", "bucket=1", "prefetch=1", "streams=own",
)  # fmt: skip
GLOBAL_BATCH, SEQ_LEN = 512, 4096


def best_s(problem: Problem, gpus: int, per_node: int, fix: list[str], *, tune: bool = True) -> float:
    """Return the step time of the best, infinity where none fits."""
    space = Space(problem.architecture, gpus, per_node, GLOBAL_BATCH, SEQ_LEN, parse_fix(fix))
    try:
        return search(problem, space, budget_s=BUDGET_S, tune=tune).best.score.step_time_s
    except InfeasibleError:
        return inf


def main() -> int:
    """Print a column for each case."""
    matter: dict[str, float] = {}
    print(f"{'held to':34}" + "".join(f"{f'{model} {gpus} {cluster}':>22}" for model, gpus, cluster in CASES))
    columns = []
    for model, gpus, cluster in CASES:
        hardware = load_cluster(cluster)
        problem = Problem(preset(model), hardware, gpus, GLOBAL_BATCH, SEQ_LEN)
        free = best_s(problem, gpus, hardware.gpus_per_node, [])
        found = {fix: best_s(problem, gpus, hardware.gpus_per_node, [fix]) / free - 1 for fix in HELD}
        found["orders of the families"] = best_s(problem, gpus, hardware.gpus_per_node, [], tune=False) / free - 1
        columns.append((free, found))
        for name, more in found.items():
            matter[name] = max(matter.get(name, 0.0), more)
    print(f"{'nothing: step s':34}" + "".join(f"{free:22.3f}" for free, _ in columns))
    for name in columns[0][1]:
        cells = [found[name] for _, found in columns]
        print(f"{name:34}" + "".join(f"{'none fits' if more == inf else f'{more:+.2%}':>22}" for more in cells))
    idle = [name for name, more in matter.items() if more < 1e-3]
    print(f"never matters here: {', '.join(idle) or 'none'}")
    return 0
