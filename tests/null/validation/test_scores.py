"""The scores, on cases that can be worked out by hand."""

from __future__ import annotations

from math import log, sqrt
from random import Random
from xml.etree import ElementTree

import pytest

from search.validation.report import picture
from search.validation.scores import Confusion, Pair, Trial, by_layout, errors, kendall, regret


def test_errors() -> None:
    found = errors([Pair("a", 1.0, 1.1), Pair("a", 2.0, 1.8), Pair("a", 4.0, 4.0)])
    assert (found.count, found.worst) == (3, pytest.approx(0.1))
    assert found.mean == pytest.approx(0.2 / 3)
    assert found.median == pytest.approx(0.1)
    assert found.bias == pytest.approx(0.0)


def test_spread_forgives_one_rescale() -> None:
    assert errors([Pair("a", t, 1.3 * t) for t in (1.0, 2.0, 5.0)]).spread == pytest.approx(0.0)
    two = errors([Pair("a", 1.0, 1.0), Pair("a", 1.0, 1.21)])
    assert log(1 + two.spread) == pytest.approx(log(1.21) / 2)


def test_kendall_counts_pairs() -> None:
    assert kendall([1, 2, 3], [10, 20, 30]) == 1
    assert kendall([1, 2, 3], [3, 2, 1]) == -1
    assert kendall([1, 2, 3], [1, 3, 2]) == pytest.approx(1 / 3)
    assert kendall([1, 1, 2], [1, 2, 3]) == pytest.approx(2 / sqrt(2 * 3))
    rng = Random(0)
    one, other = ([rng.random() for _ in range(40)] for _ in range(2))
    assert kendall(one, other) == pytest.approx(kendall(other, one))
    assert kendall(one, [-x for x in other]) == pytest.approx(-kendall(one, other))


def test_a_layout_is_its_quickest_kernel() -> None:
    pairs = [Pair("a", 2.0, 1.0, "x"), Pair("a", 1.0, 3.0, "x"), Pair("a", 5.0, 5.0, "y")]
    assert by_layout(pairs) == [Pair("a", 1.0, 1.0, "x"), Pair("a", 5.0, 5.0, "y")]


def test_regret_of_the_pick() -> None:
    runs = [Trial(0.5, 2.0, "yes"), Trial(0.6, 1.5, "no"), Trial(0.4, 1.9, "close"), Trial(None, 3.0, "yes")]
    lost, out = regret(runs)
    assert (lost, out) == (pytest.approx(0.2), False)
    assert regret([*runs, Trial(None, 1.0, "yes")]) == (pytest.approx(0.6), True)


def test_confusion() -> None:
    found = Confusion({"yes": 7, "no": 1, "close": 2}, {"no": 8, "yes": 1, "close": 1})
    assert (found.false_fit, found.false_out_of_memory) == (0.1, 0.1)
    assert found.close == pytest.approx(3 / 20)


def test_the_picture_shows_every_run() -> None:
    pairs = [Pair("one & two", 1.0, 1.1), Pair("b", 20.0, 18.0), Pair("b", 0.3, 0.3)]
    root = ElementTree.fromstring(picture(pairs))
    titles = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 3
    assert titles[0] == "one & two: measured 1 s, predicted 1.1 s"
