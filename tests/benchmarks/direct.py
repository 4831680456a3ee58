"""Scoring configurations directly, against apply, plan, verify and lower: milliseconds of one core.

Every configuration is scored once before, with another number of microbatches: the model and its prices are warm, the
order and the plan are not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from math import inf
from statistics import median

from piper_core.arch import preset
from profiler.spec import load_cluster
from search.direct.order import family_order
from search.generators.best_first import BestFirst
from search.problem import Problem
from search.simulator import loops
from search.space import Configuration, Space

LIMIT_S = 0.010  # llama9b on 32 GPUs, PP4, 16 to 64 microbatches
AIM_S = 0.005
AIM_PER_S = 200
LIMIT_GROWTH = 2.0  # from 32 to 16,384 GPUs
REPEATS = 9


def of(pp: int, tp: int, dp: int, ep: int, schedule: str, v: int, zero: int, m: int, **rest: object) -> Configuration:
    made = Configuration(pp, tp, dp, ep, schedule, v, zero, 1, m, "none", False, "balanced")
    return replace(made, **rest)  # type: ignore[arg-type]


SMALL = (
    of(4, 1, 8, 1, "1f1b", 1, 1, 16, micro_batch=4),
    of(4, 1, 8, 1, "1f1b", 1, 1, 64),
    of(4, 1, 8, 1, "zbv", 2, 1, 64),
    of(4, 1, 8, 1, "dualpipe", 1, 1, 64),
    of(4, 2, 4, 1, "dualpipev", 2, 2, 64, micro_batch=2, sequence_parallel=True),
    of(2, 1, 16, 1, "interleaved_1f1b", 5, 1, 32),
    of(1, 1, 32, 1, "1f1b", 1, 2, 16),
    of(1, 1, 32, 1, "1f1b", 1, 3, 16),
    of(4, 1, 8, 1, "1f1b", 1, 3, 64),
)
LARGE = (
    ("llama3-405b", 1024, 2048, of(16, 8, 8, 1, "interleaved_1f1b", 2, 1, 256, sequence_parallel=True)),
    ("deepseek-v3", 2048, 4096, of(16, 1, 128, 64, "dualpipev", 2, 1, 32, recompute="full")),
)
LIMITED = 4
"""How many of ``SMALL`` the limit holds for."""


def problem(model: str, gpus: int, batch: int) -> Problem:
    return Problem(preset(model), load_cluster("p4de"), gpus, batch, 4096)


def milliseconds(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the median milliseconds of processor time."""
    times = []
    for _ in range(repeats):
        family_order.cache_clear()
        start_s = time.process_time()
        work()
        times.append(time.process_time() - start_s)
    return median(times) * 1e3


def compare(given: Problem, config: Configuration, repeats: int = REPEATS) -> float:
    """Print what a configuration takes both ways; return the milliseconds of the direct one."""
    given.score(replace(config, num_microbatches=2 * config.num_microbatches))
    direct = milliseconds(lambda: given.score(config), repeats)
    slow = milliseconds(lambda: given._slow(config), max(1, repeats // 4))
    print(f"  {config!s:110} {direct:8.1f} {slow:9.1f} {slow / direct:6.0f} x")
    return direct


def simulated_per_s(count: int = 64) -> float:
    """Return how many of the configurations that a search asks for first are scored in a second."""
    given = problem("llama9b", 32, 512)
    space = Space(given.architecture, 32, given.cluster.gpus_per_node, 512, 4096, {})
    generator = BestFirst(space, given.bounds, given.cluster.device.memory_bytes)
    times: list[float] = []
    while len(times) < count:
        for config in generator.ask(8, inf):
            start_s = time.process_time()
            score = given.score(config)
            times.append(time.process_time() - start_s)
            generator.tell(config, score)
    return len(times) / sum(times)


def main() -> int:
    """Print the tables; return 1 when a limit is broken."""
    loops.pick(loops.COLD + 1)  # compiles them, or loads them
    print(f"  {'llama9b, 32 GPUs':110} {'direct':>8} {'by apply':>9}")
    small = problem("llama9b", 32, 512)
    kept = max([compare(small, config) for config in SMALL][:LIMITED]) <= LIMIT_S * 1e3
    for model, gpus, batch, config in LARGE:
        print(f"  {model}, {gpus:,} GPUs")
        compare(problem(model, gpus, batch), config, 3)
    print(f"aim {AIM_S * 1e3:.0f} ms, limit {LIMIT_S * 1e3:.0f} for the first {LIMITED}")
    print(f"the first 64 of a search, list scheduler aside: {simulated_per_s():.0f} a second (aim {AIM_PER_S})")
    print("PP4, 16 microbatches, ms by GPUs:")
    for zero in (0, 1, 3):
        each = {}
        for gpus in (32, 256, 2048, 16_384):
            given = problem("llama9b", gpus, 4 * gpus)
            config = of(4, 1, gpus // 4, 1, "1f1b", 1, zero, 16)
            given.score(replace(config, num_microbatches=8))
            each[gpus] = milliseconds(lambda given=given, config=config: given.score(config))  # type: ignore[misc]
        growth = each[16_384] / each[32]
        print(f"  ZeRO-{zero}: " + ", ".join(f"{gpus:,}: {ms:.1f}" for gpus, ms in each.items()) + f" ({growth:.1f} x)")
        kept &= growth <= LIMIT_GROWTH
    return 0 if kept else 1
