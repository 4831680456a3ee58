"""The model in Megatron's words: flags of Megatron-LM, fields of ``TransformerConfig``."""

from __future__ import annotations

from typing import Any

from piper_core.arch.record import Architecture


def model(arch: Architecture, seq_len: int, lost: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return flags and fields; what neither can say is added to ``lost``."""
    flags: dict[str, Any] = {
        "num-layers": arch.layers, "hidden-size": arch.hidden, "ffn-hidden-size": arch.ffn or arch.expert_ffn,
        "num-attention-heads": arch.heads, "kv-channels": arch.head_dim, "seq-length": seq_len,
        "max-position-embeddings": max(seq_len, arch.max_seq), "vocab-size": arch.vocab,
        "normalization": "RMSNorm" if arch.norm == "rms" else "LayerNorm", "norm-epsilon": arch.norm_eps,
        "disable-bias-linear": not arch.bias, "add-qkv-bias": arch.qkv_bias, "qk-layernorm": arch.qk_norm,
        "untie-embeddings-and-output-weights": not arch.tied, "attention-dropout": 0.0, "hidden-dropout": 0.0,
        "swiglu": arch.gated and arch.activation == "silu",
    }  # fmt: skip
    fields: dict[str, Any] = {
        "num_layers": arch.layers, "hidden_size": arch.hidden, "ffn_hidden_size": arch.ffn or arch.expert_ffn,
        "num_attention_heads": arch.heads, "kv_channels": arch.head_dim, "num_query_groups": arch.kv_heads,
        "normalization": flags["normalization"], "layernorm_epsilon": arch.norm_eps, "add_bias_linear": arch.bias,
        "add_qkv_bias": arch.qkv_bias, "qk_layernorm": arch.qk_norm, "gated_linear_unit": arch.gated,
        "activation_func": "silu" if arch.activation == "silu" else "gelu", "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }  # fmt: skip
    if arch.kv_heads != arch.heads:
        flags |= {"group-query-attention": True, "num-query-groups": arch.kv_heads}
    flags |= _positions(arch)
    for more in (_experts, _latent):
        more_flags, more_fields = more(arch)
        flags |= more_flags
        fields |= more_fields
    _odd(arch, lost)
    return flags, fields


def _positions(arch: Architecture) -> dict[str, Any]:
    if arch.learned_positions:
        return {"position-embedding-type": "learned_absolute"}
    flags: dict[str, Any] = {"position-embedding-type": "rope", "rotary-base": round(arch.rope_theta)}
    if arch.rope_scaling is not None and arch.rope_scaling.kind == "llama3":
        flags |= {"use-rope-scaling": True, "rope-scaling-factor": arch.rope_scaling.factor}
    return flags


def _experts(arch: Architecture) -> tuple[dict[str, Any], dict[str, Any]]:
    if not arch.experts:
        return {}, {}
    freq = [int(arch.is_moe(layer)) for layer in range(arch.layers)]
    biased = arch.balance == "bias"
    flags: dict[str, Any] = {
        "num-experts": arch.experts, "moe-router-topk": arch.top_k, "moe-ffn-hidden-size": arch.expert_ffn,
        "moe-token-dispatcher-type": "alltoall", "moe-grouped-gemm": True,
        "moe-layer-freq": "".join(str(freq).split()) if arch.dense_layers else 1,
        "moe-router-load-balancing-type": "none" if biased else "aux_loss",
        "moe-aux-loss-coeff": 0.0 if biased else arch.balance_loss,
    }  # fmt: skip
    fields: dict[str, Any] = {
        "num_moe_experts": arch.experts, "moe_router_topk": arch.top_k, "moe_ffn_hidden_size": arch.expert_ffn,
        "moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True,
        "moe_layer_freq": freq if arch.dense_layers else 1,
        "moe_router_load_balancing_type": flags["moe-router-load-balancing-type"],
        "moe_aux_loss_coeff": flags["moe-aux-loss-coeff"],
    }  # fmt: skip
    if arch.shared_ffn:
        flags["moe-shared-expert-intermediate-size"] = arch.shared_ffn
        fields["moe_shared_expert_intermediate_size"] = arch.shared_ffn
    if biased:
        flags |= {"moe-router-score-function": "sigmoid", "moe-router-enable-expert-bias": True}
        fields |= {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    if arch.expert_groups:
        flags |= {"moe-router-num-groups": arch.expert_groups, "moe-router-group-topk": arch.top_groups}
        fields |= {"moe_router_num_groups": arch.expert_groups, "moe_router_group_topk": arch.top_groups}
    if arch.routed_scale != 1.0:
        flags["moe-router-topk-scaling-factor"] = fields["moe_router_topk_scaling_factor"] = arch.routed_scale
    return flags, fields


def _latent(arch: Architecture) -> tuple[dict[str, Any], dict[str, Any]]:
    if not arch.kv_rank:
        return {}, {}
    sizes = {
        "kv_lora_rank": arch.kv_rank, "qk_head_dim": arch.head_dim - arch.rope_dim,
        "qk_pos_emb_head_dim": arch.rope_dim, "v_head_dim": arch.value_dim,
    } | ({"q_lora_rank": arch.q_rank} if arch.q_rank else {})  # fmt: skip
    flags = {name.replace("_", "-"): size for name, size in sizes.items()}
    return {"multi-latent-attention": True, **flags}, {"multi_latent_attention": True, **sizes}


def _odd(arch: Architecture, lost: list[str]) -> None:
    said = {
        "normalisation after attention and feed-forward": arch.post_norm,
        "scaled embeddings": arch.scaled_embedding,
        f"attention scale of {arch.query_scale}": arch.query_scale,
        f"logits capped at {arch.logit_cap:g}": arch.logit_cap,
        "gelu in a gated feed-forward": arch.gated and arch.activation != "silu",
        f"rotary positions stretched by {arch.rope_scaling.kind if arch.rope_scaling else ''}":
            arch.rope_scaling is not None and arch.rope_scaling.kind != "llama3",
    }  # fmt: skip
    lost += [f"of the model: {what} (no argument sets it)" for what, there in said.items() if there]
