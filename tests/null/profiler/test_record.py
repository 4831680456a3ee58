"""A measurement knows its own doubt; a profile's text form parses back."""

from __future__ import annotations

import json
import random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiler.form import from_data, to_data
from profiler.record import Sample
from tests.null.profiler.made import around, bare, profile, run

times = st.lists(st.floats(1e-7, 10.0), min_size=1, max_size=50)


@given(times)
def test_median_lies_in_its_interval(values: list[float]) -> None:
    sample = Sample(tuple(values))
    low, high = sample.interval_s
    assert sample.median_s == pytest.approx(median(values))
    assert min(values) <= low <= sample.median_s <= high <= max(values)
    assert sample.spread >= 0


@given(times, st.randoms())
def test_order_of_times_is_nothing(values: list[float], chance: random.Random) -> None:
    mixed = list(values)
    chance.shuffle(mixed)
    assert Sample(tuple(values)).interval_s == Sample(tuple(mixed)).interval_s


def test_interval_covers_the_true_median_as_often_as_it_says() -> None:
    chance = random.Random(3)
    hits = 0
    for _ in range(400):
        low, high = Sample(tuple(1 + chance.expovariate(1.0) for _ in range(20))).interval_s
        hits += low <= 1 + 0.693147 <= high
    assert 0.92 <= hits / 400 <= 1.0


def test_more_times_leave_less_doubt() -> None:
    chance = random.Random(1)
    few, many = (Sample(tuple(chance.gauss(1, 0.1) for _ in range(n))) for n in (8, 400))
    assert many.doubt < few.doubt / 2
    assert Sample((1.0,)).doubt == float("inf")


@pytest.mark.parametrize("values", [(), (-1.0,), (0.0,), (float("nan"),), (float("inf"), 1.0)])
def test_what_no_clock_gives_is_refused(values: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="sample"):
        Sample(values)


def test_a_profile_parses_back() -> None:
    made = profile(tensor=(1, 2)).merged(bare(runs=(run("a", 1.0, 1.1, exposed=0.25),)))
    again = from_data(json.loads(json.dumps(to_data(made))))
    assert to_data(again) == to_data(made)
    assert again.sites == made.sites
    assert again.machine == made.machine
    assert again.runs[0].features == {"exposed": 0.25}


def test_noisy_names_what_is_uncertain() -> None:
    assert profile().noisy == []
    assert "attention F b1 s128" in profile(doubt=0.9).noisy


def test_of_two_profiles_the_new_times_count_and_runs_add_up() -> None:
    old, new = profile(scale=2.0), profile(scale=1.0, micro_batch=(2, 4))
    both = old.merged(new)
    assert len(both.sites) == len(profile(micro_batch=(1, 2, 4)).sites)
    by_text = {str(site): each for site, each in both.by_site.items()}
    assert by_text["mlp F b2 s128"] == profile().by_site[next(s for s in profile().sites if str(s) == "mlp F b2 s128")]
    assert by_text["mlp F b1 s128"].sample == around(2e-3)
    runs = bare(runs=(run("a", 1, 1, 1),)).merged(bare(runs=(run("b", 1, 1, 2),))).runs
    assert [each.strategy for each in runs] == ["a", "b"]
