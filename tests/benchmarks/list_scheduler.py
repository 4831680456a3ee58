"""The list scheduler against every family of the same placement, and its seconds. One core.

``python -m tests.benchmarks list_scheduler`` takes a sample of the degrees, ``python -m
tests.benchmarks.list_scheduler`` all of p = 2-8, m = 2-32 (some minutes).
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from statistics import median

from piper_core.schedule.list_problem import ListProblem, Measure
from piper_core.schedule.list_scheduler import list_schedule
from tests.null.schedule.list_cases import (
    PLACEMENTS,
    UNEVEN,
    UNEVEN_CASES,
    Compared,
    compare,
    problem_of,
    replays,
    uniform,
    uniform_cases,
)

WHOLE = range(2, 9), range(2, 33)
SAMPLE = (2, 3, 5, 8), (2, 7, 12, 17, 32)
VERDICTS = ("better", "bound", "equal", "worse")
MEASURES: tuple[Measure, ...] = ("makespan", "span")
SECONDS = (
    ("V", "v_half", 8, 32, 0.3),
    ("loop of 2", "interleaved_1f1b", 8, 32, 0.3),
    ("plain, split B", "zb_h1", 4, 64, 0.3),
    ("plain, whole B", "1f1b", 4, 64, 0.2),
)
"""Placement, family whose peaks are the limit, p, m, most seconds at effort 1."""


def main(degrees: Sequence[int] = SAMPLE[0], microbatches: Sequence[int] = SAMPLE[1]) -> int:
    """Print the tables; return 1 when a family is better anywhere or a limit of seconds is broken."""
    slow = _print_seconds()
    worse = _print_uneven()
    print(f"\nuniform costs, p in {[*degrees]}, m in {[*microbatches]}")
    print(f"{'placement':16}{'limit of':18}{'measure':10}" + "".join(f"{word:>8}" for word in VERDICTS))
    found: dict[tuple[str, str, str], Counter[str]] = {}
    for placement, family, p, m in uniform_cases(degrees, microbatches):
        for measure in MEASURES:
            compared = compare(placement, family, p, m, uniform(p * PLACEMENTS[placement][1]), measure)
            found.setdefault((placement, family, measure), Counter())[compared.verdict] += 1
            if compared.verdict == "worse":
                print(f"worse: {family} p={p} m={m} {measure}: {_margin(compared)}")
    for (placement, family, of), verdicts in found.items():
        print(f"{placement:16}{family:18}{of:10}" + "".join(f"{verdicts[word]:8}" for word in VERDICTS))
        worse += verdicts["worse"]
    return int(bool(slow or worse))


def _print_seconds() -> int:
    print(f"{'placement':16}{'limit of':18}{'p':>3}{'m':>4}{'tasks':>7}{'effort 0':>10}{'effort 1':>10}  limit")
    slow = 0
    for placement, family, p, m, limit_s in SECONDS:
        stages = p * PLACEMENTS[placement][1]
        costs = [(1.0 + stage % 3 / 10, 1.3, 0.8) for stage in range(stages)], 0.2
        peaks = replays(placement, p, m, uniform(stages))[family].peak_chunks
        problem = problem_of(placement, p, m, costs, peaks)
        took = [_quickest_s(problem, effort) for effort in (0, 1)]
        print(
            f"{placement:16}{family:18}{p:3}{m:4}{len(problem.row):7}"
            + "".join(f"{seconds:9.3f}s" for seconds in took)
            + f"{limit_s:6.1f}s"
        )
        slow += took[1] > limit_s
    return slow


def _print_uneven() -> int:
    print("\nuneven costs")
    gains = []
    verdicts: Counter[str] = Counter()
    for placement, family, p, m, costs in UNEVEN_CASES:
        compared = compare(placement, family, p, m, UNEVEN[costs](p * PLACEMENTS[placement][1]))
        gains.append(1 - compared.found_s / compared.family_s)
        verdicts[compared.verdict] += 1
        print(f"{family:18}{p:2}{m:4}  {costs:16}{compared.verdict:8}{_margin(compared)}")
    print(f"{dict(verdicts)}, {median(gains):.1%} shorter in the median")
    return verdicts["worse"] + verdicts["equal"]


def _margin(compared: Compared) -> str:
    return f"{compared.found_s:8.2f} (family {compared.family_s:.2f}, bound {compared.bound_s:.2f})"


def _quickest_s(problem: ListProblem, effort: int) -> float:
    times = []
    for _ in range(3):
        start_s = time.process_time()
        list_schedule(problem, effort=effort)
        times.append(time.process_time() - start_s)
    return min(times)


if __name__ == "__main__":
    sys.exit(main(*WHOLE))
