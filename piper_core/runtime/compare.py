"""Compare a run with one process that trains the whole model: for models that fit into one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from piper_core.errors import ConfigError
from piper_core.models import build_model
from piper_core.runtime.model import ArchitectureSource, ModelSource, ModuleSource
from piper_core.runtime.optimizer import AdamW
from piper_core.runtime.program import Training
from piper_core.runtime.reference import Reference
from piper_core.runtime.slices import Slicing

LIMITS = {torch.float64: 1e-8, torch.float32: 1e-5}
"""Largest difference that rounding explains, relative to the largest value of each tensor; 3e-2 in narrower types."""
DRIFT = 1e-2
"""The limit after AdamW's first step, but for float64: it divides gradients by their size, which makes steps of those
that are nothing but rounding, and one process rounds otherwise than many. Under SGD rounding adds up step by step."""
FLOOR = 1e-3
"""What values are at least taken to be as large as, so that tensors of next to nothing do not count."""


def difference(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference of two tensors relative to the largest value; infinity for what is no number."""
    scale = max(float(wanted.abs().max()), FLOOR)
    error = float((found.to(wanted.dtype) - wanted).abs().max()) / scale
    return error if error == error else float("inf")


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest relative differences of one step, and the parameter whose gradient differs most."""

    loss: float
    gradient: float
    name: str
    limit: float

    @property
    def equal(self) -> bool:
        return max(self.loss, self.gradient) <= self.limit


class OneProcess:
    """The whole model here, trained slice by slice; steps must be those of the run, from its first one on."""

    def __init__(self, source: ModelSource, slicing: Slicing, training: Training) -> None:
        """Build it with the weights that the run begins with.

        Raises:
            ConfigError: a model of which nothing whole can be built.
        """
        if isinstance(source, ArchitectureSource):
            model: nn.Module = build_model(source.architecture, dtype=source.dtype, seed=source.seed)
        elif isinstance(source, ModuleSource):
            model = source.module
        else:
            raise ConfigError("only built-in models and modules can be compared with one process")
        self._limit = LIMITS.get(source.dtype, 3e-2)
        self._drifts = source.dtype != torch.float64 and isinstance(training.optimizer, AdamW)
        self._steps = 0
        self._reference = Reference(model, slicing, training)

    def step(self, batch: tuple[Tensor, ...], loss: float, gradients: Mapping[str, Tensor]) -> Difference:
        """Train one step and say how the run's loss and gradients differ."""
        wanted = self._reference.step(*batch)
        drifted, self._steps = self._drifts and self._steps > 0, self._steps + 1
        limit = max(self._limit, DRIFT) if drifted else self._limit * self._steps
        worst = max(
            ((difference(gradients[name], value), name) for name, value in wanted.gradients.items()),
            default=(0.0, ""),
        )
        return Difference(difference(torch.tensor(loss), torch.tensor(wanted.loss)), *worst, limit)
