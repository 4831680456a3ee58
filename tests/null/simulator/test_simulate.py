"""The simulator: known spans, an independent reference, the steady state, what holds up compute."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pytest

from piper_core.errors import PlanError
from piper_core.ir.action import ActionKind
from piper_core.ir.dag import Mask
from piper_core.ir.timeline import Timeline
from piper_core.names import Phase, Sync
from piper_core.schedule.families import FAMILIES, get_family
from piper_core.schedule.grid import Grid
from piper_core.schedule.plan import CODE, KINDS, Plan, Stream, StreamKind, assemble
from piper_core.schedule.span import evaluate
from search.simulator import CommKind, Lowered, lower_plan, simulate
from search.simulator.lower import COMM_KINDS
from tests.null.simulator.programs import build, random_case
from tests.null.simulator.reference import run

UNIT = {Phase.F: 1.0, Phase.B: 2.0, Phase.BI: 1.0, Phase.BW: 1.0, Phase.R: 1.0}
OF_KIND = np.asarray([UNIT[Phase[kind.value]] if kind.value in Phase.__members__ else 0.0 for kind in KINDS])


def unit_seconds(plan: Plan) -> np.ndarray:
    """F = BI = BW = 1, B = 2, everything else takes no time."""
    return np.asarray(OF_KIND[plan.kind])


def kinds(plan: Plan, *names: str) -> np.ndarray:
    return np.isin(plan.kind, [CODE[ActionKind(name)] for name in names])


def flat(grid: Grid) -> Grid:
    """Take overlap groups apart: a plan runs their members in turn, each handing on its result when it ends."""
    return Grid(tuple(tuple((action,) for slot in row for action in slot) for row in grid.rows))


# --- known spans ---


@pytest.mark.parametrize(("name", "p"), [(n, p) for n in FAMILIES for p in (2, 3, 4) if p in get_family(n).degrees()])
def test_spans_of_families_equal_those_of_their_grids(name: str, p: int) -> None:
    family = get_family(name)
    v = 2 if 2 in family.virtual_stages(p) else 1
    for m in {p, 2 * p, 2 * p + 2}:
        if m not in family.microbatches(p, v):
            continue
        plan = build(name, p, m, v).plan
        found = simulate(plan, unit_seconds(plan))
        span = evaluate(flat(family.grid(p, m, v)), UNIT)
        assert found.makespan_s == found.step_time_s == span.makespan_s
        assert found.busy_s.tolist() == list(span.busy_s)
        assert found.bubble_ratio == pytest.approx(span.bubble_ratio)


def test_1f1b_by_hand() -> None:
    plan = build("1f1b", 2, 2).plan
    found = simulate(plan, unit_seconds(plan))
    start = {(row, str(action)): found.start_s[i] for i, (row, action) in enumerate(rows_and_actions(plan))}
    assert [start[0, a] for a in ("0F0", "0F1", "0B0", "0B1")] == [0, 1, 4, 7]
    assert [start[1, a] for a in ("1F0", "1B0", "1F1", "1B1")] == [1, 2, 4, 5]
    assert found.makespan_s == 9
    path = [f"{row}:{action}" for row, action in found.critical_path()]
    assert path[:3] == ["0:0F0", "0:0SEND_F0", "1:1F0"]
    assert path[-1] == "0:0B1"


def rows_and_actions(plan: Plan):  # type: ignore[no-untyped-def]
    for s, stream in enumerate(plan.streams):
        for i in range(plan.start[s], plan.start[s + 1]):
            yield stream.row, plan.action(i)


def test_a_message_lasts_as_long_as_its_slower_end() -> None:
    plan = build("gpipe", 2, 1).plan
    seconds = unit_seconds(plan)
    seconds[kinds(plan, "SEND_F")] = 5.0
    seconds[kinds(plan, "RECV_F")] = 3.0
    found = simulate(plan, seconds)
    assert found.makespan_s == 1 + 5 + 1 + 2 + 2
    send, recv = (int(np.flatnonzero(kinds(plan, kind))[0]) for kind in ("SEND_F", "RECV_F"))
    assert (found.start_s[send], found.end_s[send]) == (found.start_s[recv], found.end_s[recv]) == (1, 6)
    exposed = found.exposed_s()
    assert exposed[:, COMM_KINDS.index(CommKind.PIPELINE)].tolist() == [0, 5]
    assert exposed.sum() == 5


def test_a_collective_starts_when_its_last_row_is_there() -> None:
    plan = build("gpipe", 3, 1).plan
    seconds = unit_seconds(plan)
    norm = kinds(plan, "NORM")
    seconds[norm] = [1.0, 4.0, 2.0]
    found = simulate(plan, seconds)
    assert set(found.start_s[norm].tolist()) == {9.0}
    assert set(found.end_s[norm].tolist()) == {13.0}
    assert found.exposed_communication_s()["norm"] == 4.0


def test_a_plan_that_waits_for_itself_is_refused() -> None:
    streams = [(Stream(0, StreamKind.COMPUTE, "compute"), [(CODE[ActionKind.F], 0, k, -1, -1, -1) for k in range(2)])]
    base = {"rows": ((0,),), "microbatches": 2, "inputs": ((),), "lines": (), "labels": (), "buckets": ()}
    plan = assemble(base, streams, [[[(0, 1)], []]])
    with pytest.raises(PlanError, match="deadlock"):
        simulate(plan, np.ones(2))


# --- the reference ---


@pytest.mark.parametrize("seed", range(10))
def test_equals_an_event_loop_on_random_programs(seed: int) -> None:
    rng = Random(seed)
    for _ in range(25):
        plan = random_case(rng).plan
        draw: Callable[[], float] = rng.choice([rng.random, lambda: rng.randrange(4) / 2])  # or with ties and zeros
        seconds = [0.0 if KINDS[kind] is ActionKind.FREE else draw() for kind in plan.kind.tolist()]
        steps = rng.choice([2, 3])
        found = simulate(plan, np.asarray(seconds), steps=steps)
        start, end = run(plan, seconds, steps)
        n, last = len(plan), steps - 1
        assert found.start_s.tolist() == [start[0, i] for i in range(n)]
        assert found.end_s.tolist() == [end[0, i] for i in range(n)]
        assert found.late_start_s.tolist() == [start[last, i] for i in range(n)]
        assert found.late_end_s.tolist() == [end[last, i] for i in range(n)]
        final = max(range(n), key=lambda i: end[last, i])
        assert found.step_time_s == end[last, final] - end[last - 1, final]
        assert found.makespan_s == max(end[0, i] for i in range(n))


# --- laws ---


@pytest.mark.parametrize("seed", range(4))
def test_laws_of_random_programs(seed: int) -> None:
    rng = Random(100 + seed)
    for _ in range(10):
        plan = random_case(rng).plan
        seconds = np.asarray([rng.random() for _ in range(len(plan))])
        seconds[kinds(plan, "FREE")] = 0.0
        lowered = lower_plan(plan)
        found = simulate(lowered, seconds)
        assert found.step_time_s >= found.busy_s.max() - 1e-9
        assert 0.0 <= found.bubble_ratio < 1.0
        again = simulate(plan, seconds)
        assert (again.step_time_s, again.end_s.tolist()) == (found.step_time_s, found.end_s.tolist())
        idle = found.step_time_s - found.busy_s
        assert (found.exposed_s().sum(axis=1) <= idle + 1e-9).all()
        quicker = simulate(lowered, np.where(kinds(plan, *KIND_NAMES), seconds, 0.7 * seconds))
        assert quicker.makespan_s <= found.makespan_s  # faster communication never slows
        assert quicker.step_time_s <= found.step_time_s + 1e-9
        path = found.critical_path()
        on_path = sum_of_path(found.lowered, seconds, path)
        assert on_path == pytest.approx(found.makespan_s)


KIND_NAMES = ("F", "B", "BI", "BW", "R", "UPDATE", "FREE")


def sum_of_path(lowered: Lowered, seconds: np.ndarray, path: list) -> float:  # type: ignore[type-arg]
    """The critical path has no gaps: its transactions add up to the makespan."""
    longest = np.zeros(len(lowered))
    np.maximum.at(longest, lowered.of, seconds)
    index = {key: i for i, key in enumerate(rows_and_actions(lowered.plan))}
    return float(sum(longest[lowered.of[index[key]]] for key in path))


@pytest.mark.parametrize(("name", "gains"), [("1f1b", False), ("zb_h2", True)])
def test_without_a_barrier_steps_overlap(name: str, gains: bool) -> None:
    """Row 0 of 1F1B has the first and the last action, so nothing can; ZB-H2 starts the next step in its tail."""
    times = {}
    for sync in Sync:
        plan = build(name, 4, 8, sync=sync).plan
        times[sync] = simulate(plan, unit_seconds(plan)).step_time_s
    assert times[Sync.NONE] == times[Sync.POST_VALIDATION]
    assert (times[Sync.NONE] < times[Sync.GLOBAL_NORM]) == gains


def test_zero_bubble_is_zero_in_the_steady_state_without_a_barrier() -> None:
    plan = build("zbv", 4, 12, 2, sync=Sync.NONE).plan
    found = simulate(plan, unit_seconds(plan))
    assert found.bubble_ratio == pytest.approx(0.0, abs=1e-12)
    barrier = build("zbv", 4, 12, 2).plan
    assert simulate(barrier, unit_seconds(barrier)).bubble_ratio > 0


def test_gathers_at_the_head_follow_the_update_of_their_stage() -> None:
    plan = build("1f1b", 2, 2, dp=2, zero=1).plan
    seconds = unit_seconds(plan)
    seconds[kinds(plan, "ALL_GATHER")] = 10.0
    found = simulate(plan, seconds)
    assert found.makespan_s == 10 + 9
    assert found.step_time_s == 10 + 9
    gather = COMM_KINDS.index(CommKind.GATHER)
    assert found.exposed_s()[:, gather].tolist() == [10, 0]  # row 1 waits for row 0, not for communication


# --- the timeline ---


def test_the_timeline_shows_every_action_and_reads_back() -> None:
    plan = build("zb_h1", 3, 4, dp=2, zero=3).plan
    found = simulate(plan, unit_seconds(plan) + 0.25)
    shown = found.timeline()
    assert sum(1 for _ in shown.events()) == len(plan)
    assert shown.rows == 3
    assert shown.end_s == found.makespan_s
    assert [shown.busy_s(row) for row in range(3)] == pytest.approx(
        [float((unit_seconds(plan) + 0.25)[computes(plan, row)].sum()) for row in range(3)]
    )
    assert Timeline.from_data(shown.to_data()) == shown
    assert shown.shifted(2.0).end_s == shown.end_s + 2.0
    assert all(lane.events[0].action.stage >= 0 for lane in shown.lanes if lane.events)


def computes(plan: Plan, row: int) -> Mask:
    mask = np.zeros(len(plan), np.bool_)
    stream = plan.compute_stream(row)
    mask[plan.start[stream] : plan.start[stream + 1]] = True
    return np.asarray(mask & ~kinds(plan, "FREE"))


def test_picture() -> None:
    plan = build("1f1b", 2, 2).plan
    assert simulate(plan, unit_seconds(plan)).timeline().picture(18) == "  0 0011....aaaa..bbbb\n  1 ..00aaaa11bbbb...."
