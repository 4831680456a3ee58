"""A cost model that reads a profile: exact where measured, marked where not, and a prediction with its range."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from piper_core.arch.closed_form import model_chunks
from piper_core.arch.presets import preset
from piper_core.errors import ConfigError
from piper_core.names import Axis, Collective, NodeKind, Phase, Recompute, Region
from profiler.fit import Origin
from profiler.record import Meeting, Transfer
from profiler.spec import load_cluster
from profiler.store import load, model_digest, save
from search.cost.base import CostModel
from search.cost.price import node_seconds
from search.cost.profiled import ProfiledCost, widened
from search.cost.roofline import RooflineCost
from search.history import history, keep_run, lines
from search.predict import Prediction, predict
from search.profiled import by_profile, in_dtype
from search.request import Request
from tests.null.profiler.made import ALPHA, BETA, LLAMA, SECONDS, SEQ, around, bare, profile

CPU = load_cluster("cpu")
CHUNKS = {chunk.region: chunk for chunk in model_chunks(LLAMA, SEQ).chunks}
close = pytest.approx


def cost(**options: object) -> ProfiledCost:
    made = options.pop("profile", None) or profile()
    return ProfiledCost(made, RooflineCost(CPU), LLAMA, SEQ, **options)  # type: ignore[arg-type]  # fields by name


def prediction(**options: object) -> Prediction:
    given = {"num_microbatches": 4, "micro_batch": 1} | options
    return predict(Request(LLAMA, CPU, seq_len=SEQ, **given))  # type: ignore[arg-type]  # fields by name


@pytest.mark.parametrize("phase", [Phase.F, Phase.B, Phase.BI, Phase.BW])
def test_what_was_measured_is_what_is_answered(phase: Phase) -> None:
    model: CostModel = cost()
    assert model.compute_s(CHUNKS[Region.MLP], phase, 1) == close(SECONDS[phase])
    assert model.compute_s(CHUNKS[Region.EMBED], Phase.BI, 1) == 0, "the embedding has no gradient to hand on"


def test_parts_of_a_backward_are_at_most_the_whole() -> None:
    slow_parts = profile()
    chunks = {d: replace(c, sample=around(5e-3)) if "BI" in d else c for d, c in slow_parts.chunks.items()}
    model = cost(profile=replace(slow_parts, chunks=chunks))
    parts = [model.compute_s(CHUNKS[Region.MLP], phase, 1) for phase in (Phase.BI, Phase.BW)]
    assert sum(parts) == close(model.compute_s(CHUNKS[Region.MLP], Phase.B, 1)) == close(2e-3)


def test_transfers_and_updates_are_the_machines() -> None:
    model = cost()
    assert model.collective_s(Collective.ALL_REDUCE, 1e6, (0, 1)) == close(ALPHA + BETA * 1e6)
    assert model.send_s(1e6, (0,), (1,)) == close(ALPHA + BETA * 1e6)
    assert model.collective_s(Collective.ALL_REDUCE, 1e6, (0,)) == 0
    assert model.update_s(1 << 16) == close(1e-9 * (1 << 16) + 1e-5)
    assert model.overlap_slowdown == close(1.5)


def test_every_answer_says_where_it_comes_from() -> None:
    model = cost()
    model.compute_s(CHUNKS[Region.MLP], Phase.F, 1)
    model.compute_s(CHUNKS[Region.MLP], Phase.F, 1)  # asked again it is no other answer
    model.compute_s(CHUNKS[Region.MLP], Phase.F, 8)
    model.compute_s(CHUNKS[Region.MLP], Phase.R, 1, recompute=Recompute.SELECTIVE)
    model.collective_s(Collective.ALL_TO_ALL, 1e6, (0, 1))
    model.collective_s(Collective.ALL_REDUCE, 1e6, tuple(range(16)))
    chunks, transfers = model.origins["chunks"], model.origins["transfers"]
    assert (chunks[Origin.MEASURED], chunks[Origin.FITTED]) == (2, 1)
    assert transfers[Origin.PRESET] == 2
    assert "2 measured, 1 fitted" in model.says()


def test_nothing_measured_is_the_preset() -> None:
    model, preset_ = cost(profile=bare()), RooflineCost(CPU)
    for phase in (Phase.F, Phase.B, Phase.BI, Phase.BW):
        chunk = CHUNKS[Region.ATTENTION]
        assert model.compute_s(chunk, phase, 2, 2) == close(preset_.compute_s(chunk, phase, 2, 2))
    assert model.update_s(1e6) == preset_.update_s(1e6)
    assert model.overlap_slowdown == preset_.overlap_slowdown
    assert set(model.origins["chunks"]) == {Origin.PRESET}


def test_another_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="of model tiny-llama, not of tiny-moe"):
        ProfiledCost(profile(), RooflineCost(CPU), preset("tiny-moe"), SEQ)


def test_ranks_beyond_the_cores_share_them() -> None:
    one, two, eight = (cost(ranks=n).compute_s(CHUNKS[Region.MLP], Phase.F, 1) for n in (1, 2, 8))
    assert two == close(1.1 * one)
    assert eight == close(4 * two)


def test_levels_are_in_order() -> None:
    found = by_profile(prediction(dp=2), profile(doubt=0.1), LLAMA, CPU)
    assert found.low_s < found.found.score.step_time_s < found.high_s


def test_a_prediction_is_made_of_what_was_measured() -> None:
    """One rank: the step is all chunks one after another, and the update."""
    found = by_profile(prediction(pp=1), profile(), LLAMA, CPU)
    layers, m = LLAMA.layers, 4
    regions = 2 * layers + 1  # and the embedding, which has no BI but a B
    chunks = m * ((regions + 1) * SECONDS[Phase.F] + (regions + 1) * SECONDS[Phase.B])
    update = found.cost.update_s(sum(c.numel for c in found.found.compiled.dag.chunks))
    assert found.found.score.step_time_s == close(chunks + update, rel=1e-3)
    assert found.cost.to_data()["chunks"] == {"measured": 8}


def test_a_profile_twice_as_slow_predicts_twice_the_step() -> None:
    one, two = (by_profile(prediction(pp=2), profile(scale=s), LLAMA, CPU).found.score.step_time_s for s in (1.0, 2.0))
    assert two == close(2 * one, rel=0.01)


def test_messages_are_in_the_dtype_that_runs() -> None:
    dag = prediction(dp=2, tp=2, zero=3, pp=1).compiled.dag
    wide = in_dtype(dag, 4)
    inner = np.isin(dag.nodes.axis, (Axis.TENSOR, Axis.SEQUENCE)) & (dag.nodes.kind == NodeKind.COLLECTIVE)
    gathers = (dag.nodes.axis == Axis.DATA) & (dag.nodes.collective == Collective.ALL_GATHER)
    reduces = (dag.nodes.axis == Axis.DATA) & (dag.nodes.collective == Collective.REDUCE_SCATTER)
    assert inner.any()
    assert gathers.any()
    assert reduces.any()
    assert np.allclose(wide.nbytes()[inner | gathers], 2 * dag.nbytes()[inner | gathers])
    assert np.allclose(wide.nbytes()[reduces], dag.nbytes()[reduces])
    assert len(node_seconds(wide, cost())) == len(dag.nodes)
    assert in_dtype(dag, 2) is dag


def test_wider_chunks_hold_twice_as_much() -> None:
    table = model_chunks(LLAMA, SEQ)
    wide = widened(table, 4)
    assert wide.dtype_bytes == 4
    for thin, thick in zip(table.chunks, wide.chunks, strict=True):
        assert thick.saved.sharded == 2 * thin.saved.sharded
        assert thick.output_bytes == 2 * thin.output_bytes
        assert thick.flops == thin.flops
    assert widened(table, 2) is table
    with pytest.raises(ConfigError, match="narrower"):
        widened(table, 1)


def test_runs_are_kept_and_recalibrate(tmp_path: Path) -> None:
    path = tmp_path / "a.profile.json"
    save(profile(), path)
    guesses = [by_profile(prediction(pp=1, num_microbatches=m), profile(), LLAMA, CPU) for m in (2, 4, 8)]
    for i, guess in enumerate(guesses):
        score = guess.found.score
        keep_run(path, load(path), f"m{i}", str(i), around(1.2 * score.step_time_s), score, f"2026-01-0{i + 1}")
    profile_now = load(path)
    assert len(profile_now.runs) == 3
    assert len(profile_now.sites) == len(profile().sites)
    found = by_profile(prediction(pp=1), profile_now, LLAMA, CPU)
    assert found.recalibrated is not None
    assert found.recalibrated[0] == close(1.2 * found.found.score.step_time_s, rel=0.03)
    assert any("recalibrated by 3 runs" in line for line in found.lines())
    told = history(path, load(path))
    assert [row.strategy for row in told.rows] == ["m0", "m1", "m2"]
    assert told.rows[0].error == close(-1 / 6, rel=0.01)
    assert abs(told.rows[2].error_after) < 0.03 < abs(told.rows[2].error)
    assert "of 3 inside their intervals" in lines(told)[-2]


def test_ranks_that_exchange_inside_chunks_wait_for_each_other() -> None:
    lost = (Meeting(1e-3, around(1.5)), Meeting(1.0, around(1.01)))
    made = profile(tensor=(1, 2))
    plain, meeting = cost(profile=made), cost(profile=replace(made, meetings=lost))
    chunk = CHUNKS[Region.ATTENTION]
    for phase, waits in ((Phase.F, True), (Phase.B, True), (Phase.BI, True), (Phase.BW, False), (Phase.R, True)):
        for tensor in (1, 2):
            before, after = (each.compute_s(chunk, phase, 1, tensor) for each in (plain, meeting))
            assert (after > before) == (waits and tensor > 1), (phase, tensor)
    selective = [each.compute_s(chunk, Phase.R, 1, 2, recompute=Recompute.SELECTIVE) for each in (plain, meeting)]
    assert selective[0] == selective[1], "selective recompute exchanges nothing"
    parts = sum(meeting.compute_s(chunk, phase, 1, 2) for phase in (Phase.BI, Phase.BW))
    assert parts <= meeting.compute_s(chunk, Phase.B, 1, 2) * (1 + 1e-12)


def test_experts_ranks_meet_before_and_after() -> None:
    moe = preset("tiny-moe")
    chunk = next(each for each in model_chunks(moe, SEQ).chunks if each.region is Region.EXPERT)
    lost = (Meeting(1e-6, around(3.0, 0.0)),)  # 2 us at any length
    made = replace(bare(meetings=lost), model=moe.name, model_digest=model_digest(moe))
    plain, meeting = (ProfiledCost(each, RooflineCost(CPU), moe, SEQ) for each in (replace(made, meetings=()), made))
    for phase, times in ((Phase.F, 2), (Phase.B, 2), (Phase.BW, 0)):
        before, after = (each.compute_s(chunk, phase, 1, expert=2) for each in (plain, meeting))
        assert after - before == close(times * 2e-6), phase


def test_ranks_lose_at_collectives_outside_chunks_what_they_lose_after_long_work() -> None:
    lost = (Meeting(1e-3, around(1.5, 0.0)), Meeting(1.0, around(1.001, 0.0)))
    plain, meeting = cost(profile=profile()), cost(profile=replace(profile(), meetings=lost))
    assert (plain.meeting_s, meeting.meeting_s) == (0.0, close(1e-3))
    compiled = prediction(dp=2, zero=0).compiled
    collectives = (compiled.dag.nodes.kind == NodeKind.COLLECTIVE) | (compiled.dag.nodes.kind == NodeKind.NORM)
    assert collectives.any()
    difference = node_seconds(compiled.dag, meeting) - node_seconds(compiled.dag, plain)
    assert difference[collectives] == close(np.full(int(collectives.sum()), 1e-3))
    assert not difference[~collectives].any()


def test_experts_ranks_tell_each_other_counts_first() -> None:
    moe = preset("tiny-moe")
    chunk = next(each for each in model_chunks(moe, SEQ).chunks if each.region is Region.EXPERT)
    taken = tuple(Transfer("all_to_all", 2, 1, size, around(7e-4)) for size in (1 << 10, 1 << 16))
    made = replace(bare(transfers=taken), model=moe.name, model_digest=model_digest(moe))
    with_, without = (ProfiledCost(each, RooflineCost(CPU), moe, SEQ) for each in (made, replace(made, transfers=())))
    for phase, extra in ((Phase.F, True), (Phase.R, False), (Phase.B, False), (Phase.BW, False)):
        plain = RooflineCost(CPU).compute_s(chunk, phase, 1, expert=2)
        assert with_.compute_s(chunk, phase, 1, expert=2) == close(plain + 7e-4 * extra)
        assert with_.compute_s(chunk, phase, 1) == without.compute_s(chunk, phase, 1)
