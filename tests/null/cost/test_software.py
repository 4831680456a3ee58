"""Habits of training programs: what each changes, and that the default changes nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from piper_core.arch import preset
from piper_core.names import Collective, Phase, Region
from profiler.spec import load_cluster
from search.cost.software import HIDDEN, OWN, PROJECTIONS, Software
from search.predict import Prediction, predict
from search.request import Kernels, Request

DGX = load_cluster("dgx-a100")
BASE = Request(preset("llama2-7b"), DGX, tp=2, dp=4, pp=2, zero=1, num_microbatches=8, seq_len=2048, micro_batch=1)


def of(request: Request = BASE, **habits: object) -> Prediction:
    return predict(replace(request, software=replace(OWN, **habits)), proved=False)  # type: ignore[arg-type]


PLAIN = of()


def test_the_default_exposes_each_collective_once() -> None:
    for region in Region:
        for phase in (Phase.F, Phase.B, Phase.BI, Phase.BW):
            for kind in Collective:
                assert OWN.exposed(region, phase, kind) == 1.0


def test_separate_projections_reduce_more_often() -> None:
    software = Software(separate_projections=True)
    assert software.exposed(Region.ATTENTION, Phase.B, Collective.ALL_REDUCE) == PROJECTIONS[Region.ATTENTION] == 3
    assert software.exposed(Region.ATTENTION, Phase.F, Collective.ALL_REDUCE) == 1
    assert software.exposed(Region.HEAD, Phase.B, Collective.ALL_REDUCE) == 1
    assert software.exposed(Region.MLP, Phase.B, Collective.ALL_GATHER) == 1
    more = of(separate_projections=True).score.exposed_communication_s["tensor"]
    assert more > 1.5 * PLAIN.score.exposed_communication_s["tensor"]


def test_a_hidden_backward_is_quicker() -> None:
    software = Software(hides_backward=True)
    assert software.exposed(Region.MLP, Phase.B, Collective.ALL_REDUCE) == HIDDEN
    assert software.exposed(Region.MLP, Phase.BI, Collective.ALL_REDUCE) == 1
    assert of(hides_backward=True).score.step_time_s < PLAIN.score.step_time_s


def test_narrow_gradients_take_half() -> None:
    narrow = of(gradient_bytes=2)
    for one, other in zip(narrow.memory.rows, PLAIN.memory.rows, strict=True):
        assert one.gradients == pytest.approx(other.gradients / 2)
        assert one.optimizer == other.optimizer
    assert narrow.score.step_time_s <= PLAIN.score.step_time_s


def test_a_shard_group_keeps_more_and_gathers_nearer() -> None:
    wide = replace(BASE, tp=1, pp=1, dp=64, num_microbatches=2)
    near, far = of(wide, shard_group=8), of(wide)
    assert near.memory.rows[0].optimizer == pytest.approx(8 * far.memory.rows[0].optimizer)
    assert of(wide, shard_group=64).memory.rows[0].optimizer == far.memory.rows[0].optimizer


def test_gathered_logits_weigh_on_the_last_row() -> None:
    peaks = of(gathers_logits=True).memory.peaks
    assert peaks[0] == PLAIN.memory.peaks[0]
    assert peaks[1] > PLAIN.memory.peaks[1]
    alone = replace(BASE, tp=1, dp=8)
    assert of(alone, gathers_logits=True).memory.peaks == of(alone).memory.peaks


def test_a_message_holds_compute_up() -> None:
    """Each row sends one message a microbatch, so a step of 8 takes 8 times as long a pause or more."""
    held = of(message_hold_s=1e-3).score.step_time_s - PLAIN.score.step_time_s
    assert 8e-3 <= held <= 20e-3
    assert of(replace(BASE, pp=1, dp=8), message_hold_s=1.0).score.step_time_s < 5


@pytest.mark.parametrize(
    ("slower", "quicker"),
    [
        (Kernels("eager"), Kernels("unfused")),
        (Kernels("unfused"), Kernels("flash2")),
        (Kernels("flash1"), Kernels("triton")),
        (Kernels("triton"), Kernels("flash2")),
        (Kernels(norm="unfused"), Kernels(activation="unfused")),
        (Kernels(activation="unfused"), Kernels()),
        (Kernels(dropout=True), Kernels()),
        (Kernels(), Kernels(loss="half")),
    ],
)
def test_kernels_rank(slower: Kernels, quicker: Kernels) -> None:
    one, other = (predict(replace(BASE, kernels=kernels), proved=False).score for kernels in (slower, quicker))
    assert one.step_time_s > other.step_time_s
    assert one.worst_row_bytes >= other.worst_row_bytes
