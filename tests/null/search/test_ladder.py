"""Configurations made when they are looked at, and garbage collection put off meanwhile."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest

from search.generators.collecting import collecting_later
from search.generators.ladder import Ladder
from search.space import Configuration

LOWEST = Configuration(2, 1, 4, 1, "1f1b", 1, 3, 1, 8, "1", False, "even")


def test_a_ladder_holds_what_recomputes_more_and_more() -> None:
    ladder = Ladder(LOWEST, ("1", "2", "full"))
    assert list(ladder) == [LOWEST, replace(LOWEST, recompute="2"), replace(LOWEST, recompute="full")]
    assert ladder[0] is LOWEST
    assert ladder[-1].recompute == "full"
    assert list(ladder.above(1)) == list(ladder)[1:]
    assert len(ladder.above(3)) == 0
    other = ladder.above(1).with_zero(1, 2, 1, "data")
    assert list(other) == [replace(each, zero=1, bucket=2, streams="data") for each in list(ladder)[1:]]
    with pytest.raises(IndexError):
        ladder[3]


@pytest.mark.parametrize("on", [True, False])
def test_garbage_is_collected_afterwards_as_before(on: bool) -> None:
    def fail() -> None:
        with collecting_later():
            assert not gc.isenabled()
            raise ZeroDivisionError

    was = gc.isenabled()
    try:
        (gc.enable if on else gc.disable)()
        with pytest.raises(ZeroDivisionError):
            fail()
        assert gc.isenabled() is on
    finally:
        (gc.enable if was else gc.disable)()
