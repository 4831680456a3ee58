"""Schedule families: the published law of each, and what holds for all of them."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections import deque
from functools import cache
from itertools import product

import pytest

from piper_core.errors import ConfigError, ScheduleError
from piper_core.ir.action import Action, ActionKind
from piper_core.names import Phase
from piper_core.schedule.families import FAMILIES, get_family
from piper_core.schedule.grid import Grid, Layout, rows_of_stage
from piper_core.schedule.span import Span, evaluate

UNIT = {Phase.F: 1, Phase.B: 2, Phase.BI: 1, Phase.BW: 1}
DEGREES = range(1, 17)


def microbatches(p: int) -> list[int]:
    """Numbers of microbatches around every bound that a family has."""
    return sorted({1, 2, 3, p - 1, p, p + 1, 2 * p - 2, 2 * p - 1, 2 * p, 2 * p + 1, 3 * p + 2, 4 * p} - {0})


def cases(name: str, degrees: range = DEGREES) -> list[tuple[int, int, int]]:
    """Legal (p, m, v) of a family."""
    family = get_family(name)
    return [
        (p, m, v)
        for p in degrees
        if p in family.degrees()
        for v in ([2, 3, 6] if name == "interleaved_1f1b" else family.virtual_stages(p))
        for m in microbatches(p)
        if m in family.microbatches(p, v)
    ]


@cache
def span(name: str, p: int, m: int, v: int) -> Span:
    return evaluate(get_family(name).grid(p, m, v), UNIT)


# --- laws of all families ---


@pytest.mark.parametrize("name", FAMILIES)
def test_complete_and_free_of_deadlock_where_the_layout_says(name: str) -> None:
    family = get_family(name)
    for p, m, v in cases(name):
        grid = family.grid(p, m, v)
        assert len(grid.rows) == p
        span(name, p, m, v)  # complete and without deadlock, or it raises
        held = rows_of_stage(family.layout, p, v)
        seen = set()
        for r, row in enumerate(grid.rows):
            for slot in row:
                for action in slot:
                    assert r in held[action.stage], (p, m, v, str(action))
                    seen.add((action.stage, action.microbatch))
        assert seen == set(product(range(len(held)), range(m))), (p, m, v)
        if p % 2 == 0 and family.layout is Layout.BIDIRECTIONAL:
            first = {(a.stage, a.microbatch) for row in grid.rows[: p // 2] for slot in row for a in slot}
            near = product(range(p // 2), range(m // 2))
            far = product(range(p // 2, p), range(m // 2, m))
            assert first == {*near, *far}, (p, m)


@pytest.mark.parametrize("name", FAMILIES)
def test_splits_backward_says_whether_bi_and_bw_occur(name: str) -> None:
    family = get_family(name)
    for p, m, v in cases(name, range(2, 5)):
        kinds = {a.kind for row in family.grid(p, m, v).rows for slot in row for a in slot}
        assert (ActionKind.BI in kinds) == (ActionKind.BW in kinds) == family.splits_backward


def rendezvous_ends(grid: Grid, layout: Layout, v: int) -> bool:
    """Play the grid with messages: no buffering, a receive is posted by the action that waits for it.

    Channel = (source row, destination row, activation | gradient), sends in the order of their consumers,
    each end its own stream; an overlap group posts the receives of all its members.
    """
    n_stages = len(rows_of_stage(layout, len(grid.rows), v))
    row_of = {(a.stage, a.microbatch): r for r, row in enumerate(grid.rows) for slot in row for a in slot}

    def message(a: Action) -> tuple[tuple[int, int, str], tuple[int, int | None]] | None:
        if a.kind is ActionKind.BW:
            return None
        source = a.stage - 1 if a.kind is ActionKind.F else a.stage + 1
        if not 0 <= source < n_stages:
            return None
        rows = (row_of[source, a.microbatch], row_of[a.stage, a.microbatch])
        kind = "activation" if a.kind is ActionKind.F else "gradient"
        return ((*rows, kind), (source, a.microbatch)) if rows[0] != rows[1] else None

    sends: dict[tuple[int, int, str], deque[tuple[int, int | None]]] = {}
    for row in grid.rows:
        for slot in row:
            for a in slot:
                if (sent := message(a)) is not None:
                    sends.setdefault(sent[0], deque()).append(sent[1])
    produced: set[tuple[str, int, int | None]] = set()
    received: set[tuple[tuple[int, int, str], tuple[int, int | None]]] = set()
    cursor = [0] * len(grid.rows)
    moved = True
    while moved:
        moved = False
        for r, row in enumerate(grid.rows):
            while cursor[r] < len(row):
                slot = row[cursor[r]]
                needs = [sent for a in slot if (sent := message(a)) is not None]
                for channel, what in needs:
                    queue = sends[channel]
                    if queue and queue[0] == what and (channel[2], *what) in produced:
                        queue.popleft()
                        received.add((channel, what))
                if not all(need in received for need in needs):
                    break
                for a in slot:
                    if a.kind is not ActionKind.BW:
                        kind = "activation" if a.kind is ActionKind.F else "gradient"
                        produced.add((kind, a.stage, a.microbatch))
                cursor[r] += 1
                moved = True
    return cursor == [len(row) for row in grid.rows] and not any(sends.values())


@pytest.mark.parametrize("name", FAMILIES)
def test_ends_under_rendezvous_with_a_channel_for_each_direction_and_kind(name: str) -> None:
    family = get_family(name)
    for p, m, v in cases(name, range(1, 9)):
        if m in (1, p + 1, 2 * p, 2 * p + 1):
            assert rendezvous_ends(family.grid(p, m, v), family.layout, v), (p, m, v)


@pytest.mark.parametrize("name", FAMILIES)
def test_text_round_trip(name: str) -> None:
    family = get_family(name)
    for p, m, v in cases(name, range(1, 5)):
        grid = family.grid(p, m, v)
        assert Grid.parse(str(grid)) == grid


DIGEST = """
import hashlib
from piper_core.schedule.families import FAMILIES
h = hashlib.sha256()
for name, family in FAMILIES.items():
    h.update(str(family.grid(4, 10, family.virtual_stages(4)[0])).encode())
