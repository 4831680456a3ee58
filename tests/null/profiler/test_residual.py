"""The residual model: nothing without runs, planted slowness got back, intervals that hold as often as they say."""

from __future__ import annotations

import random
from math import exp, hypot

import pytest

from profiler.record import Run
from profiler.residual import FEATURES, INNER_NOISE, NOISE, Residual
from tests.null.profiler.made import run

WEIGHTS = (0.08, 0.4, -0.2, 0.3)


def planted(chance: random.Random, noise: float, *, own: bool = True) -> Run:
    shares = {name: chance.uniform(0, 0.5) for name in FEATURES}
    noise *= hypot(1, INNER_NOISE / NOISE * shares["inner"]) if own else 1.0
    log = (
        WEIGHTS[0] * (1 - shares["exposed"] - shares["inner"])
        + sum(w * shares[n] for w, n in zip(WEIGHTS[1:], FEATURES, strict=True))
        + chance.gauss(0, noise)
    )
    return run("x", exp(log), 1.0, **shares)


def test_one_run_with_inner_collectives_hardly_moves_the_others() -> None:
    plain = [run(str(i), 1.0, 1.0, exposed=0.05 * i) for i in range(4)]
    before, after = Residual.of(plain), Residual.of([*plain, run("tensor", 0.67, 1.0, inner=0.7)])
    for shares in ({"exposed": 0.1}, {"bubble": 0.3}):
        assert after.apply(1.0, shares)[0] == pytest.approx(before.apply(1.0, shares)[0], rel=0.03)
    other = after.apply(1.0, {"inner": 0.8})
    assert 0.8 < other[0] < 1.0
    assert other[1] < 0.67, "another of its kind may be off by as much"
    assert other[2] > 1.06


def test_without_runs_a_prediction_stays() -> None:
    seconds, low, high = Residual.of(()).apply(2.0, {"exposed": 0.3})
    assert seconds == 2.0
    assert low < 2.0 < high


def test_planted_weights_are_got_back() -> None:
    chance = random.Random(0)
    found = Residual.of([planted(chance, 0.01, own=False) for _ in range(60)]).to_data()
    assert list(found.values()) == pytest.approx(WEIGHTS, abs=0.03)


def test_five_runs_take_a_constant_error_away() -> None:
    model = Residual.of([run(str(i), 1.3, 1.0, exposed=0.1 * i) for i in range(5)])
    seconds, low, high = model.apply(1.0, {"exposed": 0.25})
    assert seconds == pytest.approx(1.3, rel=0.02)
    assert low < 1.3 < high


@pytest.mark.parametrize("count", [3, 8, 30])
def test_intervals_hold_as_often_as_they_say(count: int) -> None:
    chance, hits, tries = random.Random(count), 0, 400
    for _ in range(tries):
        model = Residual.of([planted(chance, 0.05) for _ in range(count)])
        new = planted(chance, 0.05)
        _, low, high = model.apply(1.0, new.features, 0.9)
        hits += low <= new.step.median_s <= high
    assert 0.85 <= hits / tries <= 0.97


def test_more_runs_narrow_the_interval() -> None:
    chance = random.Random(5)
    runs = [planted(chance, 0.05) for _ in range(40)]
    widths = []
    for n in (0, 5, 40):
        _, low, high = Residual.of(runs[:n]).apply(1.0, {"exposed": 0.2, "bubble": 0.2})
        widths.append(high / low)
    assert widths == sorted(widths, reverse=True)
