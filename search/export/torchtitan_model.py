"""The model of a TorchTitan job (0.3), built from the parts of its Llama 3 and Qwen3 models with other sizes."""

from __future__ import annotations

from typing import Any

from piper_core.arch.record import Architecture
from search.export.python_text import literal


def function(arch: Architecture, name: str, lost: list[str]) -> str:
    """Return the source of ``job``, the function that describes the whole job; "" where no model comes near."""
    odd = (arch.bias, arch.qkv_bias, arch.post_norm, arch.learned_positions, arch.scaled_embedding, arch.query_scale,
           arch.logit_cap, arch.kv_rank)  # fmt: skip
    if arch.norm != "rms" or arch.activation != "silu" or not arch.gated or any(odd):
        return ""
    sizes: dict[str, Any] = {"n_layers": arch.layers, "dim": arch.hidden, "n_heads": arch.heads,
                             "n_kv_heads": arch.kv_heads}  # fmt: skip
    if not arch.experts and not arch.qk_norm and arch.head_dim * arch.heads == arch.hidden:
        return _llama(arch, name, sizes | {"hidden_dim": arch.ffn})
    mixed = arch.dense_layers or arch.shared_ffn or arch.expert_groups or arch.balance != "loss"
    if mixed or not arch.normalise_top_k or arch.routed_scale != 1.0 or arch.rope_scaling is not None:
        return ""
    if arch.experts:
        lost.append("the auxiliary loss that balances experts: TorchTitan moves a bias of each expert instead")
    return _qwen3(arch, name, sizes | {"head_dim": arch.head_dim})


def _embedding_init(arch: Architecture) -> str:
    """Name the initialisation of the embedding: a tied one is the head's."""
    return "_EMBEDDING_SKIP_INIT" if arch.tied else "_EMBEDDING_INIT"


def _llama(arch: Architecture, name: str, sizes: dict[str, Any]) -> str:
    scaling = arch.rope_scaling
    rope: dict[str, Any] = {"dim": arch.head_dim, "max_seq_len": arch.max_seq, "theta": arch.rope_theta}
    if scaling is not None:
        if scaling.kind != "llama3":
            return ""
        rope |= {"scaling": "llama", "scaling_factor": scaling.factor, "low_freq_factor": scaling.low,
                 "high_freq_factor": scaling.high, "original_max_position_embeddings": scaling.original}  # fmt: skip
    return _FUNCTION.format(
        sizes=literal(sizes), rope=literal(rope), vocab=arch.vocab, tied=arch.tied, name=name, eps=arch.norm_eps,
        package="llama3", model="Llama3Model", flavor="debugmodel", embedding_init=_embedding_init(arch),
        head_init="_output_linear_init(dim)", head_import="_output_linear_init", builder="_build_llama3_layers",
        rope_class="ComplexRoPE", more="", qk_norm="",
    )  # fmt: skip


def _qwen3(arch: Architecture, name: str, sizes: dict[str, Any]) -> str:
    rope = {"dim": arch.head_dim, "max_seq_len": arch.max_seq, "theta": arch.rope_theta}
    if arch.experts:
        sizes |= {"moe_hidden_dim": arch.expert_ffn, "num_experts": arch.experts, "top_k": arch.top_k}
    else:
        sizes |= {"hidden_dim": arch.ffn}
    return _FUNCTION.format(
        sizes=literal(sizes), rope=literal(rope), vocab=arch.vocab, tied=arch.tied, name=name, eps=arch.norm_eps,
        package="qwen3", model="Qwen3Model", flavor="debugmodel_moe" if arch.experts else "debugmodel",
        embedding_init=_embedding_init(arch), head_init="_LINEAR_INIT", head_import="_LINEAR_INIT",
        builder="_build_qwen3_moe_layers" if arch.experts else "_build_qwen3_layers", rope_class="CosSinRoPE",
        more=', moe_comm_backend="standard"' if arch.experts else "",
        qk_norm="" if arch.qk_norm else "        layer.attention.qk_norm = None\n",
    )  # fmt: skip


_FUNCTION = '''

SIZES = {sizes}
ROPE = {rope}
VOCAB = {vocab}


def job() -> Trainer.Config:
    """Return the whole job: model, parallelism, batch."""
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
    from torchtitan.models.common import {rope_class}, Embedding, Linear, RMSNorm
    from torchtitan.models.{package} import (
        {embedding_init}, _NORM_INIT, {builder}, {head_import}, {model}, model_registry,
    )

    dim = SIZES["dim"]
    layers = {builder}(**SIZES, rope={rope_class}.Config(**ROPE), attn_backend="flex"{more})
    for layer in layers:
        layer.attention_norm.eps = layer.ffn_norm.eps = {eps}
{qk_norm}    spec = model_registry("{flavor}")  # for its functions; the sizes are replaced
    spec.flavor = "{name}"
    spec.model = {model}.Config(
        dim=dim, vocab_size=VOCAB, enable_weight_tying={tied}, layers=layers,
        tok_embeddings=Embedding.Config(num_embeddings=VOCAB, embedding_dim=dim, param_init={embedding_init}),
        norm=RMSNorm.Config(normalized_shape=dim, eps={eps}, param_init=_NORM_INIT),
        lm_head=Linear.Config(in_features=dim, out_features=VOCAB, param_init={head_init}),
    )
    loss = ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=VOCAB))
    return apply(Trainer.Config(
        model_spec=spec, loss=loss, optimizer=default_adamw(lr=3e-4), training=TrainingConfig(),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"), hf_assets_path="./assets/hf/{name}",
    ))
'''
