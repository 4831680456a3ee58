"""Fits answer with what was measured where they can, say when they cannot, and get planted constants back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piper_core.frontend.degrees import Degrees
from piper_core.names import Phase, Region
from profiler.fit import FITTED, OTHER_GROUP, Chunks, Curve, Meetings, Origin, Transfers, Updates, overlap_factor
from profiler.record import Meeting, Sample, Site, Transfer
from tests.null.profiler.made import ALPHA, BETA, SEQ, WIDTHS, around, bare, profile

sizes = st.floats(1.0, 1e9)
close = pytest.approx


def site(b: int = 1, tp: int = 1, region: Region = Region.MLP, phase: Phase = Phase.F) -> Site:
    return Site(region, phase, b, SEQ, Degrees(tp))


def proportional(each: Site) -> float:
    """A preset that is three times too quick."""
    return 1e-3 / 3 * (0.5 + 0.5 * each.micro_batch) / each.degrees.tensor


@given(sizes, sizes)
def test_a_curve_never_falls_and_keeps_its_order(a: float, b: float) -> None:
    curve = Curve((float(w), around(ALPHA + BETA * w)) for w in WIDTHS)
    small, large = curve(min(a, b)), curve(max(a, b))
    assert small.seconds <= large.seconds * (1 + 1e-9)
    for each in (small, large):
        assert each.low_s <= each.seconds <= each.high_s


@given(st.floats(WIDTHS[0], 1e9))
def test_a_line_is_got_back(size: float) -> None:
    curve = Curve((float(w), around(ALPHA + BETA * w)) for w in WIDTHS)
    found = curve(size)
    assert found.seconds == close(ALPHA + BETA * size, rel=1e-6)
    assert found.origin is (Origin.MEASURED if size <= WIDTHS[-1] else Origin.FITTED)


def test_groups_of_other_sizes_are_fitted_with_doubt() -> None:
    transfers = Transfers(profile().transfers)
    two, eight = (transfers("all_reduce", 1e6, n, 1) for n in (2, 8))
    assert two is not None
    assert eight is not None
    assert (two.origin, eight.origin) == (Origin.MEASURED, Origin.FITTED)
    assert eight.seconds > two.seconds
    assert eight.high_s / eight.seconds == close(1 + OTHER_GROUP)
    assert transfers("all_reduce", 1e6, 8, 2) is None, "another tier was not measured"
    assert transfers("all_to_all", 1e6, 2, 1) is None


def test_measured_chunks_are_themselves() -> None:
    found = Chunks(profile())(site(), proportional)
    assert found is not None
    assert (found.seconds, found.origin) == (close(1e-3), Origin.MEASURED)


def test_sizes_of_microbatches_lie_on_a_line() -> None:
    chunks = Chunks(profile(micro_batch=(1, 4)))
    for b in (2, 3, 8):
        found = chunks(site(b), proportional)
        assert found is not None
        assert found.seconds == close(1e-3 * (0.5 + 0.5 * b))
        assert found.origin is Origin.FITTED
        assert found.high_s / found.seconds >= 1 + FITTED * (1 - 1e-9)


def test_what_was_timed_once_is_doubted_by_a_factor_of_two() -> None:
    """A budget that ended in the middle leaves single times, which have no interval."""
    once = Sample((2e-3,))
    curve = Curve([(1.0, around(1e-3)), (4.0, once)])
    assert (curve(16.0).low_s, curve(16.0).high_s) == (curve(16.0).seconds / 2, curve(16.0).seconds * 2)
    made = profile(micro_batch=(1, 2))
    chunks = {digest: replace(each, sample=once) for digest, each in made.chunks.items()}
    found = Chunks(replace(made, chunks=chunks))(site(b=8), proportional)
    assert found is not None
    assert 1.5 * found.seconds < found.high_s < 2 * found.seconds


def test_other_shapes_take_the_efficiency_of_the_nearest() -> None:
    """The preset is three times too quick for every shape; so a fit from one shape is right for another."""
    found = Chunks(profile())(site(tp=4), proportional)
    assert found is not None
    assert (found.seconds, found.origin) == (close(1e-3 / 4), Origin.FITTED)


def test_where_the_preset_misses_differently_fits_are_uncertain() -> None:
    def crooked(each: Site) -> float:
        return proportional(each) * each.micro_batch**2

    sure, unsure = (Chunks(profile(micro_batch=(1, 2, 4)))(site(tp=2), preset) for preset in (proportional, crooked))
    assert sure is not None
    assert unsure is not None
    assert unsure.high_s / unsure.seconds > 2 * sure.high_s / sure.seconds


def test_a_phase_that_was_never_measured_has_no_fit() -> None:
    only_forward = replace(profile(), sites={s: d for s, d in profile().sites.items() if s.phase is Phase.F})
    assert Chunks(only_forward)(site(phase=Phase.B), proportional) is None
    assert Chunks(only_forward)(site(region=Region.EXPERT), proportional) is not None, "from other regions"


def test_updates_and_overlap() -> None:
    found = Updates(profile())(1 << 16)
    assert found is not None
    assert found.seconds == close(1e-9 * (1 << 16) + 1e-5)
    assert Updates(bare())(1000) is None
    assert overlap_factor(profile(), "compute and transfer") == close(1.5)
    assert overlap_factor(bare(), "compute and transfer") is None


def test_a_transfer_of_no_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="is none"):
        Transfer("all_gossip", 2, 1, 8, around(1.0))


def test_a_meeting_loses_what_was_measured_and_no_more_beyond() -> None:
    factors = [(1e-3, 1.5), (4e-3, 1.25), (16e-3, 1.01)]
    lost = Meetings(bare(meetings=tuple(Meeting(s, around(f, 0.0)) for s, f in factors)))
    assert lost(1e-3).seconds == close(0.5e-3)
    assert lost(0.5e-3).seconds == close(0.25e-3)
    assert lost(2.5e-3).seconds == close(0.75e-3)
    assert lost(16e-3).seconds == close(1e-3), "a longer one loses no less"
    assert lost(1.0).seconds == close(1e-3)
    assert lost(1.0).low_s <= lost(1.0).seconds <= lost(1.0).high_s
    assert Meetings(bare())(1.0).seconds == 0


def test_a_meeting_loses_the_mean_of_all_but_the_slowest_tenth() -> None:
    """Few of a step's exchanges wait long, and the step pays for each of them."""
    factors = Sample((1.0,) * 6 + (2.0,) * 3 + (50.0,))
    assert factors.median_s == 1.0
    assert Meetings(bare(meetings=(Meeting(1e-3, factors),)))(1e-3).seconds == close(1e-3 * 3 / 9)


@given(st.lists(st.floats(1e-4, 1e-2), min_size=2, max_size=6), sizes, sizes)
def test_a_larger_transfer_never_takes_less(times: list[float], a: float, b: float) -> None:
    taken = [Transfer("all_gather", 2, 1, 4**i, around(t)) for i, t in enumerate(times, 5)]
    found = Transfers(taken)
    small, large = (found("all_gather", each, 2, 1) for each in sorted((a, b)))
    assert small is not None
    assert large is not None
    assert small.seconds <= large.seconds * (1 + 1e-9)
    assert min(times) * 0.99 <= small.seconds


def test_two_transfers_out_of_order_are_as_doubtful_as_they_are_apart() -> None:
    found = Transfers([Transfer("send", 2, 1, 1 << 10, around(2e-3)), Transfer("send", 2, 1, 1 << 13, around(1e-3))])
    answer = found("send", 1 << 10, 2, 1)
    assert answer is not None
    assert answer.low_s == close(1e-3, rel=0.05)
    assert answer.high_s == close(2e-3, rel=0.05)