print(h.hexdigest())
"""


def test_same_grid_in_a_new_process() -> None:
    h = hashlib.sha256()
    for family in FAMILIES.values():
        family.grid(4, 5 * 4, family.virtual_stages(4)[0])  # a longer one first must not matter
        h.update(str(family.grid(4, 10, family.virtual_stages(4)[0])).encode())
    fresh = subprocess.run([sys.executable, "-c", DIGEST], capture_output=True, text=True, check=True)
    assert fresh.stdout.strip() == h.hexdigest()


# --- the law of each family, F = BI = BW = 1 ---


def test_gpipe_and_1f1b_have_the_exact_bubble_and_peaks() -> None:
    for name in ("gpipe", "1f1b"):
        for p, m, v in cases(name):
            s = span(name, p, m, v)
            assert s.makespan_s == 3 * (m + p - 1)
            assert s.bubble_ratio == pytest.approx((p - 1) / (m + p - 1))
            assert s.peak_chunks == tuple(m if name == "gpipe" else min(m, p - r) for r in range(p))


def test_interleaved_1f1b_is_exact() -> None:
    for p, m, v in cases("interleaved_1f1b"):
        s = span("interleaved_1f1b", p, m, v)
        # For fewer microbatches than rows the way of one microbatch is what counts.
        assert s.makespan_s == 3 * (v * max(m, p) + min(m, p) - 1)
        if m >= p:
            assert s.bubble_ratio == pytest.approx((p - 1) / (v * m + p - 1))
        longest = -(-m // max(1, m // p))
        peaks = [min(v * m, (v - 1) * longest + 2 * (p - 1 - r) + 1) for r in range(p)]
        assert s.peak_chunks == tuple(peaks)


def test_zb_h1_has_a_third_of_the_bubble_at_the_memory_of_1f1b() -> None:
    for p, m, v in cases("zb_h1"):
        s = span("zb_h1", p, m, v)
        assert s.span_s == 3 * m + 2 * p - 1 - min(m, p)
        assert s.peak_chunks == (min(m, p),) * p


def test_zb_h2_has_no_bubble_in_the_span() -> None:
    for p, m, v in cases("zb_h2"):
        s = span("zb_h2", p, m, v)
        assert s.span_s == 3 * m + 2 * p - 1 - min(m, 2 * p - 1)
        assert s.peak_chunks == (min(m, 2 * p - 1),) * p


def test_zbv_has_no_bubble_in_the_span_at_the_memory_of_1f1b() -> None:
    for p, m, v in cases("zbv"):
        s = span("zbv", p, m, v)
        assert s.span_s == 6 * m + 2 * max(0, 2 * p - 1 - m)
        if m >= 2 * p - 1:
            assert s.peak_chunks == (2 * p,) * p
        assert max(s.peak_chunks) <= 2 * p


@pytest.mark.parametrize(
    ("name", "peak", "share"),
    [("v_min", lambda p: (p + 4) // 3, 2 / 3), ("v_half", lambda p: (p + 2) // 2, 1 / 2)],
)
def test_v_min_and_v_half_keep_the_published_peak_and_bubble(name, peak, share) -> None:  # type: ignore[no-untyped-def]
    for p, m, v in cases(name):
        grid_span = evaluate(get_family(name).grid(p, m, v), UNIT, weight=0.5)
        assert max(grid_span.peak_microbatches) <= peak(p)
    for p in DEGREES:
        for m in (4 * p, 4 * p + 1, 6 * p, 8 * p):
            assert 1 - 6 * m / span(name, p, m, 2).span_s <= 1.1 * share * p / m


def test_v_min_and_v_half_spans_exactly() -> None:
    for p, m in product(range(2, 17), (16, 17, 40)):
        assert span("v_min", p, m, 2).span_s == 6 * m + 4 * p - 5 + 2 * (p % 3 == 0)
        assert span("v_half", p, m, 2).span_s == 6 * m + 3 * p - 4 + (p % 2 == 0)


def test_bubbles_shrink_as_memory_grows_along_the_v_families() -> None:
    for p in range(3, 17):
        spans = [span(name, p, 4 * p, 2) for name in ("v_min", "v_half", "zbv")]
        assert spans[0].span_s > spans[1].span_s > spans[2].span_s
        peaks = [max(s.peak_chunks) for s in spans]
        assert peaks == sorted(peaks)


@pytest.mark.parametrize("name", ["dualpipev", "dualpipe"])
def test_the_steady_phase_pairs_forward_and_backward_of_different_microbatches(name: str) -> None:
    for p, m, v in cases(name):
        half = p if name == "dualpipev" else p // 2
        flow = m if name == "dualpipev" else m // 2
        for r, row in enumerate(get_family(name).grid(p, m, v).rows):
            groups = [slot for slot in row if len(slot) > 1]
            near = min(r, p - 1 - r) if name == "dualpipe" else r
            # Steps 4 and 5 of the published schedule, less the pair that the turning row leaves apart.
            steady = 2 * (flow - 2 * half + near + 1) + (half - near - 1) - (near == half - 1)
            assert len(groups) == steady
            for forward, backward in groups:
                assert (forward.kind, backward.kind) == (ActionKind.F, ActionKind.B)
                assert forward.stage != backward.stage
                assert forward.microbatch != backward.microbatch


def test_dualpipev_and_dualpipe_have_the_published_bubble_and_peak() -> None:
    for p, m, v in cases("dualpipev"):  # (PP/2 - 1)(F&B + B - 3W) with F&B = F + B and PP = 2p stages
        assert span("dualpipev", p, m, v).span_s == 6 * m + 2 * (p - 1)
        assert span("dualpipev", p, m, v).peak_chunks == (2 * p + 1,) * p
    for p, m, v in cases("dualpipe"):
        assert span("dualpipe", p, m, v).span_s == 3 * m + 2 * (p // 2 - 1)
        assert span("dualpipe", p, m, v).peak_chunks == (p + 1,) * p


# --- what they refuse ---


@pytest.mark.parametrize(
    ("name", "p", "m", "v", "line"),
    [
        (
            "gpipe",
            4,
            0,
            1,
            "gpipe is not defined for 0 microbatches at p=4, expected m >= 1, found m=0; m=1 would do",
        ),
        (
            "1f1b",
            0,
            4,
            1,
            "1f1b is not defined for 0 pipeline rows, expected p >= 1, found p=0; p=1 would do",
        ),
        (
            "1f1b",
            2,
            4,
            2,
            "1f1b is not defined for 2 virtual stages a row, expected v = 1, found v=2; v=1 would do",
        ),
        (
            "zbv",
            2,
            4,
            1,
            "zbv is not defined for 1 virtual stages a row, expected v = 2, found v=1; v=2 would do",
        ),
        (
            "interleaved_1f1b",
            2,
            4,
            1,
            "interleaved_1f1b is not defined for 1 virtual stages a row, expected v >= 2, found v=1; v=2 would do",
        ),
        (
            "dualpipev",
            4,
            7,
            2,
            "dualpipev is not defined for 7 microbatches at p=4, expected m >= 8, found m=7; m=8 would do",
        ),
        (
            "dualpipe",
            4,
            9,
            1,
            "dualpipe is not defined for 9 microbatches at p=4, "
            "expected m >= 8 in steps of 2, found m=9; m=8 or m=10 would do",
        ),
        (
            "dualpipe",
            3,
            8,
            1,
            "dualpipe is not defined for 3 pipeline rows, "
            "expected p >= 2 in steps of 2, found p=3; p=2 or p=4 would do",
        ),
    ],
)
def test_refuses_and_names_the_nearest(name: str, p: int, m: int, v: int, line: str) -> None:
    family = get_family(name)
    for call in (family.check, family.grid):
        with pytest.raises(ScheduleError) as caught:
            call(p, m, v)
        assert str(caught.value) == line


@pytest.mark.parametrize("name", FAMILIES)
def test_check_agrees_with_the_ranges(name: str) -> None:
    family = get_family(name)
    for p, m, v in product(range(-1, 6), range(-1, 14), range(4)):
        legal = p in family.degrees() and v in family.virtual_stages(p) and m in family.microbatches(p, v)
        if legal:
            family.check(p, m, v)
        else:
            with pytest.raises(ScheduleError):
                family.check(p, m, v)


def test_names() -> None:
    assert [family.name for family in FAMILIES.values()] == list(FAMILIES)
    assert get_family("zb_h1") is FAMILIES["zb_h1"]
    with pytest.raises(ConfigError, match=r"no schedule family 'zb-h3'; did you mean .*zb_h"):
        get_family("zb-h3")
    with pytest.raises(ConfigError, match=r"there are gpipe, 1f1b, "):
        get_family("?")


def test_names_import_no_family() -> None:
    code = (
        "import sys; from piper_core.schedule.families import FAMILIES; assert '1f1b' in list(FAMILIES); "
        "assert not [m for m in sys.modules if m.startswith('piper_core.schedule.families.') "
        "and not m.endswith('.base')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
