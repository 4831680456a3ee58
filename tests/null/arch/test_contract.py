"""Shard contracts: which collectives, how many, of what size."""

from __future__ import annotations

from collections import Counter

import pytest

from piper_core.arch import model_chunks, preset
from piper_core.arch.contract import accepted_kinds, check_degree, contract, legal_degrees, payload_bytes
from piper_core.errors import ConfigError
from piper_core.names import Collective, Phase, Region, ShardKind

LAYER = (Region.ATTENTION, Region.MLP)
PHASES = (Phase.F, Phase.B, Phase.BI, Phase.BW, Phase.R)


def layer_counts(kind: ShardKind, phase: Phase, **options: bool) -> dict[str, int]:
    found = Counter(
        exchange.collective.name
        for region in LAYER
        for exchange in contract(region, kind, phase, **options)  # type: ignore[arg-type]
    )
    return dict(found)


def test_a_dense_layer_under_tensor_is_megatrons() -> None:
    counts = {phase.name: layer_counts(ShardKind.TENSOR, phase) for phase in PHASES}
    two = {"ALL_REDUCE": 2}
    assert counts == {"F": two, "B": two, "BI": two, "BW": {}, "R": two}


def test_a_dense_layer_under_sequence_gathers_again_for_weight_gradients() -> None:
    counts = {phase.name: layer_counts(ShardKind.SEQUENCE, phase) for phase in PHASES}
    pair = {"ALL_GATHER": 2, "REDUCE_SCATTER": 2}
    assert counts["F"] == counts["BI"] == counts["R"] == pair
    assert counts["B"] == {"ALL_GATHER": 4, "REDUCE_SCATTER": 2}
    assert counts["BW"] == {"ALL_GATHER": 2}
    assert layer_counts(ShardKind.SEQUENCE, Phase.B, regather=False) == pair
    assert layer_counts(ShardKind.SEQUENCE, Phase.BW, regather=False) == {}


@pytest.mark.parametrize("region", Region)
def test_b_exchanges_what_bi_and_bw_do(region: Region) -> None:
    for kind in accepted_kinds(region):
        whole, inputs, weights = (
            Counter(exchange.collective for exchange in contract(region, kind, phase))
            for phase in (Phase.B, Phase.BI, Phase.BW)
        )
        assert whole == inputs + weights, kind


def test_experts_dispatch_before_and_combine_after() -> None:
    for phase in (Phase.F, Phase.B, Phase.BI, Phase.R):
        first, last = contract(Region.EXPERT, ShardKind.EXPERT, phase)
        assert (first.before, last.before) == (True, False)
        assert first.collective is last.collective is Collective.ALL_TO_ALL
    assert contract(Region.EXPERT, ShardKind.EXPERT, Phase.BW) == ()


def test_a_loss_over_a_divided_vocabulary_is_reduced() -> None:
    (loss,) = contract(Region.HEAD, ShardKind.TENSOR, Phase.F)
    head = model_chunks(preset("llama9b"), 4096).chunks[-1]
    assert payload_bytes(loss, head) == 12 * 4096


def test_an_all_to_all_context_moves_all_four_tensors() -> None:
    attention = model_chunks(preset("llama9b"), 4096).chunks[1]
    for phase in (Phase.F, Phase.BI):
        moved = [
            payload_bytes(exchange, attention)
            for exchange in contract(Region.ATTENTION, ShardKind.CONTEXT, phase, method="all_to_all")
        ]
        assert sum(moved) == attention.qkvo_bytes
    (ring,) = contract(Region.ATTENTION, ShardKind.CONTEXT, Phase.B)
    assert payload_bytes(ring, attention) == 2 * attention.kv_bytes


def test_a_dense_region_has_no_experts() -> None:
    with pytest.raises(ConfigError, match="cannot be sharded by expert"):
        contract(Region.MLP, ShardKind.EXPERT, Phase.F)


def test_legal_degrees_divide() -> None:
    llama, piper = preset("llama9b"), preset("piper-9b")
    assert legal_degrees(llama, ShardKind.TENSOR, 4096) == (1, 2, 4, 8)
    assert legal_degrees(piper, ShardKind.EXPERT, 512) == (1, 2, 4, 8)
    assert legal_degrees(llama, ShardKind.EXPERT, 512) == (1,)
    assert legal_degrees(llama, ShardKind.SEQUENCE, 4098) == (1, 2)
    assert legal_degrees(llama, ShardKind.CONTEXT, 24) == (1, 2, 3, 4, 6, 12)
    check_degree(llama, ShardKind.TENSOR, 8, 4096)
    with pytest.raises(ConfigError, match="legal degrees are 1, 2, 4, 8"):
        check_degree(llama, ShardKind.TENSOR, 3, 4096)


def test_latent_attention_exchanges_latents_where_columns_begin() -> None:
    attention = model_chunks(preset("deepseek-v3"), 512).chunks[1]
    (forward,) = contract(Region.ATTENTION, ShardKind.TENSOR, Phase.F)
    (backward,) = contract(Region.ATTENTION, ShardKind.TENSOR, Phase.BI)
    assert payload_bytes(forward, attention) == attention.hidden_bytes
    assert payload_bytes(backward, attention) == attention.column_bytes < attention.hidden_bytes
    gather, scatter = contract(Region.ATTENTION, ShardKind.SEQUENCE, Phase.F)
    assert payload_bytes(gather, attention) == attention.column_bytes
    assert payload_bytes(scatter, attention) == attention.hidden_bytes
    gather, scatter = contract(Region.ATTENTION, ShardKind.SEQUENCE, Phase.BI)
    assert payload_bytes(gather, attention) == attention.hidden_bytes
    assert payload_bytes(scatter, attention) == attention.column_bytes
    llama = model_chunks(preset("llama9b"), 512).chunks[1]
    assert payload_bytes(backward, llama) == llama.hidden_bytes
