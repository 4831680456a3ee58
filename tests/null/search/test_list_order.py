"""Orders of the list scheduler, with overlap groups where their family has them."""

from __future__ import annotations

from dataclasses import replace

from piper_core.ir.action import ActionKind
from piper_core.schedule.grid import Grid, Layout
from piper_core.schedule.list_problem import pipeline_problem
from piper_core.schedule.list_scheduler import list_schedule
from search.direct.order import order_of
from search.list_order import list_grids, overlapped, problem_of
from search.space import Configuration
from tests.null.search.spaces import DENSE, case

MUCH = Configuration(2, 2, 2, 1, "dualpipev", 2, 1, 1, 16, "none", True, "balanced")
CONFIG = Configuration(2, 1, 2, 1, "dualpipev", 2, 1, 1, 16, "none", False, "balanced", cp=2)


def test_groups_are_a_forward_and_a_backward_of_different_microbatches_and_make_the_step_shorter() -> None:
    it = case(DENSE, "p4d", 8, 32, 512)
    direct = it.problem.direct
    problems = [problem_of(MUCH, it.problem.bounds, split=split) for split in (True, False)]
    found = [overlapped(problem, list_schedule(problem)) for problem in problems]
    for grid in [*found, *list_grids(MUCH, it.problem.bounds)]:
        groups = [slot for row in grid.rows for slot in row if len(slot) > 1]
        assert groups
        for one, two in groups:
            assert (one.kind is ActionKind.F) != (two.kind is ActionKind.F)
            assert ActionKind.BW not in (one.kind, two.kind)
            assert one.microbatch != two.microbatch
        apart = Grid(tuple(tuple((action,) for slot in row for action in slot) for row in grid.rows))
        seconds = [direct.assess(MUCH, order_of(g, 4, 16)).score.step_time_s for g in (grid, apart)]
        assert seconds[0] < seconds[1]


def test_the_order_of_a_configuration_is_the_quickest_that_fits() -> None:
    it = case(DENSE, "p4d", 8, 32, 512)
    direct, bounds = it.problem.direct, it.problem.bounds
    grids = list_grids(CONFIG, bounds)
    assert len(grids) == 6, "four filled, two found from nothing"
    scores = [direct.assess(CONFIG, order_of(grid, 4, 16)).score for grid in grids]
    found = it.problem.score(replace(CONFIG, order="list"))
    assert found.step_time_s == min(score.step_time_s for score in scores if score.fits == "yes")


def test_what_communicates_much_is_only_filled() -> None:
    """An order from nothing knows no groups, which are worth more there."""
    it = case(DENSE, "p4d", 8, 32, 512)
    assert len(list_grids(MUCH, it.problem.bounds)) == 4
    assert len(list_grids(replace(MUCH, schedule="zbv"), it.problem.bounds)) == 2 + 2, "it has no groups"


def test_what_needs_the_other_is_no_group_with_it() -> None:
    """One microbatch, or rows that wait for each other: nothing may overlap."""
    problem = pipeline_problem(Layout.V, 2, 2, 1, [(1.0, 1.0, 1.0)] * 4, split_backward=False)
    grid = overlapped(problem, list_schedule(problem))
    assert all(len(slot) == 1 for row in grid.rows for slot in row)
