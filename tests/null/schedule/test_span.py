"""The evaluator of grids: times, peaks, and what it refuses."""

from __future__ import annotations

import pytest

from piper_core.errors import PlanError, ScheduleError
from piper_core.ir.action import Action
from piper_core.names import Phase
from piper_core.schedule.grid import Grid
from piper_core.schedule.span import evaluate

UNIT = {Phase.F: 1.0, Phase.B: 2.0, Phase.BI: 1.0, Phase.BW: 1.0, Phase.R: 1.0}
TWO_ROWS = "0: 0F0 0F1 0B0 0B1\n1: 1F0 1B0 1F1 1B1"


def test_times_of_1f1b_on_two_rows() -> None:
    grid = Grid.parse(TWO_ROWS)
    span = evaluate(grid, UNIT)
    assert span.start_s == ((0.0, 1.0, 4.0, 7.0), (1.0, 2.0, 4.0, 5.0))
    assert span.end_s == ((1.0, 2.0, 6.0, 9.0), (2.0, 4.0, 5.0, 7.0))
    assert span.busy_s == (6.0, 6.0)
    assert span.first_start_s == (0.0, 1.0)
    assert span.last_end_s == (9.0, 7.0)
    assert span.span_s == span.makespan_s == 9.0
    assert span.bubble_ratio == pytest.approx(1 / 3)
    assert span.peak_chunks == (2, 1)
    assert span.times(grid)[Action.parse("1B1")] == (5.0, 7.0)


def test_messages_take_time_between_rows_only() -> None:
    span = evaluate(Grid.parse("0: 0F0 3F0 3B0 0B0\n1: 1F0 2F0 2B0 1B0"), UNIT, p2p_s=10.0)
    assert span.makespan_s == 4 * 1 + 4 * 2 + 4 * 10


@pytest.mark.parametrize(
    "seconds",
    [
        {(0, Phase.F): 1.0, (1, Phase.F): 1.0, (0, Phase.B): 2.0, (1, Phase.B): 2.0},
        {(0, Phase.F): 1.0, Phase.F: 1.0, Phase.B: 2.0},
        lambda stage, phase: UNIT[phase],
    ],
)
def test_durations_by_mapping_or_function(seconds) -> None:  # type: ignore[no-untyped-def]
    assert evaluate(Grid.parse(TWO_ROWS), seconds) == evaluate(Grid.parse(TWO_ROWS), UNIT)


def test_durations_by_stage() -> None:
    span = evaluate(Grid.parse(TWO_ROWS), lambda stage, phase: UNIT[phase] * (1 + stage))
    assert span.busy_s == (6.0, 12.0)


def test_an_overlap_group_is_one_unit() -> None:
    grid = Grid.parse("0: 0F0 (0F1 0B0) 0B1\n1: 1F0 1B0 1F1 1B1")
    span = evaluate(grid, UNIT)
    assert span.start_s[0] == (0.0, 4.0, 5.0, 10.0)  # F1 waits for what B0 waits for
    assert span.end_s[0] == (1.0, 7.0, 7.0, 12.0)  # and hands on its result when B0 ends
    assert span.start_s[1] == (1.0, 2.0, 7.0, 8.0)
    assert span.peak_chunks == (2, 1)


def test_a_member_of_an_overlap_group_may_use_what_comes_before_it() -> None:
    assert evaluate(Grid.parse("0: (0F0 1F0) (1B0 0B0)"), UNIT).makespan_s == 6.0
    with pytest.raises(PlanError, match=r"deadlock: row 0 waits at .1F0 0F0. for 0F0"):
        evaluate(Grid.parse("0: (1F0 0F0) 1B0 0B0"), UNIT)


def test_activations_are_held_until_bw() -> None:
    late = evaluate(Grid.parse("0: 0F0 0BI0 0F1 0BI1 0BW0 0BW1"), UNIT)
    soon = evaluate(Grid.parse("0: 0F0 0BI0 0BW0 0F1 0BI1 0BW1"), UNIT)
    assert (late.peak_chunks, soon.peak_chunks) == ((2,), (1,))


