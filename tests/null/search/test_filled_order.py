"""A family's order with weight gradients where rows would wait: what stays as it was, and what is gained."""

from __future__ import annotations

from dataclasses import replace

import pytest

from piper_core.ir.action import Action, ActionKind, Slot
from piper_core.schedule.families import FAMILIES
from piper_core.schedule.grid import Grid, Layout
from search.direct.order import order_of
from search.filled_order import StageWork, filled
from search.list_order import LONGEST, LONGEST_FILLED, list_grids, orderable
from search.space import Configuration
from tests.null.search.spaces import DENSE, case

F, B, BI, BW = ActionKind.F, ActionKind.B, ActionKind.BI, ActionKind.BW
CUT = sorted(name for name, family in FAMILIES.items() if family.splits_backward)


def work(f: float = 1.0, bi: float = 1.0, bw: float = 1.0, *, stash: float = 1.0) -> StageWork:
    alone = {F: f, B: bi + bw, BI: bi, BW: bw}
    return StageWork(alone, alone, 1.0, stash)


def fill(name: str, p: int, m: int, *, room: float = 1e9, late: int = 0, wait: float = 0.5, hop: float = 0.0) -> Grid:
    v = 2 if FAMILIES[name].layout is Layout.V else 1
    stages = p if FAMILIES[name].layout is Layout.BIDIRECTIONAL else p * v
    grid = FAMILIES[name].grid(p, m, v)
    return filled(grid, [work()] * stages, hop, [room] * p, late=late, wait=wait)


def family(name: str, p: int, m: int) -> Grid:
    return FAMILIES[name].grid(p, m, 2 if FAMILIES[name].layout is Layout.V else 1)


def inward(row: tuple[Slot, ...]) -> list[list[tuple[int, bool, int | None]]]:
    """Return a row's forwards and backwards in order, whole or not."""
    return [[(a.stage, a.kind is F, a.microbatch) for a in slot] for slot in row if slot[0].kind is not BW]


@pytest.mark.parametrize("late", [0, 2, 99])
@pytest.mark.parametrize("name", CUT)
def test_forwards_and_backwards_keep_their_order_and_each_weight_gradient_comes_once(name: str, late: int) -> None:
    for p, m in ((2, 8), (4, 10), (4, 16)):
        if name == "dualpipe" and m < 4 * p:
            continue
        before, after = family(name, p, m), fill(name, p, m, late=late, hop=0.3)
        for old, new in zip(before.rows, after.rows, strict=True):
            assert inward(old) == inward(new)
            actions = [a for slot in new for a in slot]
            assert len({*actions}) == len(actions)
            parts = {(a.stage, a.microbatch): i for i, a in enumerate(actions) if a.kind is BI}
            weights = {(a.stage, a.microbatch): i for i, a in enumerate(actions) if a.kind is BW}
            assert parts.keys() == weights.keys()
            assert all(parts[each] < weights[each] for each in parts)
            grouped = [any(a.kind is BI for a in slot) for slot in new if len(slot) > 1]
            assert sum(grouped) == min(late, len(grouped)), "the last ones"
            assert grouped == sorted(grouped)


def test_a_row_that_would_wait_computes_a_weight_gradient_that_is_due() -> None:
    """Two rows: after its first backward, the first waits 2.5 for the next, and has a weight gradient to compute."""
    rows = (
        tuple((Action(0, kind, i),) for kind, i in [(F, 0), (F, 1), (BI, 0), (BI, 1), (BW, 0), (BW, 1)]),
        tuple((Action(1, kind, i),) for kind, i in [(F, 0), (BI, 0), (BW, 0), (F, 1), (BI, 1), (BW, 1)]),
    )
    found = filled(Grid(rows), [work(), work(f=0.5, bi=3.0)], 0.0, [9.0, 9.0], late=0, wait=1.0)
    assert [str(slot[0]) for slot in found.rows[0]] == ["0F0", "0F1", "0BI0", "0BW0", "0BI1", "0BW1"]
    assert [str(slot[0]) for slot in found.rows[1]] == ["1F0", "1BI0", "1F1", "1BI1", "1BW0", "1BW1"]
    patient = filled(Grid(rows), [work(), work(f=0.5, bi=3.0)], 0.0, [9.0, 9.0], late=0, wait=5.0)
    assert [str(slot[0]) for slot in patient.rows[0]] == ["0F0", "0F1", "0BI0", "0BI1", "0BW0", "0BW1"]


def test_memory_asks_for_weight_gradients_before_forwards() -> None:
    roomy, tight = fill("zb_h1", 4, 12), fill("zb_h1", 4, 12, room=4.0)
    assert peak(roomy) > 4
    assert peak(tight) == 4


def peak(grid: Grid) -> float:
    """Return the most that a row holds, of one byte a microbatch and stage until its weight gradient."""
    most = 0.0
    for row in grid.rows:
        held = 0.0
        for slot in row:
            held += sum((a.kind is F) - (a.kind in (B, BW)) for a in slot)
            most = max(most, held)
    return most


def test_stages_whose_backward_comes_first_are_done_first() -> None:
    """So that their gradients are reduced while the row still works."""
    for row in fill("dualpipev", 4, 16, late=99).rows:
        last = {slot[0].stage: i for i, slot in enumerate(row) if slot[0].kind is BW}
        assert last[max(last)] < last[min(last)]


def test_a_deep_pipeline_with_memory_left_is_quicker_than_its_family() -> None:
    config = Configuration(8, 2, 1, 1, "dualpipev", 2, 0, 1, 32, "none", True, "balanced")
    it = case(replace(DENSE, layers=32), "p4de", 16, 32, 512)
    direct = it.problem.direct
    plain = direct.assess(config).score
    found = it.problem.score(replace(config, order="list"))
    assert found.fits == "yes"
    assert found.step_time_s < 0.99 * plain.step_time_s
    grids = list_grids(config, it.problem.bounds)
    scores = [direct.assess(config, order_of(grid, 16, 32)).score.step_time_s for grid in grids]
    assert found.step_time_s == min(scores)


def test_long_steps_are_filled_and_no_more() -> None:
    it = case(DENSE, "p4d", 8, 2048, 512)
    config = Configuration(2, 2, 2, 1, "zbv", 2, 1, 1, 1024, "none", True, "balanced")
    assert LONGEST < 3 * config.stages * config.num_microbatches < LONGEST_FILLED
    assert orderable(config)
    assert len(list_grids(config, it.problem.bounds)) == 2
    assert not orderable(replace(config, schedule="interleaved_1f1b"))
    assert not orderable(replace(config, num_microbatches=8192))
