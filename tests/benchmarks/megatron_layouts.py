"""Layouts that people write by hand, priced like everything else, against what the search finds.

Each style is a few axes held as its users hold them; of its layouts that fit, the best is shown, with how much slower
it is than the winner of the search. The winner must be at least as good as all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from piper_core.arch import preset
from profiler.spec import load_cluster
from search.engine import Problem
from search.space import Configuration, Space, parse_fix
from tests.benchmarks.runs import GLOBAL_BATCH, GPUS, RUNS, SEQ_LEN, Run, search
from tests.null.search.spaces import leaves

MEGATRON = ("tp=1,2,4,8", "pp=1,2,4,8", "b=1,2,4", "zero=0,1")
STYLES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Megatron 1F1B", (*MEGATRON, "schedule=1f1b", "ep=1")),
    ("Megatron interleaved v=2", (*MEGATRON, "schedule=interleaved_1f1b", "v=2", "ep=1")),
    ("Megatron 1F1B, EP", (*MEGATRON, "schedule=1f1b", "ep=4,8")),
    ("Megatron interleaved v=2, EP", (*MEGATRON, "schedule=interleaved_1f1b", "v=2", "ep=4,8")),
    ("FSDP (ZeRO-3)", ("pp=1", "tp=1", "ep=1", "zero=3", "b=1,2,4")),
    ("FSDP x TP", ("pp=1", "tp=2,4,8", "ep=1", "zero=3", "b=1,2,4")),
    ("DeepSpeed ZeRO-2", ("pp=1", "tp=1", "ep=1", "zero=2", "b=1,2,4")),
    ("DualPipe, ZeRO-1, EP8", ("pp=2,4,8", "tp=1", "ep=1,8", "schedule=dualpipe", "zero=1", "b=1,2,4")),
)
USUAL = ("recompute=none,full", "cp=1", "outer=pp", "bucket=1", "prefetch=1", "streams=own")
"""Recompute none or full in all; sequence parallelism wherever there is TP; the distributed optimizer (ZeRO-1) wherever
there is data parallelism; layers cut evenly."""


def layouts(space: Space) -> Iterator[Configuration]:
    """Yield the layouts of a style."""
    for config in leaves(space):
        usual = config.sequence_parallel == (config.tp > 1) and config.zero >= min(1, config.dp - 1)
        if usual and (config.stages == 1 or config.cuts == "even"):
            yield config


def best_of(problem: Problem, found: list[Configuration]) -> tuple[float, Configuration | None, int]:
    """Return (step seconds, layout) of the best that fits, and how many were simulated.

    What cannot fit, or cannot be better than the best so far, by a bound that tests prove, is not built.
    """
    best: tuple[float, Configuration | None] = (inf, None)
    simulated = 0
    bounds, capacity = problem.bounds, problem.cluster.device.memory_bytes
    possible = [config for config in found if bounds.memory_floor(config) <= capacity]
    for least, config in sorted((bounds.time_bound(config), config) for config in possible):
        if least > best[0]:
            break
        if bounds.replay(config) > best[0]:
            continue
        score = problem.score(config)
        simulated += 1
        if score.fits == "yes":
            best = min(best, (score.step_time_s, config), key=lambda pair: pair[0])
    return *best, simulated


def compare(run: Run) -> bool:
    """Print the table of one run; return whether the winner is at least as good as every layout."""
    architecture, cluster = preset(run.model), load_cluster(run.cluster)
    problem = Problem(architecture, cluster, GPUS, GLOBAL_BATCH, SEQ_LEN)
    data, _ = search(run)
    winner = data["best"]["predicted"]["step_time_s"]
    held = parse_fix(run.fix)
    print(f"\n{run}: the search's winner takes {winner:.3f} s a step, proof gap {data['proof_gap']:.2%}")
    print(f"  {'style':30}{'layouts':>8}{'simulated':>10}{'step s':>9}{'slower by':>11}  best layout that fits")
    good = True
    for name, fix in STYLES:
        style = parse_fix([*fix, *USUAL])
        if any(not set(style.get(axis, values)) & set(values) for axis, values in held.items()):
            continue
        space = Space(architecture, GPUS, cluster.gpus_per_node, GLOBAL_BATCH, SEQ_LEN, style | held)
        found = list(layouts(space))
        if not found:
            continue
        seconds, config, simulated = best_of(problem, found)
        if config is None:
            print(f"  {name:30}{len(found):8}{simulated:10}{'none fits':>20}")
            continue
        good &= winner <= seconds * (1 + 1e-9)
        print(f"  {name:30}{len(found):8}{simulated:10}{seconds:9.3f}{seconds / winner - 1:11.1%}  {config}")
    print(f"  {'PASS' if good else 'FAIL'}: the winner is {'' if good else 'not '}at least as good as each")
    return good


def main() -> int:
    """Print the tables; return 1 where a layout beats the search."""
    kept = [compare(run) for run in RUNS]
    return 0 if all(kept) else 1
