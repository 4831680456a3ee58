"""The verifier against real messages: 50 plans, good and bad, on blocking sends and receives between processes."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from random import Random

import pytest

from piper_core.errors import DirectiveError, PlanError
from piper_core.names import Sync
from piper_core.program.program import Program
from piper_core.schedule.lower import ChannelRule, lower
from piper_core.schedule.plan import Plan
from piper_core.schedule.plan_text import format_plan
from piper_core.schedule.verify import verify
from tests.null.laws.corrupt import corrupt
from tests.null.laws.programs import program
from tests.null.laws.test_pipelines import build
from tests.torch_cpu.gloo_rows import ROWS, verdicts

FAMILIES = (
    ("1f1b", 4, 6, 1),
    ("gpipe", 3, 4, 1),
    ("interleaved_1f1b", 4, 8, 2),
    ("interleaved_1f1b", 3, 4, 3),
    ("zb_h1", 4, 6, 1),
    ("zb_h2", 3, 7, 1),
    ("zbv", 2, 5, 2),
    ("zbv", 3, 6, 2),
    ("zbv", 4, 8, 2),
    ("v_half", 4, 8, 2),
    ("v_min", 3, 7, 2),
    ("dualpipev", 3, 6, 2),
    ("dualpipev", 4, 9, 2),
    ("dualpipe", 2, 4, 1),
    ("dualpipe", 4, 8, 1),
)
"""(family, p, m, v)."""


def reason(plan: Plan) -> str:
    try:
        verify(plan)
    except PlanError as error:
        return error.reason
    return "ok"


def plans() -> list[tuple[str, Plan]]:
    """Return 50 plans without collectives, with what the verifier says: ok, mispaired or deadlock."""
    found: list[tuple[str, Plan]] = []
    for family, p, m, v in FAMILIES:
        dag, made = build(family, p, m, v, {})
        compiled = made.apply(replace(dag, sync=Sync.NONE))
        for rule in ChannelRule:
            plan = lower(compiled, channels=rule)
            if not any(line.label == "reduce" for line in plan.lines):
                found.append((reason(plan), plan))
    wanted = {"ok": 22, "mispaired": 14, "deadlock": 14}
    kept = {word: [plan for verdict, plan in found if verdict == word][:limit] for word, limit in wanted.items()}
    rng = Random(0)
    while any(len(kept[word]) < wanted[word] for word in wanted):
        dag, data = program(rng)
        data = [item for item in data if item["op"] not in ("replicate", "shard")]
        try:
            plan = lower(Program.parse(data).apply(replace(dag, sync=Sync.NONE)))
        except DirectiveError:
            continue
        if len(plan.rows) == 1 or len(plan.rows) > ROWS or any(hasattr(line, "rows") for line in plan.lines):
            continue
        plan = corrupt(rng, plan)
        word = reason(plan)
        if word in wanted and len(kept[word]) < wanted[word]:
            kept[word].append(plan)
    return [(word, plan) for word in wanted for plan in kept[word]]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
def test_verifier_agrees_with_real_messages(tmp_path: Path) -> None:
    before = set(multiprocessing.active_children())
    chosen = plans()
    assert len(chosen) == 50
    real = verdicts([format_plan(plan) for _, plan in chosen], tmp_path, quiet_s=2.0, batch=10)
    mispaired = 0
    for i, ((said, plan), happened) in enumerate(zip(chosen, real, strict=True)):
        told = f"plan {i}: the verifier says {said}, the processes {happened}\n{format_plan(plan)}"
        if said == "mispaired":  # a message that meets the wrong receive, or none, in which case its row waits for ever
            assert happened != "ok", told
            mispaired += happened == "mispaired"
        else:
            assert happened == said, told
    assert mispaired >= 10
    assert set(multiprocessing.active_children()) <= before
