"""What a step does to the parameters of a rank beside chunks: clear gradients, the norm's pass, Adam."""

from __future__ import annotations

import torch

from piper_core.runtime.optimizer import AdamW, Updater
from profiler.measure.clock import Clock
from profiler.measure.repeat import Effort, sample
from profiler.record import Sample, UpdateTime

SIZES = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
"""Parameters of a rank; a line through them gives others."""


def measure_updates(clock: Clock, effort: Effort, device: str = "cpu") -> tuple[UpdateTime, ...]:
    """Return the times of an update of flat fp32 parameters, by size."""
    return tuple(UpdateTime(numel, _one(numel, clock, effort, device)) for numel in SIZES)


def _one(numel: int, clock: Clock, effort: Effort, device: str) -> Sample:
    master = torch.randn(numel, device=device)
    updater = Updater(AdamW(), [master])
    gradient = torch.randn(numel, device=device)

    def step() -> None:
        gradient.zero_()
        total = torch.linalg.vector_norm(gradient).double() ** 2
        float(total)
        updater.update([gradient])

    return sample(step, clock, effort)
