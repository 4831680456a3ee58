"""Repeats end when the interval is tight, when the time is gone, or at the most; interruptions are left out."""

from __future__ import annotations

from itertools import cycle, repeat
from time import sleep

import pytest

from profiler.measure.clock import CudaClock, MonotonicClock, clock_of
from profiler.measure.repeat import Effort, sample
from tests.torch_cpu.profiler.fake import FakeClock


def nothing() -> None:
    pass


def test_equal_times_are_few() -> None:
    clock = FakeClock(repeat(2e-3))
    found = sample(nothing, clock, Effort(least=7))
    assert found.times_s == (2e-3,) * 7
    assert found.doubt == 0


def test_spread_times_go_on_to_the_most() -> None:
    found = sample(nothing, FakeClock(cycle([1e-3, 2e-3])), Effort(most=30, seconds=1e9))
    assert len(found.times_s) == 30


def test_time_that_is_gone_ends_it() -> None:
    found = sample(nothing, FakeClock(cycle([1.0, 2.0])), Effort(seconds=10.0, warm_up=1))
    assert 5 <= len(found.times_s) <= 8


def test_one_call_that_is_too_long_is_timed_all_the_same() -> None:
    assert sample(nothing, FakeClock(repeat(100.0)), Effort(seconds=0.1)).times_s == (100.0,)


def test_short_calls_are_timed_in_runs() -> None:
    clock = FakeClock(repeat(1e-6))
    assert sample(nothing, clock, Effort(run_s=1e-4)).median_s == pytest.approx(1e-6)
    assert 100 <= max(clock.asked) <= 101


def test_interruptions_are_left_out() -> None:
    found = sample(nothing, FakeClock(repeat(1e-3), interrupt=3), Effort(least=7))
    assert found.times_s == (1e-3,) * 7
    assert found.interrupted == 3


def test_where_all_are_interrupted_they_count() -> None:
    found = sample(nothing, FakeClock(repeat(1e-3), interrupt=1), Effort(most=9, seconds=1e9, doubt=-1))
    assert len(found.times_s) == 9
    assert found.interrupted == 0


def test_the_monotonic_clock_waits_for_what_waits() -> None:
    timing = MonotonicClock().time(lambda: sleep(0.01), 2)
    assert timing.wall_s >= 0.02
    assert timing.seconds <= timing.wall_s


def test_clocks_by_device() -> None:
    import torch

    assert isinstance(clock_of("cpu"), MonotonicClock)
    if torch.cuda.is_available():
        assert isinstance(clock_of("cuda"), CudaClock)
