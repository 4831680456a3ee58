"""Attention and rotary positions against their definitions."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from piper_core.arch import Architecture, RopeScaling
from piper_core.models import build_block
from piper_core.models.rotary import Rotary, frequencies, rotate, score_scale
from tests.torch_cpu.models.tiny import LLAMA, TINY

CPU = torch.device("cpu")


def rope_of(architecture: Architecture, seq: int = 16) -> tuple[Tensor, Tensor]:
    return Rotary(architecture, CPU, torch.float64)(seq)


def test_grouped_queries_equal_keys_repeated() -> None:
    grouped = build_block(LLAMA, 0, dtype=torch.float64).attention
    full = build_block(replace(LLAMA, kv_heads=4), 0, dtype=torch.float64).attention
    state = grouped.state_dict()
    for name in ("k.weight", "v.weight"):
        state[name] = state[name].view(2, 8, 32).repeat_interleave(2, 0).flatten(0, 1)
    full.load_state_dict(state)
    x, rope = torch.randn(2, 16, 32, dtype=torch.float64), rope_of(LLAMA)
    torch.testing.assert_close(grouped(x, rope), full(x, rope))


@pytest.mark.parametrize("name", ["llama", "qwen3", "deepseek"])
def test_attention_is_softmax_of_scaled_scores(name: str) -> None:
    """The fused kernel against the definition, from the queries, keys and values that reach it."""
    from unittest.mock import patch

    architecture = TINY[name]
    attention = build_block(architecture, 0, dtype=torch.float64).attention
    seen: list[Tensor] = []

    def plain(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float, enable_gqa: bool = False) -> Tensor:
        seen.append(q)
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        mask = torch.full((q.shape[2], q.shape[2]), float("-inf"), dtype=q.dtype).triu(1)
        return (q @ k.mT * scale + mask).softmax(-1) @ v

    x, rope = torch.randn(2, 16, 32, dtype=torch.float64), rope_of(architecture)
    fused = attention(x, rope)
    with patch("torch.nn.functional.scaled_dot_product_attention", plain):
        torch.testing.assert_close(attention(x, rope), fused)
    assert seen


def test_positions_count_by_their_distance() -> None:
    architecture = replace(LLAMA, head_dim=16)
    q, k = torch.randn(2, 16, dtype=torch.float64)
    cos, sin = rope_of(architecture, 32)

    def score(i: int, j: int) -> Tensor:
        return rotate(q, (cos[i], sin[i])) @ rotate(k, (cos[j], sin[j]))

    torch.testing.assert_close(score(3, 1), score(20, 18))
    torch.testing.assert_close(score(0, 0), q @ k)
    torch.testing.assert_close(rotate(q, (cos[9], sin[9])).norm(), q.norm())
    assert not torch.isclose(score(3, 1), score(3, 2))


def test_frequencies_are_stretched() -> None:
    plain = frequencies(16, 10_000.0, None)
    assert plain[0] == 1.0
    assert plain[4] == pytest.approx(0.01)
    assert frequencies(16, 10_000.0, RopeScaling("linear", 4.0)) == [f / 4 for f in plain]
    for scaling in (RopeScaling("llama3", 8.0, 64, 1.0, 4.0), RopeScaling("yarn", 8.0, 64, 1.0, 32.0)):
        blended = frequencies(16, 10_000.0, scaling)
        assert blended[0] == pytest.approx(plain[0])  # short wavelengths as they are
        assert blended[-1] == pytest.approx(plain[-1] / 8)  # long ones stretched
        assert all(f / 8 <= b <= f for f, b in zip(plain, blended, strict=True))


def test_yarn_has_a_temperature() -> None:
    temperature = 0.1 * math.log(40) + 1
    plain, deepseek = RopeScaling("yarn", 40.0, 4096), RopeScaling("yarn", 40.0, 4096, 1.0, 32.0, 1.0, 1.0)
    cos, _ = rope_of(replace(LLAMA, rope_scaling=plain))
    assert float(cos[0, 0]) == pytest.approx(temperature)
    assert score_scale(plain) == score_scale(None) == 1.0
    cos, _ = rope_of(replace(LLAMA, rope_scaling=deepseek))
    assert float(cos[0, 0]) == 1.0
    assert score_scale(deepseek) == pytest.approx(temperature**2)
