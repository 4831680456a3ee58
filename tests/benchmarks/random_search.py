"""The search against chance: random configurations, ten for each that the search evaluated, under the same costs.

What cannot fit by the memory floor is not drawn, so every draw is an evaluation, as the search's are.
"""

from __future__ import annotations

from math import inf

from piper_core.arch import preset
from profiler.spec import load_cluster
from search.candidate import Score
from search.engine import Problem, search
from search.generators.sampled import Sampled
from search.space import Space
from search.workers import evaluator

TIMES, BATCH = 10, 40
BUDGET_S = 30.0
CASES = (("llama9b", 32, "p4de"), ("llama9b", 32, "p4d"), ("piper-9b", 32, "p4de"))
GLOBAL_BATCH, SEQ_LEN = 512, 4096


def drawn_s(problem: Problem, space: Space, count: int) -> tuple[float, int]:
    """Return (step time of the best of up to ``count`` random configurations, how many were evaluated)."""
    sampled = Sampled(space, problem.bounds, problem.cluster.device.memory_bytes, sampler="random")
    best, done = inf, 0
    with evaluator(problem, None) as run:
        while done < count and (batch := sampled.ask(min(BATCH, count - done))):
            for config, outcome in zip(batch, run(batch, lambda: inf), strict=True):
                score = outcome if isinstance(outcome, Score) else None
                sampled.tell(config, score)
                if score is not None and score.fits == "yes":
                    best = min(best, score.step_time_s)
            done += len(batch)
    return best, done


def main() -> int:
    """Print a line for each case; return 1 where chance found something better."""
    failed = False
    for model, gpus, cluster in CASES:
        hardware = load_cluster(cluster)
        problem = Problem(preset(model), hardware, gpus, GLOBAL_BATCH, SEQ_LEN)
        space = Space(problem.architecture, gpus, hardware.gpus_per_node, GLOBAL_BATCH, SEQ_LEN, {})
        found = search(problem, space, budget_s=BUDGET_S)
        ours, evaluated = found.best.score.step_time_s, found.simulated + found.rejected
        best, done = drawn_s(problem, space, TIMES * evaluated)
        failed |= best < ours
        print(f"{model} on {gpus} {cluster}: search {ours:.3f} s after {evaluated} evaluations, "
              f"random {best:.3f} s after {done}: {best / ours - 1:+.1%}", flush=True)  # fmt: skip
    return int(failed)
