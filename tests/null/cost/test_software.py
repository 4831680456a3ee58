"""Habits of training programs: what each changes, and that the default changes nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from piper_core.arch import preset
from piper_core.names import Collective, Phase, Region
from profiler.spec import load_cluster
from search.cost.roofline import RooflineCost
from search.cost.software import GATE_AND_UP, HIDDEN, OWN, Software
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


def test_a_separate_gate_reduces_more_often() -> None:
    software = Software(separate_gate=True)
    assert software.exposed(Region.MLP, Phase.B, Collective.ALL_REDUCE) == GATE_AND_UP == 2
    assert software.exposed(Region.MLP, Phase.F, Collective.ALL_REDUCE) == 1
    assert software.exposed(Region.ATTENTION, Phase.B, Collective.ALL_REDUCE) == 1
    assert software.exposed(Region.MLP, Phase.B, Collective.REDUCE_SCATTER) == GATE_AND_UP
    more = of(separate_gate=True).score.exposed_communication_s["tensor"]
    assert 1.15 < more / PLAIN.score.exposed_communication_s["tensor"] < 1.3  # five of four all_reduces a layer


def test_kept_inputs_are_gathered_once() -> None:
    software = Software(keeps_gathered=True)
    assert software.exposed(Region.MLP, Phase.F, Collective.ALL_GATHER) == 1
    assert software.exposed(Region.MLP, Phase.B, Collective.ALL_GATHER) == 0.5
    assert software.exposed(Region.MLP, Phase.BI, Collective.ALL_GATHER) == 1
    assert software.exposed(Region.MLP, Phase.BW, Collective.ALL_GATHER) == 0
    assert software.exposed(Region.HEAD, Phase.B, Collective.ALL_GATHER) == 0
    assert software.exposed(Region.EMBED, Phase.B, Collective.ALL_GATHER) == 1
    sharded = replace(BASE, sequence_parallel=True)
    kept, plain = of(sharded, keeps_gathered=True), of(sharded)
    assert kept.score.step_time_s < plain.score.step_time_s
    hidden = 2 * 2048 * 4096  # bytes of one sequence; half of it is the rank's own
    layers, alive = 16, 2
    more = kept.memory.rows[0].activations - plain.memory.rows[0].activations
    assert more == pytest.approx(alive * layers * 2 * hidden / 2)
    assert of(keeps_gathered=True).score.step_time_s == PLAIN.score.step_time_s


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
    assert of(gathers_logits=True).score.step_time_s > PLAIN.score.step_time_s
    alone = replace(BASE, tp=1, dp=8)
    assert of(alone, gathers_logits=True).memory.peaks == of(alone).memory.peaks
    assert of(alone, gathers_logits=True).score.step_time_s == of(alone).score.step_time_s


def test_a_message_holds_compute_up() -> None:
    """Each row sends one message a microbatch, so a step of 8 takes 8 times as long a pause or more."""
    held = of(message_hold_s=1e-3).score.step_time_s - PLAIN.score.step_time_s
    assert 8e-3 <= held <= 20e-3
    assert of(replace(BASE, pp=1, dp=8), message_hold_s=1.0).score.step_time_s < 5


def test_messages_that_block_take_compute_time() -> None:
    """A row of two sends and receives once each a microbatch; the time of a message is that of its bytes."""
    message_s = RooflineCost(DGX).send_s(2.0 * 2048 * 4096, (0, 1), (8, 9))
    assert 0 < of(blocks_messages=True).score.step_time_s - PLAIN.score.step_time_s < 8 * 4 * message_s
    alone = replace(BASE, pp=1, dp=8)
    assert of(alone, blocks_messages=True).score.step_time_s == of(alone).score.step_time_s


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
