"""Orders of one row: by hand, and against all of them listed."""

from __future__ import annotations

from contextlib import suppress
from math import inf
from random import Random

import pytest

from piper_core.arch.record import Architecture
from piper_core.errors import InfeasibleError
from search.direct.order import order_of
from search.list_order import list_grids
from search.row_order import Flow, Visit, Work, least_s, meet
from search.stepwise import stepwise_bound
from tests.null.search.orders import random_grid
from tests.null.search.spaces import case
from tests.null.search.test_bound import CASES, EACH, FEW, SLACK, sample


def work(seconds: float, exchange: float = 0.0) -> Work:
    """Return an action in one piece, which exchanges at its end."""
    return Work(seconds + exchange, seconds, seconds, 1, 1, seconds, 0.0)


def visit(forward: float, backward: float, exchange: float = 0.0, *, cut: bool = False, reduce: float = 0.0) -> Visit:
    """Return a stage that holds one byte of a microbatch."""
    parts = (work(backward / 2, exchange / 2), work(backward / 2, exchange / 2)) if cut else (None, None)
    return Visit(work(forward, exchange), work(backward, exchange), *parts, 1.0, 1.0, 0.0, reduce)


def test_a_row_with_room_for_one_microbatch_waits_for_each() -> None:
    flow = Flow((visit(1.0, 2.0),), 4, 0.0, (5.0,), 0.0)
    assert least_s([flow], 1.0, inf, overlapping=False) == 4 * (1 + 5 + 2)


def test_a_row_with_room_for_two_works_for_one_while_it_waits_for_the_other() -> None:
    flow = Flow((visit(1.0, 2.0),), 4, 0.0, (5.0,), 0.0)
    assert least_s([flow], 2.0, inf, overlapping=False) == 12 + 5 + 2, (
        "F F . B F B F . B B, of which the last F ends at 12"
    )
    assert least_s([flow], 9.0, inf, overlapping=False) == 4 * 1 + 2 + 4 * 2


def test_what_enters_late_or_goes_on_elsewhere_makes_the_step_longer() -> None:
    flow = Flow((visit(1.0, 2.0),), 2, 3.0, (0.0,), 4.0)
    assert least_s([flow], 9.0, inf, overlapping=False) == 3 + 2 * 3 + 4


def test_first_forwards_and_last_backwards_exchange_by_themselves() -> None:
    flow = Flow((visit(2.0, 2.0, exchange=1.0),), 5, 0.0, (0.0,), 0.0)
    assert least_s([flow], 9.0, inf, overlapping=True) == 5 * 4 + 2
    assert least_s([flow], 9.0, 21.5, overlapping=True) == 21.5, "no more than is asked for"


def test_stages_are_reduced_one_after_another_from_their_last_backwards_on() -> None:
    """The second may be through with all microbatches while the first waits, if memory holds those."""
    flow = Flow((visit(1.0, 2.0, reduce=7.0), visit(1.0, 2.0, reduce=5.0)), 3, 0.0, (0.0, 0.0, 0.0), 0.0)
    assert least_s([flow], 9.0, inf, overlapping=False) == 6 + 6 + 2 * 2 + 7
    assert least_s([flow], 2.0, inf, overlapping=False) == 2 * 6 + 2 + 5 + 7
    assert least_s([flow], 2.0, inf, overlapping=False, late=13.0) == 3 * 6 + 13


def test_no_order_fits_where_one_microbatch_does_not() -> None:
    flow = Flow((visit(1.0, 2.0), visit(1.0, 2.0)), 2, 0.0, (1.0, 1.0, 1.0), 0.0)
    assert least_s([flow], 1.5, inf, overlapping=False) == inf
    assert least_s([flow], 2.0, inf, overlapping=False) < inf


@pytest.mark.parametrize("seed", range(12))
def test_no_order_of_all_is_quicker_and_one_takes_as_long(seed: int) -> None:
    """Orders are listed by microbatch, so that this also shows that none gains by one that passes another."""
    rng = Random(seed)
    m, stages, room = (3, 1, rng.choice([1.0, 2.0, 3.0])) if seed % 2 else (2, 2, rng.choice([2.0, 3.0]))
    visits = tuple(visit(rng.randint(1, 4), 2.0 * rng.randint(1, 3), cut=rng.random() < 0.5) for _ in range(stages))
    away = tuple(float(rng.randint(0, 4)) for _ in range(2 * stages - 1))
    flow = Flow(visits, m, 0.0, away, float(rng.randint(0, 3)))
    assert least_s([flow], room, inf, overlapping=False) == _by_listing(flow, room)


