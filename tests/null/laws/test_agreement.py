"""Random programs over all directives: the verifier and the reference interpreter agree on every plan of theirs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from piper_core.arch.synthetic import synthetic
from piper_core.directives import OPS
from piper_core.errors import DirectiveError, PlanError
from piper_core.ir.action import format_slots
from piper_core.ir.dag import Dag, training_dag
from piper_core.ir.verify import verify_dag
from piper_core.program.program import Program
from piper_core.schedule import verify_order
from piper_core.schedule.families import get_family
from piper_core.schedule.lower import ChannelRule, Costs, flop_costs, lower
from piper_core.schedule.plan import Plan, expand
from piper_core.schedule.plan_text import format_plan, parse_plan
from piper_core.schedule.verify import verify
from tests.null.laws.corrupt import corrupt
from tests.null.laws.interpreter import fault
from tests.null.laws.programs import program

PROGRAMS = 2200


def quick(dag: Dag) -> Costs:
    """Return costs with which the list scheduler takes its first order: any one will do here."""
    return replace(flop_costs(dag), effort=0)


def verdict(plan: Plan) -> str:
    """Return the verifier's reason, "" where it accepts; the interpreter must accept and refuse the same."""
    refused, against = None, fault(plan)
    try:
        verify(plan)
    except PlanError as error:
        refused = error
    if refused is None:
        assert against is None, f"the verifier accepts what does not run: {against}\n{format_plan(plan)}"
        return ""
    assert against is not None, f"the verifier refuses what runs: {refused}\n{refused.context}\n{format_plan(plan)}"
    lines = refused.context.splitlines()
    assert len(str(refused).splitlines()) == 1
    assert len(lines) <= 10
    assert all("<-- here" in line for line in lines)
    return refused.reason


@pytest.mark.slow
def test_verifier_and_interpreter_agree() -> None:
    programs, edited, used = Counter[str](), Counter[str](), Counter[str]()
    seen: set[int] = set()

    @settings(max_examples=PROGRAMS, phases=[Phase.generate], database=None)
    @given(st.integers(0, 2**62))
    def check(seed: int) -> None:
        rng = Random(seed)
        dag, data = program(rng)
        seen.add(seed)
        try:
            compiled = Program.parse(data).apply(dag)
            plan = lower(compiled, quick(compiled))
        except DirectiveError:
            programs["refused"] += 1
            return
        reason = verdict(plan)
        programs[reason or "accepted"] += 1
        if reason:
            return
        used.update({item["op"] for item in data})
        verify_dag(compiled)
        plans = [plan, expand(plan)] if len(plan.rows[0]) <= 2 else [plan]
        if len(plans) > 1 and rng.random() < 0.2:
            assert not verdict(plans[1])
        if rng.random() < 0.1:
            edited[
                verdict(lower(compiled, quick(compiled), channels=rng.choice([ChannelRule.PAIR, ChannelRule.RANK])))
            ] += 1
        for _ in range(2):
            bad = corrupt(rng, rng.choice(plans))
            edited[verdict(bad)] += 1
            assert parse_plan(format_plan(bad)).same_as(bad)

    check()
    told = f"{len(seen)} programs: {dict(programs)}, with {dict(used)}; edited plans: {dict(edited)}"
    print(told)
    accepted = programs["accepted"]
    assert len(seen) >= 2000, told
    assert accepted >= len(seen) / 2, told
    assert set(programs) <= {"accepted", "refused", "deadlock"}, told  # what is lowered runs, unless rows wait for rows
    assert set(used) == set(OPS), told
    assert min(used.values()) >= accepted / 5, told
    assert edited[""] >= edited.total() / 4, told
    assert edited[""] <= edited.total() * 3 / 4, told
    every = {"deadlock", "mispaired", "incomplete", "duplicate", "use_after_free", "leak", "collective_order",
             "data_dependency"}  # fmt: skip
    assert set(edited) - {""} == every, told


def test_waits_are_implied_where_collectives_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backwards that start with collectives of two kinds: what other reads imply is all that waits do not show; the
    interpreter agrees on edits of such plans."""
    near, far, rows = [[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 2], [1, 3], [4, 6], [5, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]]
    actions = get_family("dualpipev").grid(2, 4, 2).rows
    data: list[dict[str, Any]] = [
        {"op": "split", "filter": {}, "dim_name": "MB", "num_microbatches": 4},
        *({"op": "place", "filter": {"PP": s}, "devices": rows[s in (1, 2)]} for s in range(4)),
        {"op": "shard", "filter": {}, "devices": far, "kind": "context"},
        {"op": "shard", "filter": {}, "devices": near, "kind": "sequence"},
        {"op": "order", "actions": {str(row): format_slots(slots) for row, slots in enumerate(actions)}},
    ]
    plan = lower(Program.parse(data).apply(training_dag(synthetic("dense:4", 4))))
    with monkeypatch.context() as patch:
        patch.setattr(verify_order, "happened_before", None)
        verify(plan)
    rng = Random(0)
    found = Counter(verdict(corrupt(rng, plan)) for _ in range(100))
    assert found["data_dependency"] > 10, found
    assert found[""] > 10, found


def test_interpreter_stands_alone() -> None:
    """It imports the plan's records, and nothing that decides whether a plan runs."""
    for module in ("interpreter", "needs"):
        text = (Path(__file__).parent / f"{module}.py").read_text()
        assert "schedule.verify" not in text
        assert "schedule.lower" not in text
