"""Hugging Face configurations: each family, what is left out, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from piper_core.arch import model_chunks, preset
from piper_core.arch.huggingface import MOST_BYTES, from_config, load_architecture
from piper_core.errors import ConfigError

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256,
    "max_position_embeddings": 8192, "rope_theta": 500000.0, "rms_norm_eps": 1e-05, "hidden_act": "silu",
    "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip
COMMON = {
    "hidden_size": 2048, "num_attention_heads": 32, "num_hidden_layers": 4, "vocab_size": 1000,
    "max_position_embeddings": 4096, "intermediate_size": 6144,
}  # fmt: skip
QWEN3_MOE = {
    **COMMON, "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 48, "num_key_value_heads": 4,
    "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "vocab_size": 151936,
    "norm_topk_prob": True, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960,
}  # fmt: skip
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"], "first_k_dense_replace": 3, "hidden_size": 7168,
    "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_intermediate_size": 2048,
    "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
}  # fmt: skip
GPT2_XL = {
    "architectures": ["GPT2LMHeadModel"], "n_embd": 1600, "n_head": 25, "n_layer": 48, "n_positions": 1024,
    "vocab_size": 50257, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-05,
}  # fmt: skip
MIXTRAL = {
    **COMMON, "architectures": ["MixtralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
    "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 32000, "num_local_experts": 8,
    "num_experts_per_tok": 2, "rope_theta": 1e6, "router_aux_loss_coef": 0.02, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
}  # fmt: skip


def same_but_for_name(found: Any, name: str) -> bool:
    from dataclasses import replace

    return bool(replace(found, name=name, limits=()) == preset(name))


@pytest.mark.parametrize(
    ("config", "name"),
    [(LLAMA, "llama3-8b"), (QWEN3_MOE, "qwen3-30b-a3b"), (DEEPSEEK, "deepseek-v3"), (GPT2_XL, "gpt2-xl"),
     (MIXTRAL, "mixtral-8x7b")],
)  # fmt: skip
def test_a_published_config_is_its_preset(config: dict[str, Any], name: str) -> None:
    assert same_but_for_name(from_config(config, "x"), name)


def test_a_file_and_its_directory_and_a_preset(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    for path in (file, tmp_path):
        found = load_architecture(str(path))
        assert same_but_for_name(found, "llama3-8b")
        assert load_architecture(found.name) == found
    assert load_architecture("Llama3_8B") is preset("llama3-8b")


def test_names_and_values_of_newer_transformers() -> None:
    """transformers 5 writes rope_parameters, and num_local_experts for every mixture."""
    old, new = (dict(QWEN3_MOE) for _ in range(2))
    del new["rope_theta"], new["num_experts"]
    new |= {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "num_local_experts": 128}
    assert from_config(old, "x") == from_config(new, "x")


def test_model_type_will_do() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "architectures"}
    assert from_config(config, "x") == from_config(LLAMA, "x")


@pytest.mark.parametrize(
    ("kind", "config", "billions"),
    [  # sizes known of google/gemma-2b, google/gemma-2-9b, Qwen/Qwen2.5-7B, mistralai/Mistral-7B-v0.1
        ("Gemma", {"hidden_size": 2048, "intermediate_size": 16384, "num_attention_heads": 8, "num_hidden_layers": 18,
                   "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 256000}, 2.506172416),
        ("Gemma2", {"hidden_size": 3584, "intermediate_size": 14336, "num_attention_heads": 16,
                    "num_hidden_layers": 42, "num_key_value_heads": 8, "head_dim": 256, "vocab_size": 256000,
                    "query_pre_attn_scalar": 256}, 9.241705984),
        ("Qwen2", {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
                   "num_hidden_layers": 28, "num_key_value_heads": 4, "vocab_size": 152064}, 7.615616512),
        ("Mistral", {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
                     "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 32000}, 7.241732096),
        ("Qwen3", {"hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32, "head_dim": 128,
                   "num_hidden_layers": 36, "num_key_value_heads": 8, "vocab_size": 151936,
                   "tie_word_embeddings": True}, 4.022468096),
    ],
)  # fmt: skip
def test_parameters_of_published_configs(kind: str, config: dict[str, Any], billions: float) -> None:
    config = {"architectures": [f"{kind}ForCausalLM"], "max_position_embeddings": 8192, **config}
    assert model_chunks(from_config(config, kind), 1024).parameters == round(billions * 1e9)


def test_what_is_left_out_is_said() -> None:
    config = {**COMMON, "architectures": ["MistralForCausalLM"], "sliding_window": 1024}
    assert from_config(config, "x").limits == ("sliding window of 1024 tokens: attention is full",)
    assert from_config({**config, "sliding_window": 4096}, "x").limits == ()
    assert from_config({**config, "sliding_window": None}, "x").limits == ()
    assert "multi-token prediction" in from_config(DEEPSEEK, "x").limits[0]
    (limit,) = from_config({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "x").limits
    assert "dynamic" in limit
    gemma = {**COMMON, "architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 50.0}
    assert "attn_logit_softcapping" in from_config(gemma, "x").limits[0]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"architectures": ["BertForMaskedLM"]}, "supported are LlamaForCausalLM"),
        ({"architectures": None, "model_type": "mamba"}, "not supported"),
        ({"architectures": None, "model_type": ["llama"]}, "not supported"),
        ({"architectures": [7]}, "not supported"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "4096"}, "hidden_size must be an integer"),
        ({"hidden_size": 4096.0}, "hidden_size must be an integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_attention_heads": 33}, "does not divide"),
        ({"num_attention_heads": 0}, "does not divide"),
        ({"num_key_value_heads": 5}, "must divide heads"),
        ({"hidden_size": 10**30}, "hidden must be"),
        ({"num_hidden_layers": 10**9}, "layers must be"),
        ({"vocab_size": -5}, "vocab must be"),
        ({"hidden_act": "relu6"}, "activation 'relu6'"),
        ({"hidden_act": ["silu"]}, "activation"),
        ({"attention_bias": True}, "attention_bias"),
        ({"attention_bias": 1}, "true or false"),
        ({"rope_theta": "big"}, "rope_theta"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"rope_scaling": 3}, "object"),
        ({"rope_scaling": {"type": "yarn", "factor": 0}}, "factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(change: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word) as caught:
        from_config({**LLAMA, **change}, "my/config.json")
    assert "\n" not in str(caught.value)
    assert "my/config.json" in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("base", "change", "word"),
    [
        (QWEN3_MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        (QWEN3_MOE, {"mlp_only_layers": [3]}, "mlp_only_layers"),
        (QWEN3_MOE, {"num_experts_per_tok": 200}, "top_k"),
        (DEEPSEEK, {"topk_method": "greedy"}, "topk_method"),
        (DEEPSEEK, {"n_group": 7}, "expert_groups"),
        (DEEPSEEK, {"qk_rope_head_dim": None}, "qk_rope_head_dim is missing"),
        (GPT2_XL, {"n_head": 24}, "does not divide"),
        (GPT2_XL, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ],
)
def test_what_is_wrong_in_other_families(base: dict[str, Any], change: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        from_config({**base, **change}, "x")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "3", '{"hidden_size": ' + "9" * 5000 + "}", "[" * 100_000, "\udcff"]
)
def test_a_broken_file_is_a_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        load_architecture(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_files_that_are_not_there_or_too_large(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no config"):
        load_architecture(str(tmp_path))
    with pytest.raises(ConfigError, match="no such file"):
        load_architecture("meta-llama/Llama-3-8B")
    with pytest.raises(ConfigError, match="has no name"):
        load_architecture(" ")
    with pytest.raises(ConfigError, match=r"give model\.py:function"):
        load_architecture("some/model.py")
    with pytest.raises(ConfigError, match="nearest names"):
        load_architecture("llama3")
    with pytest.raises(ConfigError):
        load_architecture("a\0b")
    (tmp_path / "config.json").write_text(" " * (MOST_BYTES + 1))
    with pytest.raises(ConfigError, match="larger"):
        load_architecture(str(tmp_path))
