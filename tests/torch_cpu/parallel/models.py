"""Tiny models that the parallel tests run, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from piper_core.arch.record import Architecture
from piper_core.models import build_model
from piper_core.models.transformer import Transformer

LLAMA = Architecture("llama", 2, 64, 128, 8, 4, 8, 256)
GPT = Architecture(
    "gpt", 2, 64, 128, 8, 8, 8, 256,
    gated=False, bias=True, tied=True, learned_positions=64, norm="layer", activation="gelu_tanh",
)  # fmt: skip
QWEN = Architecture("qwen", 2, 64, 128, 8, 4, 16, 256, qk_norm=True, qkv_bias=True, logit_cap=5.0)
MIXTURE = Architecture("mixture", 2, 64, 0, 8, 4, 8, 256, experts=8, top_k=2, expert_ffn=32, balance_loss=0.1)
LATENT = Architecture(
    "latent", 2, 64, 0, 8, 8, 12, 256,
    experts=4, top_k=2, expert_ffn=32, shared_ffn=32, balance="bias",
    kv_rank=16, q_rank=24, rope_dim=4, value_dim=8,
)  # fmt: skip
SHORT_LATENT = Architecture("short-latent", 2, 64, 96, 8, 8, 12, 256, kv_rank=16, rope_dim=4, value_dim=8)
BIASED = Architecture(
    "biased", 2, 64, 0, 8, 8, 8, 256, bias=True, norm="layer", gated=False, experts=8, top_k=3, expert_ffn=32,
    shared_ffn=32,
)  # fmt: skip
BATCH, SEQ = 2, 16


def batch(seed: int, size: int = BATCH) -> tuple[Tensor, Tensor]:
    """Return tokens and targets, some of them left out."""
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = (torch.randint(0, 256, (size, SEQ), generator=generator) for _ in range(2))
    targets[:, ::5] = -100
    return tokens, targets


def built(architecture: Architecture) -> Transformer:
    """Return the embedding, one layer and the head, with no parameter at 0 or 1."""
    model = build_model(architecture, dtype=torch.float64, layers=1, seed=3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the greatest relative error of any gradient; those that are 0 but for rounding count as they are."""
    assert found.keys() == expected.keys()
    return max(relative(found[name], expected[name]) for name in expected)


def relative(found: Tensor, expected: Tensor) -> float:
    """Return the greatest difference over the greatest value."""
    scale = max(float(expected.abs().max()), 1e-7)
    return float((found - expected).abs().max()) / scale
