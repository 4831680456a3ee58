"""What updates the parameters: AdamW or SGD on a rank's shards, after clipping by the global norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, assert_never

import torch
from torch import Tensor

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
STEP = "step"
"""The state that counts updates."""
_add, _adamw, _sgd = (getattr(torch, name) for name in ("_foreach_add_", "_fused_adamw_", "_fused_sgd_"))


class Updater:
    """Updates flat tensors in place, with the fused kernels that ``torch.optim`` calls.

    Its classes are not used: making one imports torch's compiler, more than a second of every rank's start. ``states``
    are those of each tensor, by torch's names; there are none before the first update or :meth:`prepare`.
    """

    def __init__(self, config: Optimizer, masters: Sequence[Tensor]) -> None:
        self.config, self.masters = config, list(masters)
        self.states: list[dict[str, Tensor]] = []

    def prepare(self) -> None:
        """Make the states that a first update would make, of zeros."""
        if self.states:
            return
        for each in self.masters:
            state = {kind: torch.zeros_like(each) for kind in kinds(self.config)}
            if isinstance(self.config, AdamW):
                state[STEP] = torch.zeros((), dtype=torch.float32, device=each.device)
            self.states.append(state)

    def update(self, gradients: list[Tensor]) -> None:
        """Update once; ``gradients`` are like the tensors."""
        self.prepare()
        config = self.config

        def all_of(kind: str) -> list[Tensor]:
            return [state[kind] for state in self.states]

        match config:
            case AdamW():
                steps, (beta1, beta2) = all_of(STEP), config.betas
                _add(steps, 1)
                _adamw(
                    self.masters, gradients, all_of("exp_avg"), all_of("exp_avg_sq"), [], steps, lr=config.lr,
                    beta1=beta1, beta2=beta2, weight_decay=config.weight_decay, eps=config.eps, amsgrad=False,
                    maximize=False,
                )  # fmt: skip
            case SGD():
                _sgd(
                    self.masters, gradients, all_of("momentum_buffer") if config.momentum else [], lr=config.lr,
                    weight_decay=config.weight_decay, momentum=config.momentum, dampening=0.0, nesterov=False,
                    maximize=False, is_first_step=False,
                )  # fmt: skip
            case _:
                assert_never(config)


def kinds(config: Optimizer) -> tuple[str, ...]:
    """Return the states that are as long as what is updated."""
    if isinstance(config, AdamW):
        return "exp_avg", "exp_avg_sq"
    return ("momentum_buffer",) if config.momentum else ()


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
