"""Repeats end when the interval is tight, when the time is gone, or at the most; interruptions are left out."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle, repeat
from time import sleep

import pytest
import torch

from profiler.measure.clock import CudaClock, MonotonicClock, Timing, clock_of
from profiler.measure.pace import Pace
from profiler.measure.repeat import Effort, in_turn, sample
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


def test_calls_take_turns() -> None:
    made: list[str] = []
    calls = {name: lambda name=name: made.append(name) for name in "abc"}
    found = in_turn(calls, FakeClock(repeat(1e-3)), Effort(least=3, warm_up=1))
    assert "".join(made) == "abc" * 4
    assert all(each.times_s == (1e-3,) * 3 for each in found.values())


def test_turns_go_on_until_the_last_is_tight_or_the_time_is_gone() -> None:
    calls = {"even": nothing, "wide": nothing}
    spread = in_turn(calls, FakeClock(cycle([1.0, 1.0, 1.0, 2.0])), Effort(most=20, seconds=1e9, warm_up=0))
    assert [len(each.times_s) for each in spread.values()] == [20, 20]
    short = in_turn(calls, FakeClock(repeat(1.0)), Effort(doubt=-1, seconds=3.0, warm_up=0))
    assert [len(each.times_s) for each in short.values()] == [3, 3], "three seconds for each of the two"


def test_what_has_no_memory_leaves_the_turns() -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError("no memory")

    found = in_turn({"large": fail, "small": nothing}, FakeClock(repeat(1e-3)), Effort(least=2))
    assert list(found) == ["small"]
    with pytest.raises(RuntimeError, match="a bug"):
        in_turn({"broken": lambda: (_ for _ in ()).throw(RuntimeError("a bug"))}, MonotonicClock(), Effort())  # type: ignore[misc]


def test_times_are_brought_to_one_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that take twice as long while the fixed work does are as quick as before."""
    pace, slow = Pace(base_s=1e-3), cycle([1.0, 2.0])
    now = [1.0]

    def read(_: Pace) -> float:
        return 1e-3 * now[0]

    def call() -> None:
        now[0] = next(slow) if len(asked) % 2 == 0 else now[0]
        asked.append(now[0])

    class Clock:
        def time(self, call: Callable[[], object], times: int) -> Timing:
            call()
            return Timing(5e-3 * now[0], 5e-3)

    asked: list[float] = []
    monkeypatch.setattr(Pace, "read", read)
    found = in_turn({"a": call, "b": call}, Clock(), Effort(least=6, doubt=0.6, warm_up=0), pace)
    plain = in_turn({"a": call, "b": call}, Clock(), Effort(least=6, doubt=0.6, warm_up=0))
    assert set(plain["b"].times_s) == {5e-3, 10e-3}
    assert found["b"].spread < plain["b"].spread


def test_the_pace_is_read_from_real_work() -> None:
    pace = Pace()
    readings = [pace.read() for _ in range(5)]
    assert pace.base_s > 0
    assert pace.seen == readings
    assert pace.factor([pace.base_s * 2]) == pytest.approx(0.5)
    assert Pace(base_s=1.0).base_s == 1.0


def test_the_monotonic_clock_waits_for_what_waits() -> None:
    timing = MonotonicClock().time(lambda: sleep(0.01), 2)
    assert timing.wall_s >= 0.02
    assert timing.seconds <= timing.wall_s


def test_clocks_by_device() -> None:
    assert isinstance(clock_of("cpu"), MonotonicClock)
    if torch.cuda.is_available():
        assert isinstance(clock_of("cuda"), CudaClock)
