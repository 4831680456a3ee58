"""Measured timelines have every action of the plan in order; memory is that of the ZeRO stage."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from piper_core.ir.action import ActionKind
from piper_core.runtime.local import LocalWorld
from piper_core.runtime.measure import Peaks, joined, peaks, record
from piper_core.runtime.optimizer import SGD
from piper_core.runtime.program import RankProgram, Training
from piper_core.runtime.steps import INNER
from tests.torch_cpu.runtime.cases import LLAMA, Case, batches, lowering

CASE = Case(LLAMA, "zbv", pp=2, v=2, m=4, dp=2, zero=1)


def run(case: Case, what: Any) -> list[Any]:
    shared, (first, second) = lowering(case, torch.float64), batches(case, 2)

    def work(communicator: Any) -> Any:
        program = RankProgram(shared, communicator.rank, communicator, Training(SGD()))
        program.step(*first)
        return what(program, program.slices(*second))

    return LocalWorld(case.ranks).run(work)


def test_timeline_has_every_action() -> None:
    found = run(CASE, record)
    timeline = joined(found)
    plan = lowering(CASE, torch.float64).compiled.plan
    assert timeline.rows == len(plan.rows)
    expected = {(plan.streams[s].row, str(a)) for s in range(len(plan.streams)) for a in plan.actions(s)}
    inner = {str(kind) for kind in INNER}
    expected = {(row, text) for row, text in expected if not any(kind in text for kind in inner)}
    assert {(lane.row, event.text) for lane, event in timeline.events()} == expected
    for lane in timeline.lanes:
        assert all(a.start_s <= b.start_s for a, b in pairwise(lane.events))
    for row in range(timeline.rows):
        (compute,) = (lane for lane in timeline.row(row) if lane.stream == "compute")
        assert all(a.end_s <= b.start_s for a, b in pairwise(compute.events))
    assert min(event.start_s for _, event in timeline.events()) >= 0
    assert type(timeline).from_data(timeline.to_data()) == timeline


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_memory_between_steps_is_that_of_the_stage(zero: int) -> None:
    """Float64, plain SGD: parameters and gradients alone; ZeRO-3 and 2 keep shards, and buffers of what was in use."""
    case = Case(LLAMA, "1f1b", m=4, dp=4, zero=zero)
    found: list[Peaks] = run(case, peaks)
    program = lowering(case, torch.float64)
    numel = sum(chunk.numel for chunk in program.compiled.dag.chunks)
    whole, shard, slack = 8 * numel, 8 * numel / 4, 20_000
    expected = {0: 2 * whole, 1: 2 * whole + shard, 2: whole + shard, 3: 2 * shard}[zero]
    for each in found:
        buckets = each.kept_bytes - expected
        assert -slack < buckets < (slack if zero < 2 else 5 * 8 * 2048 + slack), (zero, buckets)
        assert each.peak_bytes > each.kept_bytes
        assert max(each.by_action.values()) == each.peak_bytes
        assert any(ActionKind.UPDATE in text for text in each.by_action)


def test_full_recompute_holds_one_layer_at_a_time() -> None:
    """A layer more adds its input to what a step holds, not all that its backward needs."""

    def activations(layers: int, recompute: str) -> int:
        model = replace(LLAMA, name=f"llama-{layers}", layers=layers, hidden=8, heads=2, kv_heads=2, ffn=64, max_seq=64)
        (found,) = run(Case(model, "1f1b", m=1, micro_batch=16, recompute=recompute), peaks)
        return int(found.peak_bytes - found.kept_bytes)

    more = {policy: activations(6, policy) - activations(3, policy) for policy in ("none", "full")}
    assert 0 < 5 * more["full"] < more["none"]
