"""Memory along the order of compute: known peaks, what the ZeRO stages divide, nothing negative, nothing left."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from piper_core.arch.chunk import ModelChunks
from piper_core.arch.synthetic import synthetic
from piper_core.ir.action import ActionKind
from piper_core.names import Phase
from piper_core.schedule.compile import Compiled
from piper_core.schedule.families import get_family
from piper_core.schedule.plan import KINDS
from piper_core.schedule.span import evaluate
from profiler.spec import load_cluster
from search.cost import RooflineCost
from search.cost.memory import RESERVED_GAP, TIGHT_GAPS, USABLE, Memory, RowMemory, levels, memory
from search.cost.price import node_seconds
from search.simulator import Simulation, action_seconds, simulate
from tests.null.simulator.programs import build, random_case

CLUSTER = load_cluster("p4de")
COST = RooflineCost(CLUSTER)
DEVICE = CLUSTER.device
GATHERED, REDUCED, ACTIVATIONS, BUFFERS, WORKSPACE = range(5)
UNIT = {Phase.F: 1.0, Phase.B: 2.0, Phase.BI: 1.0, Phase.BW: 1.0}


def run(compiled: Compiled) -> Simulation:
    dag, plan = compiled.dag, compiled.plan
    return simulate(plan, action_seconds(dag, plan, node_seconds(dag, COST)))


def peaks_of(compiled: Compiled) -> Memory:
    return memory(compiled.dag, run(compiled), DEVICE)


def kept(stages: int, layers: int = 8) -> ModelChunks:
    """A dense model whose BW needs all that F saved, so that bytes count activations."""
    table = synthetic(f"dense:{layers}", stages)
    return replace(table, chunks=tuple(replace(chunk, stash=chunk.saved) for chunk in table.chunks))


def stage_bytes(table: ModelChunks) -> dict[int, float]:
    """Bytes that one microbatch of one sequence saves on each stage."""
    found: dict[int, float] = {}
    for chunk in table.chunks:
        stage = dict(chunk.tags)["PP"]
        found[stage] = found.get(stage, 0.0) + chunk.saved.sharded + chunk.saved.replicated
    return found


# --- activations ---


@pytest.mark.parametrize(("name", "p", "m"), [("gpipe", 4, 6), ("1f1b", 4, 6), ("1f1b", 4, 2), ("zb_h1", 4, 8)])
def test_peaks_of_one_stage_a_row(name: str, p: int, m: int) -> None:
    table = kept(p)
    compiled = build(name, p, m, model=table)
    found = levels(compiled.dag, run(compiled))
    alive = {"gpipe": [m] * p, "1f1b": [min(m, p - r) for r in range(p)], "zb_h1": [p] * p}[name]
    for row, held in enumerate(alive):
        assert found[row][ACTIVATIONS].max() == pytest.approx(held * stage_bytes(table)[row])


@pytest.mark.parametrize("name", ["zbv", "v_half", "v_min", "interleaved_1f1b", "zb_h2", "gpipe"])
def test_peaks_equal_those_of_the_grid(name: str) -> None:
    p, m = 4, 12
    v = 2 if 2 in get_family(name).virtual_stages(p) else 1
    table = kept(p * v, 16)
    compiled = build(name, p, m, v, model=table)
    span = evaluate(get_family(name).grid(p, m, v), UNIT, weight=stage_bytes(table))
    found = levels(compiled.dag, run(compiled))
    assert [row[ACTIVATIONS].max() for row in found] == pytest.approx(list(span.peak_microbatches))


def test_zbv_holds_as_much_as_1f1b_on_its_first_row() -> None:
    p, m = 4, 12
    table = kept(2 * p, 16)
    found = levels(*with_run(build("zbv", p, m, 2, model=table)))
    each = stage_bytes(table)[1]  # a stage of layers alone
    assert found[1][ACTIVATIONS].max() == pytest.approx(2 * p * each)


def with_run(compiled: Compiled):  # type: ignore[no-untyped-def]
    return compiled.dag, run(compiled)


def test_recompute_keeps_inputs_and_holds_one_layer_at_a_time() -> None:
    plain, full, selective = (
        levels(*with_run(build("1f1b", 2, 4, recompute=policy)))[0] for policy in (None, "full", "selective")
    )
    assert full[ACTIVATIONS].max() < selective[ACTIVATIONS].max() < plain[ACTIVATIONS].max()
    assert full[WORKSPACE].max() > plain[WORKSPACE].max()
    chunks = [c for c in synthetic("dense:8", 2).chunks if dict(c.tags)["PP"] == 0]
    inputs = sum(c.saved_full.replicated for c in chunks if c.region == "attention")  # the block behind keeps nothing
    ids = chunks[0].saved.replicated
    assert full[ACTIVATIONS].max() == pytest.approx(2 * (inputs + ids))


def test_tensor_and_sequence_parallelism_divide_activations() -> None:
    one, tensor, sequence = (
        levels(*with_run(build("1f1b", 1, 1, **options)))[0][ACTIVATIONS].max()
        for options in ({}, {"tp": 2}, {"tp": 2, "sequence": True})
    )
    assert sequence == pytest.approx(one / 2)
    assert sequence < tensor < one


def test_only_the_stash_lasts_from_bi_to_bw() -> None:
    compiled = build("zb_h1", 2, 2)
    plan, dag = compiled.plan, compiled.dag
    found = levels(dag, run(compiled))[0][ACTIVATIONS]
    stage = [c for c in dag.chunks if dict(c.tags)["PP"] == 0]
    stash = sum(c.stash.sharded + c.stash.replicated for c in stage)
    low = int(plan.start[plan.compute_stream(0)])
    words = [str(a) for a in plan.actions(plan.compute_stream(0))]
    assert low == 0
    between = found[3 * words.index("0BW1")] if words[-2] == "0BW1" else found[3 * (len(words) - 2)]
    assert between == pytest.approx(stash)


# --- what always holds ---


@pytest.mark.parametrize("seed", range(4))
def test_never_negative_and_back_to_the_base_after_the_step(seed: int) -> None:
    rng = Random(seed)
    for _ in range(12):
        compiled = random_case(rng)
        for simulation in (run(compiled), simulate(compiled.plan, np.zeros(len(compiled.plan)))):
            for row in levels(compiled.dag, simulation):
                scale = row.max() + 1.0
                assert row.min() >= -1e-9 * scale
                assert abs(row[:, -1]).max() <= 1e-9 * scale


def test_same_answer_twice() -> None:
    a, b = (peaks_of(build("zbv", 2, 4, 2, dp=2, zero=3, bucket=1, recompute="full")) for _ in range(2))
    assert a == b


def test_the_peak_is_at_an_action_of_its_row() -> None:
    compiled = build("1f1b", 4, 8)
    plan = compiled.plan
    for row, found in enumerate(peaks_of(compiled).rows):
        stream = plan.compute_stream(row)
        assert plan.start[stream] <= found.peak_at < plan.start[stream + 1]
        assert KINDS[plan.kind[found.peak_at]] in (ActionKind.F, ActionKind.B)
        assert found.peak == pytest.approx(sum(found.breakdown().values()))


# --- parameters, gradients, optimiser ---


def big(zero: int, dp: int = 4, **options: object) -> Compiled:
    """A model whose parameters weigh more than its activations."""
    table = synthetic("dense:8", 2, hidden=512, seq_len=16)
    return build("1f1b", 2, 4, model=table, dp=dp, zero=zero, bucket=1, **options)


def test_what_each_zero_stage_divides() -> None:
    rows = [peaks_of(big(zero)).rows[0] for zero in range(4)]
    numel = rows[0].optimizer / 12
    shard = numel / 4
    assert [row.optimizer for row in rows] == pytest.approx([12 * numel] + [12 * shard] * 3)
    assert [row.parameters for row in rows[:3]] == pytest.approx([2 * numel] * 3)
    assert 2 * shard < rows[3].parameters < 2 * numel
    assert [row.gradients for row in rows[:2]] == pytest.approx([4 * numel] * 2)
    assert 4 * shard <= rows[3].gradients <= rows[2].gradients <= 4 * shard + 2 * 2 * numel
    assert numel == pytest.approx(sum(c.numel for c in big(0).dag.chunks if dict(c.tags)["PP"] == 0))


def test_doubling_dp_halves_the_optimiser_under_zero_1_only() -> None:
    plain = [peaks_of(big(0, dp)).rows[0].optimizer for dp in (2, 4)]
    sharded = [peaks_of(big(1, dp)).rows[0].optimizer for dp in (2, 4)]
    assert plain[0] == plain[1]
    assert sharded[0] == pytest.approx(2 * sharded[1])


def test_zero_2_can_need_more_than_zero_1() -> None:
    """Over two ranks, half the accumulated gradients and a whole stage's in compute dtype: nothing gained."""
    table = synthetic("dense:8", 2, hidden=512, seq_len=16)
    one, two = (peaks_of(build("1f1b", 2, 4, model=table, dp=2, zero=zero)).rows[0] for zero in (1, 2))
    assert two.gradients >= one.gradients


