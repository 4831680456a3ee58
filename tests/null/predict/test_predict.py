"""Predictions: the same by request, by file and by search; laws of what they say."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from piper_core.errors import ConfigError
from piper_core.names import Sync
from piper_core.program.strategy import dump, load
from profiler.spec import load_cluster
from search.candidate import Score
from search.engine import Problem
from search.predict import Prediction, layers_of, predict, predict_strategy
from search.report.breakdown import show_prediction
from search.request import Kernels, Request
from search.space import Configuration
from tests.null.search.alike import differences
from tests.null.search.spaces import DENSE, MOE

CLUSTER = load_cluster("p4de")


def run(architecture: Any = DENSE, **fields: Any) -> Prediction:
    return predict(Request(architecture, CLUSTER, **({"gpus": 8, "seq_len": 512, "global_batch": 64} | fields)))


CASES: list[dict[str, Any]] = [
    {},
    {"pp": 2, "zero": 1, "schedule": "zb_h1"},
    {"pp": 2, "tp": 2, "sequence_parallel": True, "recompute": "full", "virtual_stages": 2, "zero": 2},
    {"pp": 4, "schedule": "dualpipev", "micro_batch": 2},
    {"tp": 4, "zero": 3, "recompute": "none"},
]


@pytest.mark.parametrize("fields", CASES)
def test_equals_what_the_search_says(fields: dict[str, Any]) -> None:
    found = run(**fields)
    assert found.config is not None
    score = Problem(DENSE, CLUSTER, 8, 64, 512).score(found.config)
    assert found.score.step_time_s == score.step_time_s
    assert not differences(asdict(found.score), asdict(score))


MORE: list[dict[str, Any]] = [
    *CASES,
    {"cp": 2, "recompute": "selective"},
    {"pp": 2, "cp": 2, "tp": 2, "sequence_parallel": True, "zero": 1, "recompute": "2"},
    {"architecture": MOE, "ep": 4, "pp": 2, "recompute": "1", "zero": 1},
    {"pp": 2, "layers": (3, 7), "bucket_mib": 0},
    {"pp": 2, "sync": Sync.POST_VALIDATION, "schedule": "zbv"},
]


@pytest.mark.parametrize("fields", MORE)
def test_a_file_says_the_same(fields: dict[str, Any], tmp_path: Path) -> None:
    found = run(**fields)
    header = replace(found.strategy.header, model="dense:10")  # test models have no name that a file can give
    dump(replace(found.strategy, header=header), tmp_path / "a.yaml")
    read = load(tmp_path / "a.yaml")
    assert read.program == found.strategy.program
    assert (read.header.mesh, read.header.sync) == (found.strategy.header.mesh, found.strategy.header.sync)


def test_a_preset_by_file(tmp_path: Path) -> None:
    from piper_core.arch.presets import preset

    found = run(preset("piper-1b"), pp=2, ep=2, zero=1)
    dump(found.strategy, tmp_path / "a.yaml")
    again = predict_strategy(load(tmp_path / "a.yaml"))
    assert again.score == found.score
    assert again.config is None
    other = predict_strategy(load(tmp_path / "a.yaml"), load_cluster("p5"))
    assert other.score.step_time_s < found.score.step_time_s
    kernels = Kernels(attention="unfused", norm="unfused")
    slower = predict_strategy(load(tmp_path / "a.yaml"), kernels=kernels)
    assert slower.score == run(preset("piper-1b"), pp=2, ep=2, zero=1, kernels=kernels).score
    synthetic = replace(found.strategy, header=replace(found.strategy.header, model="moe:16"))
    with pytest.raises(ConfigError, match="synthetic, and has no kernels"):
        predict_strategy(synthetic, kernels=kernels)


@pytest.mark.parametrize("fields", MORE)
def test_what_a_score_says_adds_up(fields: dict[str, Any]) -> None:
    found = run(**fields)
    score: Score = found.score
    assert sum(score.breakdown.values()) == pytest.approx(score.step_time_s)
    assert score.step_time_s >= found.simulation.busy_s.max() - 1e-12
    path = found.simulation.critical_path_s()
    assert sum(seconds for _, _, seconds in path) == pytest.approx(found.simulation.makespan_s)
    assert sum(layers_of(found.compiled.dag)) == found.compiled.dag.model.layers
    for row, peak in zip(score.memory, score.peak_memory_bytes, strict=True):
        assert min(row.values()) >= 0
        assert sum(row.values()) == pytest.approx(peak)
    tokens = 64 * 512
    assert score.tokens_per_s_per_gpu == pytest.approx(tokens / score.step_time_s / 8)


# --- laws ---


def test_recompute_trades_time_for_memory() -> None:
    by = {policy: run(pp=2, recompute=policy, micro_batch=8).score for policy in ("none", "selective", "2", "full")}
    time = [by[policy].step_time_s for policy in ("none", "2", "full")]
    assert time == sorted(time)
    assert by["none"].step_time_s < by["selective"].step_time_s < by["full"].step_time_s
    held = {policy: score.memory[0]["activations"] for policy, score in by.items()}
    assert held["full"] < held["2"] < held["none"]
    assert held["full"] < held["selective"] <= held["none"]
    whole = run(pp=2, recompute="5", micro_batch=8).score  # five layers a stage: all of them
    assert whole.step_time_s == by["full"].step_time_s
    assert whole.memory == by["full"].memory


@pytest.mark.parametrize("zero", [0, 1])
def test_doubling_dp_keeps_compute_but_for_the_update(zero: int) -> None:
    one, two = (run(gpus=gpus, pp=2, global_batch=4 * gpus, zero=zero).score for gpus in (8, 16))
    assert two.breakdown["compute"] == pytest.approx(one.breakdown["compute"])
    share = {0: 1.0, 1: 0.5}[zero]
    assert two.breakdown["update"] == pytest.approx(share * one.breakdown["update"])


def test_context_parallelism_divides_activations_and_replicates_parameters() -> None:
    one, two = (run(gpus=gpus, cp=gpus, global_batch=4, seq_len=2048).score for gpus in (1, 2))
    assert two.memory[0]["activations"] == pytest.approx(one.memory[0]["activations"] / 2, rel=0.1)
    assert two.memory[0]["parameters"] == one.memory[0]["parameters"]
    sharded = run(gpus=2, cp=2, global_batch=4, seq_len=2048, zero=1).score
    assert sharded.memory[0]["optimizer"] == pytest.approx(one.memory[0]["optimizer"] / 2)


@pytest.mark.parametrize("fields", MORE)
def test_more_bandwidth_never_slows_without_contention(fields: dict[str, Any]) -> None:
    from search.cost.price import node_seconds
    from search.cost.roofline import RooflineCost
    from search.simulator import action_seconds, simulate

    found = run(**fields)
    dag, plan = found.compiled.dag, found.compiled.plan
    last = float("inf")
    for factor in (0.5, 1.0, 2.0, 8.0):
        cluster = replace(
            CLUSTER, link_bytes_per_s=CLUSTER.link_bytes_per_s * factor,
            nic_bytes_per_s=CLUSTER.nic_bytes_per_s * factor,
        )  # fmt: skip
        simulation = simulate(plan, action_seconds(dag, plan, node_seconds(dag, RooflineCost(cluster))))
        assert simulation.makespan_s <= last * (1 + 1e-12)
        last = simulation.makespan_s


def test_the_outermost_axis_decides_who_is_near() -> None:
    """Four nodes: with pp outermost, a row and its data parallel groups stay inside one; with dp, the pipeline does."""
    near, far = (run(gpus=32, pp=4, dp=8, global_batch=64, outer=outer, zero=1) for outer in ("pp", "dp"))
    assert str(near.strategy.header.mesh) != str(far.strategy.header.mesh)
    assert near.score.exposed_communication_s["reduce"] < far.score.exposed_communication_s["reduce"]
    assert near.score.exposed_communication_s["pipeline"] > far.score.exposed_communication_s["pipeline"]


def test_slower_kernels_cost_more() -> None:
    fast, slow = (
        run(seq_len=2048, kernels=Kernels(attention=kind, norm=norm)).score
        for kind, norm in (("flash2", "fused"), ("unfused", "unfused"))
    )
    assert slow.step_time_s > fast.step_time_s
    assert slow.worst_row_bytes > fast.worst_row_bytes


def test_a_strategy_without_a_cluster_is_refused() -> None:
    found = run()
    strategy = replace(found.strategy, header=replace(found.strategy.header, cluster=None))
    with pytest.raises(ConfigError, match="names no cluster"):
        predict_strategy(strategy)


def test_partial_recompute_is_of_the_first_layers_of_each_stage() -> None:
    found = run(pp=2, recompute="2")
    directive = next(d for d in found.strategy.program.directives if d.op == "recompute")
    assert directive.to_data() == {"op": "recompute", "filter": {"LAYER": [0, 1, 5, 6]}, "policy": "full"}
    assert isinstance(found.config, Configuration)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_bubble_is_all_that_compute_stands_still_and_waiting_is_its_part_without_communication(schedule: str) -> None:
    found = run(pp=4, tp=2, schedule=schedule, zero=1)
    score, simulation = found.score, found.simulation
    outside = sum(score.exposed_communication_s.values()) - simulation.seconds.inner.sum(axis=1).mean()
    assert "bubble" not in score.breakdown
    assert sum(score.breakdown.values()) == pytest.approx(score.step_time_s)
    assert score.bubble_ratio * score.step_time_s == pytest.approx(outside + score.breakdown["waiting"])
    shown = show_prediction(found, capacity_bytes=80e9)
    assert f"bubble {score.bubble_ratio:.1%}" in shown
    assert shown.count("bubble") == 1
    assert "waiting" in shown
