"""From a Hugging Face ``config.json`` to an architecture record, offline, without transformers.

Field names are those of the configuration classes of transformers, and so are defaults where published files leave a
field out. What a record cannot express is either
refused or, where it changes no shape, left out and said so in ``Architecture.limits``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from piper_core.arch.presets import PRESETS, preset
from piper_core.arch.record import Activation, Architecture, RopeKind, RopeScaling
from piper_core.errors import ConfigError

MOST_BYTES = 1 << 20
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu", "swish": "silu", "gelu": "gelu",
    "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
}  # fmt: skip


def load_architecture(name_or_path: str) -> Architecture:
    """Return a preset, or the architecture of a ``config.json`` or of a directory that holds one.

    Raises:
        ConfigError: no such model, or a configuration that is broken or not supported.
    """
    if name_or_path.lower().replace("_", "-") in PRESETS:
        return preset(name_or_path)
    path = Path(name_or_path)
    if not name_or_path.strip():
        raise ConfigError("the model has no name; give a preset, a config.json or its directory, or file.py:function")
    if path.suffix == ".py" and not path.is_dir():
        raise ConfigError(
            f"model {name_or_path[:200]!r} names a file of Python and no function; give {path.name}:function, which "
            "returns (model, example inputs)"
        )
    try:
        if path.is_dir():
            path = path / "config.json"
            if not path.is_file():
                raise ConfigError(f"model directory {name_or_path} holds no config.json")
        if path.is_file():
            return from_config(_read(path), name_or_path)
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        raise ConfigError(f"model {name_or_path[:200]!r} cannot be read: {error}") from None
    if path.suffix == ".json" or "/" in name_or_path:
        raise ConfigError(f"model {name_or_path[:200]!r}: no such file or directory; nothing is fetched from a hub")
    return preset(name_or_path)


def _read(path: Path) -> Mapping[str, Any]:
    if path.stat().st_size > MOST_BYTES:
        raise ConfigError(f"{path} is larger than {MOST_BYTES >> 20} MiB, no config.json is")
    try:
        data = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {str(error)[:200] or 'nested too deep'}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a JSON object, found {type(data).__name__}")
    return data


def from_config(data: Mapping[str, Any], name: str) -> Architecture:
    """Return the architecture that a parsed ``config.json`` describes.

    Raises:
        ConfigError: an unsupported architecture, a missing field, or numbers that make no model.
    """
    classes = data.get("architectures")
    kind = data.get("model_type")
    if isinstance(classes, list) and classes:
        kind = next((_CLASSES[each] for each in classes if isinstance(each, str) and each in _CLASSES), None)
    if not isinstance(kind, str) or kind not in _READERS:
        found = classes[0] if isinstance(classes, list) and classes else data.get("model_type")
        raise ConfigError(f"{name}: architecture {str(found)[:80]!r} is not supported; supported are "
                          + ", ".join(_CLASSES))  # fmt: skip
    config = _Config(data, name)
    return Architecture(name=name, **_READERS[kind](config), limits=tuple(config.limits))


@dataclass(slots=True)
class _Config:
    """Typed reading of the fields of a configuration; ``limits`` gathers what is left out."""

    data: Mapping[str, Any]
    name: str
    limits: list[str] = field(default_factory=list)

    def wrong(self, what: str) -> ConfigError:
        return ConfigError(f"{self.name}: {what}")

    def integer(self, key: str, default: int | None = None, *, also: str = "") -> int:
        """Return a field (or that of its other name ``also``); null is as good as none."""
        value = self.data.get(key)
        value = self.data.get(also) if value is None else value
        value = default if value is None else value
        if value is None:
            raise self.wrong(f"field {key} is missing")
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.wrong(f"field {key} must be an integer, found {str(value)[:40]!r}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.data.get(key)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e12:
            raise self.wrong(f"field {key} must be a number of at least 0, found {str(value)[:40]!r}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.data.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.wrong(f"field {key} must be true or false, found {str(value)[:40]!r}")
        return value

    def activation(self, *keys: str, default: str) -> Activation:
        found = next((self.data[key] for key in keys if self.data.get(key) is not None), default)
        if not isinstance(found, str) or found not in _ACTIVATIONS:
            names = ", ".join(_ACTIVATIONS)
            raise self.wrong(f"activation {str(found)[:40]!r} is not supported; supported are {names}")
        return _ACTIVATIONS[found]

    def must(self, key: str, *values: object) -> None:
        """Refuse a field that is there and is none of ``values``."""
        value = self.data.get(key)
        if value is not None and value not in values:
            wanted = " or ".join(json.dumps(each) for each in values)
            raise self.wrong(f"{key} {str(value)[:40]} is not supported; it must be {wanted}")

    def leave_out(self, what: str) -> None:
        self.limits.append(what)


def _common(c: _Config, *, tied: bool = False, eps: float = 1e-6, theta: float = 10_000.0) -> dict[str, Any]:
    """Return what all rotary models have, with the defaults of one."""
    hidden, heads = c.integer("hidden_size"), c.integer("num_attention_heads")
    if c.data.get("head_dim") is None and (heads < 1 or hidden % heads):
        raise c.wrong(f"num_attention_heads {heads} does not divide hidden_size {hidden}, and there is no head_dim")
    c.must("partial_rotary_factor", 1, 1.0)
    rope = c.data.get("rope_parameters") or c.data.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise c.wrong("rope_parameters or rope_scaling must be an object")
    inner = _Config(rope, c.name)
    return {
        "layers": c.integer("num_hidden_layers"),
        "hidden": hidden,
        "ffn": c.integer("intermediate_size"),
        "heads": heads,
        "kv_heads": c.integer("num_key_value_heads", heads),
        "head_dim": c.integer("head_dim", hidden // max(heads, 1)),
        "vocab": c.integer("vocab_size"),
        "max_seq": c.integer("max_position_embeddings"),
        "tied": c.flag("tie_word_embeddings", tied),
        "activation": c.activation("hidden_act", default="silu"),
        "norm_eps": c.number("rms_norm_eps", eps),
        "rope_theta": c.number("rope_theta", inner.number("rope_theta", theta)),
        "rope_scaling": _scaling(c, inner),
    }


def _scaling(c: _Config, rope: _Config) -> RopeScaling | None:
    found = rope.data.get("rope_type") or rope.data.get("type") or "default"
    if found == "default":
        return None
    kind = next((each for each in get_args(RopeKind) if each == found), None)
    if kind is None:
        c.leave_out(f"rope scaling {str(found)[:40]!r}: positions are not stretched")
        return None
    low, high = ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ("beta_slow", "beta_fast")
    factor = rope.number("factor", 1.0)
    original = rope.integer("original_max_position_embeddings", c.integer("max_position_embeddings"))
    if factor <= 0 or original < 1:
        raise c.wrong(f"rope scaling must have a factor above 0 and an original length, found {factor}, {original}")
    return RopeScaling(
        kind, factor, original, rope.number(low, 1.0), rope.number(high, 4.0 if kind == "llama3" else 32.0),
        rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0),
    )  # fmt: skip


def _window(c: _Config, used: bool = True, default: int | None = None) -> None:
    positions = c.integer("max_position_embeddings")
    window = c.integer("sliding_window", positions if default is None or "sliding_window" in c.data else default)
    if used and window < positions:
        c.leave_out(f"sliding window of {window} tokens: attention is full")


def _llama(c: _Config) -> dict[str, Any]:
    if c.flag("attention_bias") != c.flag("mlp_bias"):
        raise c.wrong("attention_bias without mlp_bias, or the reverse, is not supported")
    return {**_common(c), "bias": c.flag("attention_bias")}


def _mistral(c: _Config) -> dict[str, Any]:
    _window(c, default=4096)
    return _common(c)


def _qwen2(c: _Config) -> dict[str, Any]:
    _window(c, c.flag("use_sliding_window"))
    return {**_common(c), "qkv_bias": True}


def _qwen3(c: _Config) -> dict[str, Any]:
    _window(c, c.flag("use_sliding_window"))
    c.must("attention_bias", False)
    return {**_common(c), "head_dim": c.integer("head_dim", 128), "qk_norm": True}


def _qwen3_moe(c: _Config) -> dict[str, Any]:
    c.must("decoder_sparse_step", 1)
    dense = c.data.get("mlp_only_layers") or []
    if not isinstance(dense, list) or dense != list(range(len(dense))):
        raise c.wrong(f"mlp_only_layers must be the first layers, found {str(dense)[:60]}")
    qwen3 = _qwen3(c)
    hidden = c.integer("hidden_size")
    return {
        **qwen3,
        "ffn": qwen3["ffn"] if dense else 0,
        "dense_layers": len(dense),
        "head_dim": c.integer("head_dim", hidden // qwen3["heads"]),
        "experts": c.integer("num_experts", also="num_local_experts"),
        "top_k": c.integer("num_experts_per_tok"),
        "expert_ffn": c.integer("moe_intermediate_size"),
        "normalise_top_k": c.flag("norm_topk_prob"),
        "balance_loss": c.number("router_aux_loss_coef", 0.001),
    }


def _mixtral(c: _Config) -> dict[str, Any]:
    _window(c)
    return {
        **_common(c, eps=1e-5, theta=1e6),
        "ffn": 0,
        "experts": c.integer("num_local_experts", also="num_experts"),
        "top_k": c.integer("num_experts_per_tok"),
        "expert_ffn": c.integer("intermediate_size"),
        "balance_loss": c.number("router_aux_loss_coef", 0.001),
    }


def _gpt2(c: _Config) -> dict[str, Any]:
    c.must("scale_attn_by_inverse_layer_idx", False)
    c.must("scale_attn_weights", True)
    c.must("add_cross_attention", False)
    hidden, heads, positions = c.integer("n_embd"), c.integer("n_head"), c.integer("n_positions")
    if heads < 1 or hidden % heads:
        raise c.wrong(f"n_head {heads} does not divide n_embd {hidden}")
    return {
        "layers": c.integer("n_layer"),
        "hidden": hidden,
        "ffn": c.integer("n_inner", 4 * hidden),
        "heads": heads,
        "kv_heads": heads,
        "head_dim": hidden // heads,
        "vocab": c.integer("vocab_size"),
        "max_seq": positions,
        "learned_positions": positions,
        "tied": c.flag("tie_word_embeddings", True),
        "activation": c.activation("activation_function", default="gelu_new"),
        "norm": "layer",
        "norm_eps": c.number("layer_norm_epsilon", 1e-5),
        "gated": False,
        "bias": True,
    }


def _gemma(c: _Config) -> dict[str, Any]:
    c.must("attention_bias", False)
    return {
        **_common(c, tied=True),
        "head_dim": c.integer("head_dim", 256),
        "activation": c.activation("hidden_activation", default="gelu_pytorch_tanh"),
        "scaled_embedding": True,
    }


def _gemma2(c: _Config) -> dict[str, Any]:
    _window(c, default=4096)
    if c.data.get("attn_logit_softcapping", 50.0) is not None:
        c.leave_out("attn_logit_softcapping: scores are not capped, fused attention has no cap")
    return {
        **_gemma(c),
        "post_norm": True,
        "query_scale": c.integer("query_pre_attn_scalar", 256),
        "logit_cap": c.number("final_logit_softcapping", 0.0 if "final_logit_softcapping" in c.data else 30.0),
    }


def _deepseek_v3(c: _Config) -> dict[str, Any]:
    c.must("attention_bias", False)
    c.must("moe_layer_freq", 1)
    c.must("scoring_func", "sigmoid")
    c.must("topk_method", "noaux_tc")
    if c.data.get("num_nextn_predict_layers"):
        c.leave_out("num_nextn_predict_layers: multi-token prediction is not built")
    rope, plain, expert_ffn = (
        c.integer(key) for key in ("qk_rope_head_dim", "qk_nope_head_dim", "moe_intermediate_size")
    )
    if "q_lora_rank" not in c.data:
        raise c.wrong("field q_lora_rank is missing; null says that queries come from the hidden state")
    first = c.integer("first_k_dense_replace", 3)
    common = _common(_Config({**c.data, "head_dim": rope + plain}, c.name, c.limits))
    return {
        **common,
        "ffn": common["ffn"] if first else 0,
        "kv_heads": common["heads"],
        "dense_layers": first,
        "experts": c.integer("n_routed_experts", also="num_local_experts"),
        "top_k": c.integer("num_experts_per_tok"),
        "expert_ffn": expert_ffn,
        "shared_ffn": c.integer("n_shared_experts", 1) * expert_ffn,
        "balance": "bias",
        "expert_groups": c.integer("n_group", 8),
        "top_groups": c.integer("topk_group", 4),
        "normalise_top_k": c.flag("norm_topk_prob", True),
        "routed_scale": c.number("routed_scaling_factor", 2.5),
        "kv_rank": c.integer("kv_lora_rank"),
        "q_rank": c.integer("q_lora_rank", 0),
        "rope_dim": rope,
        "value_dim": c.integer("v_head_dim"),
    }


_READERS: dict[str, Callable[[_Config], dict[str, Any]]] = {
    "llama": _llama, "mistral": _mistral, "qwen2": _qwen2, "qwen3": _qwen3, "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral, "gpt2": _gpt2, "gemma": _gemma, "gemma2": _gemma2, "deepseek_v3": _deepseek_v3,
}  # fmt: skip
_CLASSES = {
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3_moe", "MixtralForCausalLM": "mixtral",
    "GPT2LMHeadModel": "gpt2", "GemmaForCausalLM": "gemma", "Gemma2ForCausalLM": "gemma2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
}  # fmt: skip
