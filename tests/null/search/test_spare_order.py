"""Orders of the list scheduler that leave backwards room for their workspace."""

from __future__ import annotations

from piper_core.names import Phase
from piper_core.schedule.grid import Layout
from piper_core.schedule.list_problem import ListProblem, peaks, pipeline_problem, to_grid
from piper_core.schedule.list_scheduler import list_schedule
from search.direct.order import order_of
from search.list_order import crowded, list_grids, problem_of, spare
from search.space import Configuration
from tests.null.search.spaces import WIDE_HEAD, case

CONFIG = Configuration(2, 1, 2, 1, "zb_h1", 1, 1, 4, 16, "none", False, "balanced")


def two_rows(limit: float, *, split: bool = True) -> ListProblem:
    return pipeline_problem(
        Layout.V, 2, 2, 8, [(1.0, 1.0, 1.0)] * 4, split_backward=split, limit_bytes=[limit] * 2
    )  # fmt: skip


def test_a_backward_without_room_for_its_workspace_crowds_its_row() -> None:
    """Rows hold three microbatches when a backward begins: beside those there is room for a workspace, or there is
    not."""
    for split in (True, False):
        problem = two_rows(3.0, split=split)
        order = list_schedule(problem)
        assert max(peaks(problem, order)) == 3
        assert crowded(problem, order, [1.0] * 4)
        assert not crowded(two_rows(4.0, split=split), order, [1.0] * 4)
        assert not crowded(problem, order, [0.0] * 4)


def test_weight_gradients_that_are_due_are_held_beside_a_workspace() -> None:
    """One row of one stage: the second backward begins while the first microbatch is held for its weight gradient."""
    problem = pipeline_problem(Layout.LOOP, 1, 1, 2, [(1.0, 1.0, 1.0)], limit_bytes=[2.0])
    task = {(Phase(phase).name, microbatch): t for t, (_, phase, microbatch) in enumerate(problem.key)}
    late = [task[name, i] for name, i in [("F", 0), ("BI", 0), ("F", 1), ("BI", 1), ("BW", 0), ("BW", 1)]]
    soon = [task[name, i] for name, i in [("F", 0), ("BI", 0), ("BW", 0), ("F", 1), ("BI", 1), ("BW", 1)]]
    assert crowded(problem, [late], [1.0])
    assert not crowded(problem, [soon], [1.0])


def test_rows_spare_the_largest_workspace_of_their_own_stages() -> None:
    workspace = [0.5, 1.0, 0.25, 2.0]
    spared = spare(two_rows(6.0), workspace)
    assert list(spared.limit_bytes) == [4.0, 5.0], "stages 0 and 3, 1 and 2"
    assert not crowded(two_rows(6.0), list_schedule(spared), workspace)


def test_an_order_with_room_for_workspace_fits_where_the_other_does_not() -> None:
    it = case(WIDE_HEAD, "p4d", 4, 128, 2048, memory_gib=8.9)
    direct, bounds = it.problem.direct, it.problem.bounds
    grids = list_grids(CONFIG, bounds)[2:]
    assert len(grids) == 3, "with weight gradients apart two, at once one"
    scores = [direct.assess(CONFIG, order_of(grid, 2, 16)).score for grid in grids]
    assert [score.fits for score in scores] == ["close", "yes", "yes"]
    assert scores[1].step_time_s < scores[2].step_time_s
    for grid in grids:
        actions = [action for row in grid.rows for slot in row for action in slot]
        assert len({*actions}) == len(actions) == (2 if grid is grids[2] else 3) * 2 * 16


def test_where_there_is_room_orders_are_those_without_workspace() -> None:
    it = case(WIDE_HEAD, "p4d", 4, 128, 2048, memory_gib=200)
    bounds = it.problem.bounds
    plain = [problem_of(CONFIG, bounds, split=split) for split in (True, False)]
    assert list_grids(CONFIG, bounds)[2:] == tuple(to_grid(each, list_schedule(each)) for each in plain)
