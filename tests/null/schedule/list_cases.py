"""Cases in which the list scheduler is compared with the schedule families of the same placement."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from piper_core.errors import ScheduleError
from piper_core.names import Phase
from piper_core.schedule.families import get_family
from piper_core.schedule.grid import Layout
from piper_core.schedule.list_bound import lower_bound_s
from piper_core.schedule.list_problem import ListProblem, Measure, pipeline_problem, to_grid
from piper_core.schedule.list_scheduler import list_schedule
from piper_core.schedule.span import Span, evaluate

Costs = tuple[list[tuple[float, float, float]], float]
"""Seconds of (F, BI, BW) of each stage, and seconds of a message between rows."""

PLACEMENTS = {
    "plain, whole B": (Layout.LOOP, 1, False, ("gpipe", "1f1b")),
    "plain, split B": (Layout.LOOP, 1, True, ("zb_h1", "zb_h2")),
    "loop of 2": (Layout.LOOP, 2, False, ("interleaved_1f1b",)),
    "loop of 3": (Layout.LOOP, 3, False, ("interleaved_1f1b",)),
    "loop of 4": (Layout.LOOP, 4, False, ("interleaved_1f1b",)),
    "V": (Layout.V, 2, True, ("zbv", "v_half", "v_min", "dualpipev")),
}
"""Layout, virtual stages a row, whether B is split, families."""


def uniform(stages: int) -> Costs:
    return [(1.0, 1.0, 1.0)] * stages, 0.0


UNEVEN: dict[str, Callable[[int], Costs]] = {
    "heavy head": lambda n: ([(1.0, 1.0, 1.0)] * (n - 1) + [(1.6, 1.7, 1.5)], 0.0),
    "heavy ends": lambda n: ([(1.2, 1.0, 1.0)] + [(1.0, 1.1, 0.9)] * (n - 2) + [(1.6, 1.7, 1.5)], 0.0),
    "slow stage": lambda n: ([(1.4, 1.4, 1.4) if s == n // 2 else (1.0, 1.0, 1.0) for s in range(n)], 0.0),
    "1:2:0.5": lambda n: ([(1.0, 2.0, 0.5)] * n, 0.0),
    "1:1.5:0.8": lambda n: ([(1.0, 1.5, 0.8)] * n, 0.0),
    "slow links": lambda n: ([(1.0, 1.0, 1.0)] * n, 0.5),
    "links": lambda n: ([(1.0, 1.2, 0.8)] * n, 0.25),
    "head and links": lambda n: ([(1.0, 1.2, 0.8)] * (n - 1) + [(1.5, 1.8, 0.9)], 0.1),
}

UNEVEN_CASES: tuple[tuple[str, str, int, int, str], ...] = (
    ("plain, whole B", "gpipe", 4, 8, "heavy head"),
    ("plain, whole B", "gpipe", 8, 16, "slow links"),
    ("plain, whole B", "1f1b", 2, 8, "slow links"),
    ("plain, whole B", "1f1b", 4, 16, "slow stage"),
    ("plain, whole B", "1f1b", 6, 24, "links"),
    ("plain, whole B", "1f1b", 8, 16, "head and links"),
    ("plain, split B", "zb_h1", 3, 5, "slow stage"),
    ("plain, split B", "zb_h1", 4, 16, "1:2:0.5"),
    ("plain, split B", "zb_h1", 5, 7, "slow stage"),
    ("plain, split B", "zb_h1", 7, 16, "slow stage"),
    ("plain, split B", "zb_h1", 8, 16, "links"),
    ("plain, split B", "zb_h2", 4, 8, "1:1.5:0.8"),
    ("plain, split B", "zb_h2", 6, 24, "1:2:0.5"),
    ("plain, split B", "zb_h2", 8, 16, "slow links"),
    ("loop of 2", "interleaved_1f1b", 3, 10, "slow links"),
    ("loop of 2", "interleaved_1f1b", 4, 8, "heavy ends"),
    ("loop of 2", "interleaved_1f1b", 4, 11, "slow stage"),
    ("loop of 2", "interleaved_1f1b", 5, 12, "slow stage"),
    ("loop of 2", "interleaved_1f1b", 6, 15, "links"),
    ("loop of 2", "interleaved_1f1b", 6, 24, "1:2:0.5"),
    ("loop of 2", "interleaved_1f1b", 8, 16, "slow stage"),
    ("loop of 3", "interleaved_1f1b", 4, 10, "slow stage"),
    ("loop of 3", "interleaved_1f1b", 4, 10, "heavy ends"),
    ("V", "zbv", 3, 10, "heavy head"),
    ("V", "zbv", 4, 8, "heavy ends"),
    ("V", "zbv", 4, 16, "slow links"),
    ("V", "zbv", 5, 12, "slow stage"),
    ("V", "zbv", 6, 24, "head and links"),
    ("V", "zbv", 8, 16, "1:2:0.5"),
    ("V", "zbv", 8, 16, "links"),
    ("V", "v_half", 3, 10, "slow links"),
    ("V", "v_half", 4, 8, "1:2:0.5"),
    ("V", "v_half", 4, 16, "heavy head"),
    ("V", "v_half", 5, 12, "heavy ends"),
    ("V", "v_half", 6, 24, "links"),
    ("V", "v_half", 8, 16, "1:1.5:0.8"),
    ("V", "v_half", 8, 16, "slow stage"),
    ("V", "v_min", 3, 10, "1:2:0.5"),
    ("V", "v_min", 4, 8, "slow links"),
    ("V", "v_min", 4, 16, "head and links"),
    ("V", "v_min", 5, 12, "links"),
    ("V", "v_min", 6, 24, "heavy head"),
    ("V", "v_min", 8, 16, "1:1.5:0.8"),
    ("V", "v_min", 8, 16, "slow stage"),
    ("V", "dualpipev", 3, 10, "slow links"),
    ("V", "dualpipev", 4, 8, "slow links"),
    ("V", "dualpipev", 4, 16, "links"),
    ("V", "dualpipev", 5, 12, "head and links"),
    ("V", "dualpipev", 6, 24, "1:2:0.5"),
    ("V", "dualpipev", 8, 16, "1:1.5:0.8"),
)
"""Placement, the family whose peaks are the limit, p, m, and the name of the costs."""


@dataclass(frozen=True, slots=True)
class Compared:
    """What the scheduler and the best family within the limit reach, and the lower bound, all in seconds."""

    found_s: float
    family_s: float
    bound_s: float
    problem: ListProblem
    span: Span

    @property
    def verdict(self) -> str:
        """``better``, ``bound`` (equal, at the lower bound), ``equal`` or ``worse``."""
        rounding = 1e-6
        if self.found_s < self.family_s - rounding:
            return "better"
        if self.found_s > self.family_s + rounding:
            return "worse"
        return "bound" if self.found_s < self.bound_s + rounding else "equal"


def seconds_of(costs: Costs) -> Callable[[int, Phase], float]:
    """Return the duration of an action by stage and phase."""

    def seconds(stage: int, phase: Phase) -> float:
        forward, inputs, weights = costs[0][stage]
        return {Phase.F: forward, Phase.BI: inputs, Phase.BW: weights, Phase.B: inputs + weights}[phase]

    return seconds


def reached(span: Span, measure: Measure) -> float:
    return span.makespan_s if measure == "makespan" else span.span_s


def replays(placement: str, p: int, m: int, costs: Costs) -> dict[str, Span]:
    """Return each family of the placement that is defined at p and m, replayed."""
    _, v, _, families = PLACEMENTS[placement]
    found = {}
    for name in families:
        try:
            grid = get_family(name).grid(p, m, v)
        except ScheduleError:
            continue
        found[name] = evaluate(grid, seconds_of(costs), p2p_s=costs[1])
    return found


def problem_of(placement: str, p: int, m: int, costs: Costs, limit: Sequence[float]) -> ListProblem:
    layout, v, split, _ = PLACEMENTS[placement]
    return pipeline_problem(layout, p, v, m, costs[0], p2p_s=costs[1], split_backward=split, limit_bytes=limit)


def compare(
    placement: str, family: str, p: int, m: int, costs: Costs, measure: Measure = "makespan", effort: int = 1
) -> Compared:
    """Schedule within the peaks of ``family`` and compare with all families of the placement that keep them."""
    spans = replays(placement, p, m, costs)
    limit = spans[family].peak_chunks
    within = [s for s in spans.values() if all(a <= b for a, b in zip(s.peak_chunks, limit, strict=True))]
    problem = problem_of(placement, p, m, costs, limit)
    order = list_schedule(problem, effort=effort, measure=measure)
    span = evaluate(to_grid(problem, order), seconds_of(costs), p2p_s=costs[1])
    return Compared(
        reached(span, measure),
        min(reached(s, measure) for s in within),
        lower_bound_s(problem, measure),
        problem,
        span,
    )


def uniform_cases(degrees: Sequence[int], microbatches: Sequence[int]) -> Iterator[tuple[str, str, int, int]]:
    """Yield (placement, family, p, m) wherever the family is defined."""
    for placement, (_, v, _, families) in PLACEMENTS.items():
        for name in families:
            for p in degrees:
                for m in microbatches:
                    if m in get_family(name).microbatches(p, v):
                        yield placement, name, p, m