def test_peaks_are_weighed() -> None:
    grid = Grid.parse("0: 0F0 1F0 1B0 0B0")
    assert evaluate(grid, UNIT).peak_microbatches == (2.0,)
    assert evaluate(grid, UNIT, weight=0.5).peak_microbatches == (1.0,)
    assert evaluate(grid, UNIT, weight={0: 3.0, 1: 0.25}).peak_microbatches == (3.25,)


def test_recompute_goes_before_the_backward() -> None:
    span = evaluate(Grid.parse("0: 0F0 0R0 0B0"), UNIT)
    assert span.makespan_s == 4.0
    with pytest.raises(PlanError, match="deadlock: row 0 waits at 0B0 for 0R0"):
        evaluate(Grid.parse("0: 0F0 0B0 0R0"), UNIT)


def test_an_empty_grid_takes_no_time() -> None:
    span = evaluate(Grid(((),)), UNIT)
    assert (span.span_s, span.makespan_s, span.bubble_ratio, span.peak_chunks) == (0.0, 0.0, 0.0, (0,))


def test_a_row_may_be_empty() -> None:
    span = evaluate(Grid(((), *Grid.parse("1: 0F0 0B0").rows)), UNIT)
    assert span.first_start_s == (0.0, 0.0)
    assert span.bubble_ratio == 0.5


def test_rows_that_wait_for_each_other() -> None:
    with pytest.raises(PlanError) as caught:
        evaluate(Grid.parse("0: 0F0 0B0 0F1 0B1\n1: 1F1 1F0 1B0 1B1"), UNIT)
    assert caught.value.reason == "deadlock"
    assert str(caught.value) == "deadlock: row 0 waits at 0B0 for 1B0, row 1 waits at 1F1 for 0F1"
    assert caught.value.context == "0: 0F0 0B0 <-- here\n1: 1F1 <-- here"


def test_a_deadlock_of_many_rows_shows_ten_lines() -> None:
    n = 12  # two stages a row; row 0 begins with its second, which needs the first to have gone round
    rows = [f"{r}: {r}F0 {n + r}F0 {n + r}B0 {r}B0" for r in range(n)]
    rows[0] = f"0: {n}F0 0F0 {n}B0 0B0"
    with pytest.raises(PlanError) as caught:
        evaluate(Grid.parse("\n".join(rows)), UNIT)
    assert str(caught.value) == (
        "deadlock: row 0 waits at 12F0 for 11F0, row 11 waits at 11F0 for 10F0, "
        "row 10 waits at 10F0 for 9F0, row 9 waits at 9F0 for 8F0, and 8 more rows"
    )
    assert len(caught.value.context.splitlines()) == 10
    assert all(line.endswith("<-- here") for line in caught.value.context.splitlines())


@pytest.mark.parametrize(
    ("text", "reason", "message"),
    [
        ("0: 0F0 0F1 0B0", "incomplete", "0B1 is missing"),
        ("0: 0F1 0B1", "incomplete", "0F0 is missing"),
        ("0: 0B0", "incomplete", "0F0 is missing"),
        ("0: 0F0 0BI0", "incomplete", "0BW0 is missing"),
        ("0: 0F0 0BW0", "incomplete", "0BI0 is missing"),
        ("0: 0F0 0B0 0F0", "duplicate", "0F0 is there twice"),
        ("0: 0F0 0B0 0BW0", "duplicate", "0B0 and 0BW0 are both there"),
        ("0: 0F0 0BI0 0BW0 0B0", "duplicate", "0B0 and 0BI0 are both there"),
        ("0: 0F0\n1: 0B0", "data_dependency", "0F0 is on row 0 and its backward on row 1"),
        ("0: 0F0 0BW0 0BI0", "deadlock", "row 0 waits at 0BW0 for 0BI0"),
    ],
)
def test_refuses(text: str, reason: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        evaluate(Grid.parse(text), UNIT)
    assert caught.value.reason == reason
    assert str(caught.value) == f"{reason}: {message}"


@pytest.mark.parametrize("text", ["0: 0F0 0SEND_F0 0B0", "0: 0F0 0B0 0UPDATE"])
def test_refuses_what_is_not_compute(text: str) -> None:
    with pytest.raises(ScheduleError, match="orders compute only"):
        evaluate(Grid.parse(text), UNIT)