def _by_listing(flow: Flow, room: float) -> float:
    """Return the least time of all orders of all microbatches, backwards whole or cut."""
    n, m, best = len(flow.visits), flow.microbatches, inf

    def go(clock: float, end: float, held: float, at: tuple[int, ...], back: tuple[float, ...],
           due: tuple[tuple[int, int], ...]) -> None:  # fmt: skip
        nonlocal best
        if max(clock, end) >= best:
            return
        if all(k == 2 * n for k in at) and not due:
            best = max(clock, end)
            return
        for i in range(m):
            k = at[i]
            if k == 2 * n:
                continue
            stage = k if k < n else 2 * n - 1 - k
            each, start = flow.visits[stage], max(clock, back[i])
            ways = [(each.forward, 1.0, False)] if k < n else [(each.backward, -1.0, False)]
            if k >= n and each.inward is not None:
                ways.append((each.inward, 0.0, True))
            for what, change, later in ways:
                if held + change > room:
                    continue
                done = start + what.whole
                there = done + (flow.away[k] if k < 2 * n - 1 else flow.leave)
                go(done, max(end, there if k == 2 * n - 1 else 0.0), held + change,
                   (*at[:i], k + 1, *at[i + 1 :]), (*back[:i], there, *back[i + 1 :]),
                   (*due, (i, stage)) if later else due)  # fmt: skip
        for j, (_, stage) in enumerate(due):
            weight = flow.visits[stage].weight
            assert weight is not None
            go(clock + weight.whole, end, held - 1.0, at, back, (*due[:j], *due[j + 1 :]))

    go(0.0, 0.0, 0.0, (0,) * m, (0.0,) * m, ())
    return best


@pytest.mark.parametrize("seed", range(400))
def test_members_of_a_group_take_turns_and_end_no_earlier_than_that_says(seed: int) -> None:
    rng = Random(seed)
    one, two = ([rng.random() for _ in range(rng.randint(1, 9))] for _ in range(2))
    a, b = rng.random() * 4, rng.random() * 4
    keys = [((2 * i + 1) / (2 * len(each)), who, i) for who, each in enumerate((one, two)) for i in range(len(each))]
    clock, ends = 0.0, [0.0, 0.0]
    for _, who, i in sorted(keys):
        clock = ends[who] = max(clock, (a, b)[who]) + (one, two)[who][i]

    def of(pieces: list[float]) -> Work:
        return Work(inf, sum(pieces), sum(pieces), len(pieces), len(pieces), max(pieces), 0.0)

    for pair in ((a, one, b, two, ends), (b, two, a, one, ends[::-1])):
        end, *results = meet(pair[0], of(pair[1]), pair[2], of(pair[3]))
        assert end <= clock * SLACK
        assert all(low <= high * SLACK for low, high in zip(results, pair[4], strict=True))


@pytest.mark.parametrize(("architecture", "cluster", "gpus", "batch", "seq_len"), CASES)
@pytest.mark.parametrize("share", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_the_bound_is_below_the_simulated_step_of_any_order(
    architecture: Architecture, cluster: str, gpus: int, batch: int, seq_len: int, share: int
) -> None:
    """Orders by chance, those of families and of the list scheduler, that just fit and with twice the memory."""
    it = case(architecture, cluster, gpus, batch, seq_len, FEW)
    bounds, direct, rng, met, closer = it.problem.bounds, it.problem.direct, Random(gpus), 0, 0
    configs = [
        config for config in sample(it, EACH, seed=gpus + 2)
        if config.pp > 1 and config.num_microbatches <= 16 and direct.covers(config)
    ]  # fmt: skip
    for config in configs[::share]:
        stages, m = config.stages, config.num_microbatches
        orders = [order_of(random_grid(config, rng), stages, m) for _ in range(2)] + [direct.order(config)]
        with suppress(InfeasibleError):
            orders += [order_of(grid, stages, m) for grid in list_grids(config, bounds, effort=0)]
        for order in orders:
            score = direct.assess(config, order).score
            for size in (SLACK * score.worst_row_bytes, 2 * score.worst_row_bytes):
                least = stepwise_bound(bounds, config, 0.0, size, inf)
                assert least <= score.step_time_s * SLACK, (str(config), least, score.step_time_s)
                whole = bounds.time_bound(config, 0.0, size)
                assert whole <= score.step_time_s * SLACK, (str(config), whole, score.step_time_s)
                met, closer = met + 1, closer + (least > whole * SLACK)
    assert met >= 2 * len(configs[::share])
    assert closer, "worth the while"
