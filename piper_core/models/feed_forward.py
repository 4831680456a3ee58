"""The mlp region: norm, feed-forward block, residual add."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from piper_core.arch.record import Architecture
from piper_core.models.layers import Linear, activation, norm
from piper_core.names import Region


class FeedForward(nn.Module):
    """Two matrices round an activation, or three with a gate (arXiv 2002.05202); no norm, no residual."""

    def __init__(self, architecture: Architecture, ffn: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, bias = architecture.hidden, architecture.bias
        self.act = activation(architecture.activation)
        self.gate = Linear(hidden, ffn, bias, device, dtype) if architecture.gated else None
        self.up = Linear(hidden, ffn, bias, device, dtype)
        self.down = Linear(ffn, hidden, bias, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(self.act(self.up(x)))  # type: ignore[no-any-return]  # modules return Any
        return self.down(self.act(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]  # modules return Any


class Mlp(FeedForward):
    """A layer's dense feed-forward region."""

    region = Region.MLP

    def __init__(self, architecture: Architecture, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(architecture, architecture.ffn, device, dtype)
        self.norm = norm(architecture, device, dtype)
        self.post_norm = norm(architecture, device, dtype) if architecture.post_norm else None

    def forward(self, x: Tensor) -> Tensor:
        """Return (b, s, hidden) for x of (b, s, hidden)."""
        y = super().forward(self.norm(x))
        return x + (y if self.post_norm is None else self.post_norm(y))
