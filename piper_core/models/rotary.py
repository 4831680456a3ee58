"""Rotary positions (arXiv 2104.09864), in the layout that turns the two halves of a head."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from piper_core.arch.record import Architecture, RopeScaling

Rope = tuple[Tensor, Tensor]
"""Cosines and sines, (s, rotary width) each."""


class Rotary(nn.Module):
    """Cosines and sines of positions 0 to s - 1, computed in at least fp32."""

    frequencies: Tensor

    def __init__(self, architecture: Architecture, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.amplitude = amplitude(architecture.rope_scaling)
        width = architecture.rope_dim or architecture.head_dim
        values = frequencies(width, architecture.rope_theta, architecture.rope_scaling)
        self.register_buffer("frequencies", torch.tensor(values, dtype=torch.float64, device=device), persistent=False)

    def forward(self, seq_len: int) -> Rope:
        high = torch.float64 if self.dtype == torch.float64 else torch.float32
        positions = torch.arange(seq_len, device=self.frequencies.device, dtype=high)
        angles = torch.outer(positions, self.frequencies.to(high)).repeat(1, 2)
        return (angles.cos() * self.amplitude).to(self.dtype), (angles.sin() * self.amplitude).to(self.dtype)


def frequencies(width: int, theta: float, scaling: RopeScaling | None) -> list[float]:
    """Return the radians a position of each pair of a head ``width`` wide."""
    plain = [theta ** (-2 * i / width) for i in range(width // 2)]
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return [f / scaling.factor for f in plain]
    if scaling.kind == "llama3":  # arXiv 2407.21783: long wavelengths stretched, short ones kept
        kept = [(scaling.original * f / (2 * math.pi) - scaling.low) / (scaling.high - scaling.low) for f in plain]
    else:
        first, last = (
            width * math.log(scaling.original / (rotations * 2 * math.pi)) / (2 * math.log(theta))
            for rotations in (scaling.high, scaling.low)
        )
        first, last = max(math.floor(first), 0), min(math.ceil(last), width - 1)
        kept = [1 - (i - first) / max(last - first, 1e-3) for i in range(width // 2)]
    kept = [min(max(part, 0.0), 1.0) for part in kept]
    return [part * f + (1 - part) * f / scaling.factor for part, f in zip(kept, plain, strict=True)]


def amplitude(scaling: RopeScaling | None) -> float:
    """Return what cosines and sines are multiplied by: yarn's temperature (arXiv 2309.00071, section 3.4) or 1."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.mscale and scaling.mscale_all_dim:
        return _temperature(scaling.factor, scaling.mscale) / _temperature(scaling.factor, scaling.mscale_all_dim)
    return _temperature(scaling.factor, 1.0)


def score_scale(scaling: RopeScaling | None) -> float:
    """Return what scores are multiplied by besides, where yarn's temperature is for all dimensions of a head, as in
    latent attention."""
    if scaling is None or scaling.kind != "yarn" or not scaling.mscale_all_dim:
        return 1.0
    return _temperature(scaling.factor, scaling.mscale_all_dim) ** 2


def _temperature(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Return x, (..., s, width), turned by its positions."""
    cos, sin = rope
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
