"""Contention: against the reference on random plans, by hand, its laws, and the compiled loop against the plain one."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pytest

from piper_core.errors import DirectiveError, InfeasibleError, PlanError
from piper_core.ir.action import ActionKind
from piper_core.program.program import Program
from piper_core.schedule.compile import compile_program
from piper_core.schedule.plan import KINDS, Plan
from search.simulator import loops, lower_plan, simulate
from tests.null.laws.programs import program
from tests.null.simulator.programs import build, random_case
from tests.null.simulator.reference import run
from tests.null.simulator.test_simulate import kinds, unit_seconds

REFUSED = (DirectiveError, PlanError, InfeasibleError)


def random_plan(rng: Random) -> Plan:
    """Return the plan of a random program that compiles: of a family, or over all directives."""
    if rng.random() < 0.5:
        return random_case(rng).plan
    while True:
        dag, data = program(rng)
        try:
            return compile_program(Program.parse(data), dag).plan
        except REFUSED:
            continue


def random_seconds(rng: Random, plan: Plan) -> list[float]:
    """Return durations with ties and zeros, or without."""
    draw: Callable[[], float] = rng.choice([rng.random, lambda: rng.randrange(4) / 2])
    return [0.0 if KINDS[kind] is ActionKind.FREE else draw() for kind in plan.kind.tolist()]


def check_against_reference(rng: Random) -> bool:
    """Compare one random plan with the reference; return whether anything contended."""
    plan = random_plan(rng)
    seconds, steps = random_seconds(rng, plan), rng.choice([2, 3])
    slowdown = rng.choice([1.0, 1.126, 2.0])
    found = simulate(plan, np.asarray(seconds), steps=steps, slowdown=slowdown)
    start, end = run(plan, seconds, steps, slowdown)
    n, last = len(plan), steps - 1
    same = pytest.approx if slowdown > 1.0 else list  # without contention, to the last bit
    assert found.start_s.tolist() == same([start[0, i] for i in range(n)])
    assert found.end_s.tolist() == same([end[0, i] for i in range(n)])
    assert found.late_start_s.tolist() == same([start[last, i] for i in range(n)])
    assert found.late_end_s.tolist() == same([end[last, i] for i in range(n)])
    return bool(found.contention_s.any())


@pytest.mark.parametrize("seed", range(4))
def test_equals_the_reference_on_random_plans(seed: int) -> None:
    """A sample; ``python -m tests.benchmarks simulate_reference`` runs 1,000."""
    rng = Random(seed)
    contended = sum(check_against_reference(rng) for _ in range(15))
    assert contended >= 2


def test_by_hand() -> None:
    """Two rows, ZeRO-1: the gathers of stage 0 and the reductions overlap nothing but what is said here."""
    plan = build("gpipe", 1, 2, dp=2, zero=2, bucket=None).plan
    seconds = unit_seconds(plan)  # 0F0 0F1 0B0 0B1, F = 1, B = 2
    seconds[kinds(plan, "REDUCE_SCATTER")] = 1.0
    plain, slow = simulate(plan, seconds), simulate(plan, seconds, slowdown=2.0)
    assert plain.makespan_s == 7.0  # the reduction of microbatch 0 beside 0B1, that of microbatch 1 after it
    # 0B1 has 2 to do, the reduction 1: at half speed both until 2 later, then 0B1 has 1 left
    assert slow.makespan_s == 8.0
    assert slow.contention_s.tolist() == [1.0]
    assert slow.busy_s.tolist() == [plain.busy_s[0] + 1.0]


@pytest.mark.parametrize("seed", range(2))
def test_contention_never_quickens_and_at_most_multiplies(seed: int) -> None:
    rng = Random(seed)
    for _ in range(15):
        plan = random_plan(rng)
        seconds = np.asarray(random_seconds(rng, plan))
        lowered = lower_plan(plan)
        plain = simulate(lowered, seconds)
        last = plain
        for slowdown in (1.05, 1.3, 2.0):
            found = simulate(lowered, seconds, slowdown=slowdown)
            assert (found.end_s >= plain.end_s - 1e-9).all()
            assert (found.end_s <= slowdown * plain.end_s + 1e-9).all()
            lasted = found.late_end_s - found.late_start_s
            assert (lasted <= slowdown * (plain.late_end_s - plain.late_start_s) + 1e-9).all()
            last = found
        assert last.step_time_s >= last.busy_s.max() - 1e-9


def test_nothing_that_overlaps_nothing_changes() -> None:
    plan = build("1f1b", 4, 8).plan  # messages alone
    seconds = unit_seconds(plan) + 0.125
    plain, slow = simulate(plan, seconds), simulate(plan, seconds, slowdown=3.0)
    assert slow.end_s.tolist() == plain.end_s.tolist()
    assert not slow.contention_s.any()


def test_compiled_loops_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    rng = Random(7)
    cases = [(plan, np.asarray(random_seconds(rng, plan))) for plan in (random_plan(rng) for _ in range(12))]
    monkeypatch.setattr(loops, "_compiled", None)
    monkeypatch.setattr(loops, "PATIENCE", 10**12)
    plain = [simulate(plan, seconds, slowdown=1.25) for plan, seconds in cases]
    waits = [each.exposed_s() for each in plain]
    monkeypatch.setattr(loops, "PATIENCE", -1)
    monkeypatch.setattr(loops, "COLD", -1)
    compiled = [simulate(plan, seconds, slowdown=1.25) for plan, seconds in cases]
    assert loops._compiled is not None
    assert any(each.any() for each in waits)
    for a, b, wait in zip(plain, compiled, waits, strict=True):
        assert b.exposed_s().tolist() == wait.tolist()
        assert (a.start_s.tolist(), a.late_end_s.tolist(), a.step_time_s) == (
            b.start_s.tolist(), b.late_end_s.tolist(), b.step_time_s,
        )  # fmt: skip