def test_gathered_buckets_live_until_they_are_freed() -> None:
    """With a whole stage in one bucket, and one gather ahead, two whole copies beside the shard at most."""
    table = synthetic("dense:8", 2, hidden=512, seq_len=16)
    for prefetch in (0, 1):
        compiled = build("1f1b", 2, 4, model=table, dp=4, zero=3, prefetch=prefetch)
        numel = sum(c.numel for c in table.chunks if dict(c.tags)["PP"] == 0)
        assert levels(compiled.dag, run(compiled))[0][GATHERED].max() == pytest.approx(2 * numel * (1 + prefetch))


def test_experts_are_divided_by_their_own_groups() -> None:
    whole, divided = (build("1f1b", 2, 2, model="moe:8", dp=4, experts=experts) for experts in (False, True))
    a, b = (peaks_of(compiled).rows[0].parameters for compiled in (whole, divided))
    experts = sum(p.numel for c in whole.dag.chunks for p in c.parameters if p.expert and dict(c.tags)["PP"] == 0)
    assert a - b == pytest.approx(2 * experts * 3 / 4)


def test_receives_are_posted_as_far_ahead_as_the_plan_allows() -> None:
    """A fast first row fills the buffers of a slow second one: one for each consumer ahead."""
    message = 64 * 64 * 2
    for ahead in (0, 1, 3):
        compiled = build("gpipe", 2, 8, look_ahead=ahead)
        plan = compiled.plan
        seconds = np.where(plan.stage == 1, 1.0, 0.1) * (plan.kind == KINDS.index(ActionKind.F))
        found = levels(compiled.dag, simulate(plan, seconds))[1][BUFFERS]
        forwards = found[: 3 * 8]
        assert forwards.max() == message * ahead


