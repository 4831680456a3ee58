"""One small architecture of each kind."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from piper_core.arch import Architecture, RopeScaling

LLAMA = Architecture("llama", 3, 32, 48, 4, 2, 8, 97, max_seq=64)
_MIXTURE = replace(LLAMA, ffn=0, experts=8, top_k=3, expert_ffn=24)
TINY = {
    each.name: each
    for each in (
        LLAMA,
        replace(
            LLAMA, name="gpt", kv_heads=4, gated=False, bias=True, tied=True, activation="gelu_tanh",
            learned_positions=64, norm="layer",
        ),
        replace(LLAMA, name="qwen2", qkv_bias=True),
        replace(LLAMA, name="qwen3", qk_norm=True),
        replace(
            LLAMA, name="gemma2", tied=True, post_norm=True, activation="gelu_tanh", scaled_embedding=True,
            query_scale=16, logit_cap=5.0,
        ),
        replace(_MIXTURE, name="mixtral"),
        replace(_MIXTURE, name="qwen3-moe", qk_norm=True, ffn=48, dense_layers=1),
        replace(_MIXTURE, name="biased-experts", bias=True, gated=False, shared_ffn=16),
        replace(
            _MIXTURE, name="deepseek", kv_heads=4, ffn=48, dense_layers=1, shared_ffn=24, balance="bias",
            expert_groups=4, top_groups=2, routed_scale=2.5, kv_rank=16, q_rank=24, head_dim=20, rope_dim=8,
            value_dim=10, rope_scaling=RopeScaling("yarn", 4.0, 16, 1.0, 32.0, 1.0, 1.0),
        ),
        replace(LLAMA, name="mla-whole-queries", kv_heads=4, kv_rank=16, rope_dim=4, value_dim=8),
    )
}  # fmt: skip


def tokens(batch: int = 2, seq: int = 16, vocab: int = 97) -> Tensor:
    """Return fixed tokens (batch, seq)."""
    return (torch.arange(batch * seq) * 37 % vocab).view(batch, seq)
