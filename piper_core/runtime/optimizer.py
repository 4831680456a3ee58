"""What updates the parameters: torch's AdamW or SGD on a rank's shards, after clipping by the global norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, assert_never

import torch
from torch import Tensor, nn

from piper_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AdamW:
    """AdamW (arXiv 1711.05101), for all parameters alike."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01


@dataclass(frozen=True, slots=True)
class SGD:
    """Stochastic gradient descent with momentum."""

    lr: float = 1e-2
    momentum: float = 0.0
    weight_decay: float = 0.0


Optimizer: TypeAlias = AdamW | SGD


def make_optimizer(config: Optimizer, parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    """Return torch's optimizer of tensors, which it updates in place."""
    held = [nn.Parameter(each, requires_grad=True) for each in parameters]
    match config:
        case AdamW():
            return torch.optim.AdamW(held, config.lr, config.betas, config.eps, config.weight_decay, fused=True)
        case SGD():
            return torch.optim.SGD(held, config.lr, config.momentum, weight_decay=config.weight_decay, fused=True)
        case _:
            assert_never(config)


@dataclass(frozen=True, slots=True)
class Clip:
    """Gradients are scaled down to a global norm of at most ``max_norm``."""

    max_norm: float

    def __post_init__(self) -> None:
        if not self.max_norm > 0:
            raise ConfigError(f"max_norm must be above 0, found {self.max_norm}")

    def scale(self, norm: float) -> float:
        """Return what to multiply gradients with; as ``torch.nn.utils.clip_grad_norm_``."""
        return min(1.0, self.max_norm / (norm + 1e-6))
