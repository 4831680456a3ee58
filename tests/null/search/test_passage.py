"""Bounds by the stages' order, against steps small enough to follow by hand."""

from __future__ import annotations

import numpy as np
import pytest

from piper_core.ir.dag import Floats
from search.passage import Route, Stop, Visits, arrivals, passage, synced

NOTHING = np.zeros(2)


def route(stops: list[tuple[float, float]], rows: list[list[int]], hop: float = 0.0, talk: float = 0.0) -> Route:
    """Return a route whose stages take (forward, backward), none of it hidden; ``talk`` is on the tensor stream."""
    made = [Stop(f, b, f, b, b, talk, 0.0, 0.0, b, b) for f, b in stops]
    return Route.of(np.asarray(made), np.asarray(rows), np.full(len(stops) - 1, hop))


def longest(by: Route, m: int, enter: float, ready: Floats, reduce: Floats) -> float:
    return passage(by, m, arrivals(by, enter, ready), ready, reduce)


def test_one_microbatch_goes_down_and_up() -> None:
    by = route([(1.0, 2.0), (3.0, 4.0)], [[0], [1]], hop=0.5)
    assert longest(by, 1, 10.0, NOTHING, NOTHING) == 10 + 1 + 0.5 + 3 + 4 + 0.5 + 2


def test_microbatches_follow_one_another_through_the_slowest() -> None:
    """1F1B on two rows: the last row's first forward comes after one of the first's, and the first's last backward
    after all of the last's."""
    by = route([(1.0, 2.0), (1.0, 2.0)], [[0], [1]])
    assert longest(by, 8, 0.0, NOTHING, NOTHING) == 1 + 8 * 3 + 2
    assert longest(route([(1.0, 2.0), (3.0, 6.0)], [[0], [1]]), 8, 0.0, NOTHING, NOTHING) == 1 + 8 * 9 + 2


def test_stages_of_one_row_share_it() -> None:
    """A V on two rows: the last row has two stages in the middle."""
    by = route([(1.0, 2.0)] * 4, [[0, 3], [1, 2]])
    found = longest(by, 8, 0.0, np.zeros(4), np.zeros(4))
    assert found == 1 + 8 * 6 + 2


def test_a_stage_that_is_gathered_late_holds_all_after_it() -> None:
    by = route([(1.0, 2.0), (1.0, 2.0)], [[0], [1]])
    assert longest(by, 4, 0.0, np.asarray([9.0, 0.0]), NOTHING) == 9 + 4 * 3 + 2
    assert longest(by, 1, 0.0, np.asarray([0.0, 9.0]), NOTHING) == 9 + 2 + 2, "its forward ends then"


def test_reductions_start_with_the_last_backward() -> None:
    by = route([(1.0, 2.0), (1.0, 2.0)], [[0], [1]])
    plain = longest(by, 4, 0.0, NOTHING, NOTHING)
    assert longest(by, 4, 0.0, NOTHING, np.asarray([2.0, 0.0])) == plain, "beside it"
    assert longest(by, 4, 0.0, NOTHING, np.asarray([5.0, 0.0])) == plain + 3


def test_streams_that_are_busier_than_compute_count() -> None:
    slow = route([(1.0, 2.0), (1.0, 2.0)], [[0], [1]], talk=10.0)
    assert longest(slow, 8, 0.0, NOTHING, NOTHING) == 1 + 8 * 10 + 2


def row(gather: list[float], reduce: list[float]) -> Visits:
    """Return one row whose stages take a forward of 1, and a backward of 3 of which the stage before waits for 2."""
    n = len(gather)
    found = np.asarray([[1.0] * n, [3.0] * n, [2.0] * n, gather, reduce])
    return Visits(*found[:, None])


@pytest.mark.parametrize(("m", "first", "every"), [(1, 7.0, 12.0), (3, 7 + 2 * 4, 12 + 2 * 4)])
def test_a_row_with_one_stage_gathers_computes_reduces(m: int, first: float, every: float) -> None:
    assert synced(row([5.0], [7.0]), m, alone=False) == (first, every)


def test_stages_of_a_v_gather_all_before_they_reduce_any() -> None:
    """From the second stage's forward, which may be gathered last, to its own whole backward."""
    first, every = synced(row([5.0, 4.0], [7.0, 6.0]), 3, alone=False)
    assert every == 9 + 2 * (1 + 3) + 13
    assert first == 2 * (1 + 1 + 3) + 13


def test_stages_that_different_microbatches_pass_may_reduce_before_the_other_is_gathered() -> None:
    first, every = synced(row([5.0, 5.0], [7.0, 7.0]), 6, alone=True)
    assert first == 2 * 4 + 14
    assert every == max(10 + 8 + 7, 5 + 8 + 14) < 10 + 8 + 14
