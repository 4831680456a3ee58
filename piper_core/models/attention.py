"""The attention region: norm, attention, output projection, residual add."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from piper_core.arch.record import Architecture
from piper_core.models.layers import Linear, RMSNorm, norm
from piper_core.models.rotary import Rope, rotate, score_scale
from piper_core.names import Region


class Attention(nn.Module):
    """Grouped-query attention (arXiv 2305.13245). The number of heads follows the width of the projections, so that
    tensor parallelism may divide them."""

    region = Region.ATTENTION

    def __init__(self, architecture: Architecture, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        arch, self.head_dim = architecture, architecture.head_dim
        self.scale = (arch.query_scale or arch.head_dim) ** -0.5
        self.grouped = arch.heads != arch.kv_heads
        qkv_bias = arch.bias or arch.qkv_bias
        self.norm = norm(arch, device, dtype)
        self.q = Linear(arch.hidden, arch.q_width, qkv_bias, device, dtype)
        self.k = Linear(arch.hidden, arch.kv_width, qkv_bias, device, dtype)
        self.v = Linear(arch.hidden, arch.kv_width, qkv_bias, device, dtype)
        self.o = Linear(arch.q_width, arch.hidden, arch.bias, device, dtype)
        heads_norm = arch.qk_norm
        self.q_norm = RMSNorm(arch.head_dim, arch.norm_eps, device, dtype) if heads_norm else None
        self.k_norm = RMSNorm(arch.head_dim, arch.norm_eps, device, dtype) if heads_norm else None
        self.post_norm = norm(arch, device, dtype) if arch.post_norm else None

    def forward(self, x: Tensor, rope: Rope | None = None) -> Tensor:
        """Return (b, s, hidden) for x of (b, s, hidden)."""
        h = self.norm(x)
        q, k, v = (split_heads(linear(h), self.head_dim) for linear in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        out = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scale, enable_gqa=self.grouped
        )
        y: Tensor = self.o(out.transpose(1, 2).flatten(2))
        return x + (y if self.post_norm is None else self.post_norm(y))


class LatentAttention(nn.Module):
    """Multi-head latent attention (arXiv 2405.04434, section 2.1): queries, keys and values from low-rank latents, and
    one rotary key that all heads share. Values are padded to the width of keys, as flash kernels ask."""

    region = Region.ATTENTION

    def __init__(self, architecture: Architecture, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        arch, eps = architecture, architecture.norm_eps
        self.head_dim, self.rope_dim, self.value_dim = arch.head_dim, arch.rope_dim, arch.value_dim
        self.kv_rank, self.plain_dim = arch.kv_rank, arch.head_dim - arch.rope_dim
        self.scale = (arch.query_scale or arch.head_dim) ** -0.5 * score_scale(arch.rope_scaling)
        self.norm = norm(arch, device, dtype)
        self.q_down = Linear(arch.hidden, arch.q_rank, False, device, dtype) if arch.q_rank else None
        self.q_norm = RMSNorm(arch.q_rank, eps, device, dtype) if arch.q_rank else None
        self.q = Linear(arch.q_rank or arch.hidden, arch.q_width, False, device, dtype)
        self.kv_down = Linear(arch.hidden, arch.kv_rank + arch.rope_dim, False, device, dtype)
        self.kv_norm = RMSNorm(arch.kv_rank, eps, device, dtype)
        self.shared_key = nn.Identity()  # where tensor parallelism hands every rank the key that its heads share
        self.kv = Linear(arch.kv_rank, arch.heads * (self.plain_dim + arch.value_dim), False, device, dtype)
        self.o = Linear(arch.value_width, arch.hidden, False, device, dtype)
        self.post_norm = norm(arch, device, dtype) if arch.post_norm else None

    def forward(self, x: Tensor, rope: Rope | None = None) -> Tensor:
        """Return (b, s, hidden) for x of (b, s, hidden)."""
        assert rope is not None, "latent attention has rotary positions"
        h = self.norm(x)
        latent = self.q_norm(self.q_down(h)) if self.q_down is not None and self.q_norm is not None else h
        q = split_heads(self.q(latent), self.head_dim)
        q_plain, q_rope = torch.split(q, [self.plain_dim, self.rope_dim], dim=-1)
        down, k_rope = torch.split(self.kv_down(h), [self.kv_rank, self.rope_dim], dim=-1)
        kv = split_heads(self.kv(self.kv_norm(down)), self.plain_dim + self.value_dim)
        k_plain, v = torch.split(kv, [self.plain_dim, self.value_dim], dim=-1)
        k_rope = rotate(self.shared_key(k_rope).unsqueeze(1), rope).expand(-1, kv.shape[1], -1, -1)
        q, k = torch.cat((q_plain, rotate(q_rope, rope)), dim=-1), torch.cat((k_plain, k_rope), dim=-1)
        v = functional.pad(v, (0, self.head_dim - self.value_dim))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        y: Tensor = self.o(out[..., : self.value_dim].transpose(1, 2).flatten(2))
        return x + (y if self.post_norm is None else self.post_norm(y))


def split_heads(x: Tensor, width: int) -> Tensor:
    """Return (b, heads, s, width) for x of (b, s, heads x width)."""
    return x.view(*x.shape[:2], -1, width).transpose(1, 2)
