"""Scores: what they count, and that a step's seconds are all accounted for."""

from __future__ import annotations

import json
from random import Random

import pytest

from piper_core.arch import preset
from profiler.spec import load_cluster
from search.cost import RooflineCost
from search.evaluate import evaluate
from tests.null.simulator.programs import build, random_case

CLUSTER = load_cluster("p4de")
COST = RooflineCost(CLUSTER)


@pytest.mark.parametrize("seed", range(3))
def test_the_breakdown_adds_up_to_the_step(seed: int) -> None:
    rng = Random(seed)
    for _ in range(6):
        compiled = random_case(rng)
        found = evaluate(compiled, COST, CLUSTER.device, seq_len=64, gpus=8)
        if compiled.plan.sync == "global_norm":
            assert sum(found.breakdown.values()) == pytest.approx(found.step_time_s)
        assert min(found.breakdown.values()) >= 0
        assert all(seconds >= 0 for seconds in found.exposed_communication_s.values())
        assert len(found.peak_memory_bytes) == len(compiled.plan.rows)
        json.dumps(found.to_data())


def test_rates() -> None:
    compiled = build("1f1b", 2, 4, dp=2, global_batch=32)
    found = evaluate(compiled, COST, CLUSTER.device, seq_len=64, gpus=4)
    assert found.tokens_per_s_per_gpu == pytest.approx(32 * 64 / found.step_time_s / 4)
    flops = sum(chunk.flops for chunk in compiled.dag.chunks) / 64
    assert found.model_tflops_per_gpu == pytest.approx(found.tokens_per_s_per_gpu * flops / 1e12)
    assert found.mfu == pytest.approx(found.model_tflops_per_gpu * 1e12 / CLUSTER.device.matmul_flops)
    assert found.worst_row_bytes == max(found.peak_memory_bytes)
    model = preset("llama9b")
    other = evaluate(compiled, COST, CLUSTER.device, seq_len=64, gpus=4, architecture=model)
    assert other.mfu * flops == pytest.approx(found.mfu * model.model_flops_per_token(64))


def test_recompute_costs_time_and_does_not_count_in_mfu() -> None:
    plain, full = (
        evaluate(build("1f1b", 2, 4, recompute=policy, global_batch=512), COST, CLUSTER.device, seq_len=64, gpus=2)
        for policy in (None, "full")
    )
    assert full.step_time_s > plain.step_time_s
    assert full.mfu * full.step_time_s == pytest.approx(plain.mfu * plain.step_time_s)
