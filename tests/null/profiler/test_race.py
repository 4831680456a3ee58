"""A race finds the quickest, spends little on who is clearly slower, and ends when nothing would change."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest

from profiler.race import Rules, race


class Track:
    """Strategies that take planted times, all drifting together, each with its own noise."""

    def __init__(self, times: Mapping[str, float], noise: float, seed: int = 0) -> None:
        self.times, self.noise, self.chance, self.asked = times, noise, random.Random(seed), 0

    def __call__(self, names: Sequence[str]) -> dict[str, float]:
        drift = self.chance.uniform(1.0, 2.0)
        self.asked += len(names)
        return {name: self.times[name] * drift * self.chance.gauss(1, self.noise) for name in names}


FOUR = {"a": 1.3, "b": 1.0, "c": 1.1, "d": 2.0}


@pytest.mark.parametrize("seed", range(20))
def test_the_quickest_wins_whatever_drifts(seed: int) -> None:
    found = race(list(FOUR), Track(FOUR, 0.01, seed))
    assert found.winner == "b"
    assert found.ended == "one left"


def test_the_clearly_slower_get_few_runs() -> None:
    rules = Rules(rounds=40)
    found = race(list(FOUR), Track(FOUR, 0.005), rules)
    assert len(found.times_s["d"]) <= 8
    assert found.runs < rules.rounds
    assert set(found.out) == {"a", "c", "d"}


def test_equals_end_as_equals() -> None:
    found = race(["a", "b"], Track({"a": 1.0, "b": 1.0}, 0.001), Rules(rounds=30, halve=100))
    assert found.ended == "all left are as good"
    assert found.runs < 60


def test_noise_beyond_the_difference_is_said_not_hidden() -> None:
    found = race(["a", "b"], Track({"a": 1.0, "b": 1.001}, 0.2), Rules(rounds=6, halve=100))
    assert found.ended == "rounds over"
    assert found.out == {}
    assert found.runs == 12


def test_halving_leaves_the_better_half() -> None:
    names = [f"s{i}" for i in range(8)]
    track = Track({name: 1 + 0.001 * i for i, name in enumerate(names)}, 0.02)
    found = race(names, track, Rules(rounds=13, halve=4))
    assert sorted(len(times) for times in found.times_s.values())[0] == 4
    assert found.runs < 8 * 13
    assert found.winner not in found.out


def test_alone_nothing_is_run() -> None:
    track = Track({"a": 1.0}, 0.1)
    found = race(["a"], track)
    assert (found.winner, found.ended, track.asked) == ("a", "one left", 0)
