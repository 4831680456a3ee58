"""The search against chance and against rules of thumb, under the same costs.

Chance draws ten configurations for each that the search evaluated. What cannot fit by the memory floor is not drawn, so
every draw is an evaluation, as the search's are. The rules of thumb are the styles of ``megatron_layouts``: the best of
all their layouts, with no search beyond them.
"""

from __future__ import annotations

from math import inf

from piper_core.arch import preset
from profiler.spec import load_cluster
from search.candidate import Score
from search.engine import Problem, search
from search.generators.sampled import Sampled
from search.space import Space, parse_fix
from search.workers import evaluator
from tests.benchmarks.megatron_layouts import STYLES, USUAL, best_of, layouts

TIMES, BATCH = 10, 40
BUDGET_S = 120.0
CASES = (
    ("llama9b", 32, "p4de"), ("llama9b", 32, "p4d"), ("piper-9b", 32, "p4de"), ("llama3-70b", 64, "p4de"),
)  # fmt: skip
GLOBAL_BATCH, SEQ_LEN = 512, 4096
SAME = 1 + 1e-9


def drawn_s(problem: Problem, space: Space, count: int) -> tuple[float, int, int]:
    """Return (step time of the best of up to ``count`` random configurations, how many were evaluated, how many fit);
    fewer at Ctrl-C."""
    sampled = Sampled(space, problem.bounds, problem.cluster.device.memory_bytes, sampler="random")
    best, done, fit = inf, 0, 0
    try:
        with evaluator(problem, None) as run:
            while done < count and (batch := sampled.ask(min(BATCH, count - done))):
                for config, outcome in zip(batch, run(batch, lambda: inf), strict=True):
                    score = outcome if isinstance(outcome, Score) else None
                    sampled.tell(config, score)
                    done += 1
                    if score is not None and score.fits == "yes":
                        best, fit = min(best, score.step_time_s), fit + 1
    except KeyboardInterrupt:
        print("interrupted")
    return best, done, fit


def by_rule(problem: Problem) -> tuple[float, str, int]:
    """Return (step seconds, style) of the best layout that people write by hand, and how many there are."""
    best, which, count = inf, "none fits", 0
    for name, fix in STYLES:
        space = Space(
            problem.architecture, problem.gpus, problem.cluster.gpus_per_node, GLOBAL_BATCH, SEQ_LEN,
            parse_fix([*fix, *USUAL]),
        )  # fmt: skip
        found = list(layouts(space))
        seconds, _, _ = best_of(problem, found)
        count += len(found)
        if seconds < best:
            best, which = seconds, name
    return best, which, count


def main() -> int:
    """Print a line for each case; return 1 where chance or a rule found something better."""
    failed = False
    print(f"{'model':12}{'GPUs':>5} {'cluster':8}{'search s':>9}{'evaluated':>10}{'gap':>7}  {'rules s':>8}{'more':>8}"
          f"{'layouts':>8}  {'random s':>9}{'more':>8}{'evaluated':>10}{'fit':>6}  best style", flush=True)  # fmt: skip
    for model, gpus, cluster in CASES:
        hardware = load_cluster(cluster)
        problem = Problem(preset(model), hardware, gpus, GLOBAL_BATCH, SEQ_LEN)
        space = Space(problem.architecture, gpus, hardware.gpus_per_node, GLOBAL_BATCH, SEQ_LEN, {})
        found = search(problem, space, budget_s=BUDGET_S)
        ours, evaluated = found.best.score.step_time_s, found.simulated + found.rejected
        print(f"{model:12}{gpus:5} {cluster:8}{ours:9.3f}{evaluated:10}{found.family_gap:7.1%}", end="  ", flush=True)
        rule, style, count = by_rule(problem)
        print(f"{rule:8.3f}{rule / ours - 1:+8.1%}{count:8}", end="  ", flush=True)
        chance, done, fit = drawn_s(problem, space, TIMES * evaluated)
        print(f"{chance:9.3f}{chance / ours - 1:+8.1%}{done:10}{fit:6}  {style}", flush=True)
        failed |= min(rule, chance) * SAME < ours
    print("FAIL" if failed else "PASS", "neither a rule nor chance is quicker than the search")
    return int(failed)
