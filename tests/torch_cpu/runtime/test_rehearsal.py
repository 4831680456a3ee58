"""A strategy's double keeps what makes the strategy, fits into a moment, and shows a wrong result."""

from __future__ import annotations

from dataclasses import replace

import pytest

from piper_core.arch.presets import preset
from piper_core.directives import Order
from piper_core.errors import ConfigError, RunError
from piper_core.ir.action import ActionKind
from piper_core.program.program import Program
from piper_core.program.strategy import Strategy
from piper_core.runtime import rehearsal
from piper_core.runtime.rehearsal_proxy import proxy
from piper_core.schedule.compile import compile_program
from piper_core.schedule.families import FAMILIES
from piper_core.schedule.plan import CODE
from profiler.spec import load_cluster
from search.filled_order import StageWork, filled
from search.predict import predict
from search.request import Request


def strategy(model: str, **asked: object) -> Strategy:
    request = Request(architecture=preset(model), cluster=load_cluster("p4de"), **asked)  # type: ignore[arg-type]
    return predict(request, proved=False).strategy


MIXTURE = {"pp": 4, "dp": 16, "ep": 16, "tp": 2, "num_microbatches": 16, "schedule": "dualpipev", "zero": 1}


def test_the_double_keeps_what_makes_the_strategy() -> None:
    given = strategy("qwen3-30b-a3b", recompute="full", **MIXTURE)
    double = proxy(given, preset("qwen3-30b-a3b"))
    compiled = compile_program(double.strategy.program, double.base, double.strategy.header.world)
    plan = compiled.plan
    assert len(plan.rows) == 4
    assert sorted(rank for row in plan.rows for rank in row) == list(range(16))  # dp 2 with experts inside, tp 2
    assert compiled.dag.stages == 8
    assert double.architecture.layers == 8
    assert double.architecture.experts == 4
    kinds = set(plan.kind.tolist())
    wanted = (ActionKind.BI, ActionKind.BW, ActionKind.REDUCE_SCATTER, ActionKind.ALL_GATHER)
    assert {CODE[kind] for kind in wanted} <= kinds
    assert {"op": "recompute", "filter": {}, "policy": "full"} in double.strategy.program.to_data()
    assert any("(" in str(text) for text in double.strategy.program.to_data()[-1]["actions"].values())
    assert len(set(compiled.dag.buckets)) > 8


def test_a_rehearsal_passes_and_a_wrong_gradient_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    given = strategy("llama9b", pp=2, dp=4, num_microbatches=8, schedule="1f1b", zero=2)
    found = rehearsal.rehearse(given, preset("llama9b"))
    assert found.ranks == 4
    assert found.error < 1e-12
    assert "a rehearsal, not a run at size: 4 of 8 ranks, 2 of 36 layers" in str(found)
    monkeypatch.setattr("piper_core.runtime.optimizer.Clip.scale", lambda *_: 0.5)  # of the ranks' gradients alone
    with pytest.raises(RunError, match=r"rehearsal: the .* differs from one process's in step"):
        rehearsal.rehearse(given, preset("llama9b"))


def test_overlap_groups_that_leave_weight_gradients_for_later_give_right_gradients() -> None:
    """The order of a family, filled by the search."""
    given = strategy("llama9b", pp=2, dp=1, tp=2, num_microbatches=8, schedule="dualpipev")
    family = FAMILIES["dualpipev"].grid(2, 8, 2)
    seconds = dict.fromkeys((ActionKind.F, ActionKind.B, ActionKind.BI, ActionKind.BW), 1.0)
    grid = filled(family, [StageWork(seconds, seconds, 1.0, 1.0)] * 4, 0.1, [9.0, 9.0], late=3, wait=0.5)
    assert any({a.kind for a in slot} == {ActionKind.F, ActionKind.BI} for row in grid.rows for slot in row)
    directives = tuple(d for d in given.program.directives if not isinstance(d, Order))
    program = Program((*directives, Order(actions=tuple(enumerate(grid.rows)))))
    assert rehearsal.rehearse(replace(given, program=program), preset("llama9b")).error < 1e-12


def test_as_many_steps_as_asked_for_from_a_seed() -> None:
    given = strategy("llama9b", pp=2, dp=1, num_microbatches=2, schedule="1f1b")
    found, other = (rehearsal.rehearse(given, preset("llama9b"), steps=3, seed=seed) for seed in (0, 5))
    assert (found.steps, len(found.losses)) == (3, 3)
    assert found.losses != other.losses


def test_what_cannot_be_shrunk() -> None:
    given = strategy("llama9b", pp=2, dp=4, num_microbatches=8)
    data = [each for each in given.program.to_data() if each["op"] != "stage"]
    with pytest.raises(ConfigError, match="a rehearsal needs one stage directive, found 0; use --ranks real"):
        proxy(replace(given, program=Program.parse(data)), preset("llama9b"))
