"""Small layers: linear and embedding without their own initialisation, norms, activations."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from piper_core.arch.record import Activation, Architecture


class Linear(nn.Linear):
    """``nn.Linear`` whose parameters are set afterwards, by name."""

    def reset_parameters(self) -> None:
        pass


class Embedding(nn.Embedding):
    """``nn.Embedding`` whose table is set afterwards, by name."""

    def reset_parameters(self) -> None:
        pass


class RMSNorm(nn.Module):
    """x / rms(x) in at least fp32, cast back, times a weight (arXiv 1910.07467), as eager Llama does."""

    def __init__(self, width: int, eps: float, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(width, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        high = widen(x)
        high = high * torch.rsqrt(high.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * high.to(x.dtype)


def norm(architecture: Architecture, device: torch.device, dtype: torch.dtype, width: int = 0) -> nn.Module:
    """Return the norm of an architecture over ``width`` (default: hidden)."""
    width = width or architecture.hidden
    if architecture.norm == "layer":
        return nn.LayerNorm(width, architecture.norm_eps, device=device, dtype=dtype)
    return RMSNorm(width, architecture.norm_eps, device, dtype)


def widen(x: Tensor) -> Tensor:
    """Return x in fp32, or as it is where it is wider."""
    return x if x.dtype == torch.float64 else x.float()


def activation(name: Activation) -> Callable[[Tensor], Tensor]:
    """Return the function of that name."""
    table: dict[Activation, Callable[[Tensor], Tensor]] = {
        "silu": functional.silu,
        "gelu": functional.gelu,
        "gelu_tanh": _gelu_tanh,
    }
    return table[name]


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")
