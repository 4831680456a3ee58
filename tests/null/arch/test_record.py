"""Architecture records and presets against published parameter counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from piper_core.arch import PRESETS, model_chunks, preset
from piper_core.errors import ConfigError

# (parameters, active parameters), as known of the released checkpoints (from memory, not fetched): meta-llama,
# Qwen, mistralai, openai-community, deepseek-ai. DeepSeek-V3 without its multi-token module and the 14,848 balance
# biases, which no gradient trains. GPT-3 has no checkpoint: see PUBLISHED_BILLIONS. llama9b is the 8B model with four
# layers more; the Piper models are named by their size.
COUNTS = {
    "llama2-7b": (6_738_415_616, 6_738_415_616),
    "llama2-13b": (13_015_864_320, 13_015_864_320),
    "llama2-70b": (68_976_648_192, 68_976_648_192),
    "llama3-8b": (8_030_261_248, 8_030_261_248),
    "llama9b": (8_902_709_248, 8_902_709_248),
    "llama3-70b": (70_553_706_496, 70_553_706_496),
    "llama3-405b": (405_853_388_800, 405_853_388_800),
    "gpt2-xl": (1_557_611_200, 1_557_611_200),
    "gpt3-175b": (174_615_846_912, 174_615_846_912),
    "qwen3-8b": (8_190_735_360, 8_190_735_360),
    "qwen3-30b-a3b": (30_532_122_624, 3_353_032_704),
    "qwen3-235b-a22b": (235_093_634_560, 22_190_763_520),
    "mixtral-8x7b": (46_702_792_704, 12_879_925_248),
    "deepseek-v3": (671_026_404_352, 37_552_282_624),
    "piper-1b": (1_066_238_976, 713_917_440),
    "piper-9b": (9_330_198_528, 2_988_410_880),
    "tiny-llama": (1_706_112, 1_706_112),
    "tiny-moe": (955_456, 365_632),
}
# What papers and model cards say, in billions: (parameters, active). GPT-3: arXiv 2005.14165, table 2.1; Qwen3: arXiv
# 2505.09388, tables 1 and 2; Mixtral: arXiv 2401.04088, section 2; DeepSeek-V3: arXiv 2412.19437, section 1.
PUBLISHED_BILLIONS = {
    "gpt3-175b": (174.6, 174.6),
    "qwen3-8b": (8.19, 8.19),
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235, 22),
    "mixtral-8x7b": (47, 13),
    "deepseek-v3": (671, 37),
}


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_those_of_the_checkpoints(name: str) -> None:
    table = model_chunks(preset(name), 1024)
    assert (table.parameters, table.active_parameters) == COUNTS[name]


@pytest.mark.parametrize("name", PUBLISHED_BILLIONS)
def test_parameters_are_those_published(name: str) -> None:
    table = model_chunks(preset(name), 1024)
    found = (table.parameters / 1e9, table.active_parameters / 1e9)
    assert found == pytest.approx(PUBLISHED_BILLIONS[name], rel=0.02)


@pytest.mark.parametrize("name", PRESETS)
def test_matmul_parameters_are_all_used_but_embedding_and_norms(name: str) -> None:
    architecture = preset(name)
    forward = sum(chunk.forward.matmul_flops for chunk in model_chunks(architecture, 1024).chunks)
    assert forward == pytest.approx(2 * architecture.matmul_parameters * 1024, rel=1e-9)


def test_names_are_forgiving_in_case_and_underscore() -> None:
    assert preset("Llama3_8B") is preset("llama3-8b")


def test_an_unknown_name_gives_the_nearest() -> None:
    with pytest.raises(ConfigError, match="llama9b"):
        preset("llama9")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"layers": 0}, "layers"),
        ({"hidden": -4}, "hidden"),
        ({"vocab": 1.5}, "vocab"),
        ({"heads": True}, "heads"),
        ({"kv_heads": 5}, "kv_heads"),
        ({"norm": "batch"}, "norm"),
        ({"ffn": 0}, "ffn"),
        ({"top_k": 2}, "experts"),
        ({"experts": 4, "top_k": 5, "expert_ffn": 8}, "top_k"),
        ({"experts": 4, "top_k": 1}, "expert_ffn"),
        ({"activation": "tanh"}, "activation"),
        ({"norm_eps": "small"}, "norm_eps"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"hidden": 1 << 40}, "hidden"),
        ({"layers": 1 << 20}, "layers"),
        ({"dense_layers": 2}, "experts"),
        ({"experts": 4, "top_k": 1, "expert_ffn": 8, "dense_layers": 36}, "dense_layers"),
        ({"experts": 4, "top_k": 1, "expert_ffn": 8, "expert_groups": 3, "top_groups": 1}, "expert_groups"),
        ({"experts": 4, "top_k": 3, "expert_ffn": 8, "expert_groups": 2, "top_groups": 1}, "expert_groups"),
        ({"experts": 4, "top_k": 3, "expert_ffn": 8, "post_norm": True}, "post_norm"),
        ({"head_dim": 127}, "even"),
        ({"value_dim": 64}, "kv_rank"),
        ({"kv_rank": 64, "rope_dim": 64, "value_dim": 64}, "kv_heads"),
        ({"kv_rank": 64, "rope_dim": 64, "value_dim": 256, "kv_heads": 32}, "value_dim"),
        ({"kv_rank": 64, "rope_dim": 64, "value_dim": 64, "kv_heads": 32, "qkv_bias": True}, "biases"),
    ],
)
def test_numbers_that_make_no_model_are_refused(change: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word) as caught:
        replace(preset("llama9b"), **change)
    assert "\n" not in str(caught.value)