# --- the verdict ---


@pytest.mark.parametrize(
    ("lasting", "passing", "verdict"),
    [
        (0.5, 0.0, "yes"),
        (USABLE - 0.001, 0.0, "yes"),
        (USABLE + 0.001, 0.0, "no"),
        (0.5, (USABLE - 0.5) / (1 + TIGHT_GAPS[1]) - 0.001, "yes"),
        (0.5, (USABLE - 0.5) / (1 + TIGHT_GAPS[1]) + 0.001, "close"),
        (0.5, (USABLE - 0.5) / (1 + TIGHT_GAPS[0]) - 0.001, "close"),
        (0.5, (USABLE - 0.5) / (1 + TIGHT_GAPS[0]) + 0.001, "no"),
    ],
)
def test_verdict(lasting: float, passing: float, verdict: str) -> None:
    """What stays leaves no gaps in the allocator's blocks; what comes and goes does, more or less."""
    capacity = 80e9
    gap = RESERVED_GAP * passing * capacity
    row = RowMemory(lasting * capacity, 0, 0, passing * capacity, 0, 0, 0, gap, 0)
    found = Memory((replace(row, parameters=1.0), row), capacity)
    assert found.fits == verdict
    assert found.worst == 1
    assert found.margin_bytes == pytest.approx((1 - lasting - passing * (1 + RESERVED_GAP)) * capacity)
