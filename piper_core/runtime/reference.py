"""One process that runs the same slices in sequence: what every legal program must equal (DESIGN, section 4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from piper_core.models import counting, set_loss_weight, update_balance
from piper_core.runtime.optimizer import AdamW, Optimizer
from piper_core.runtime.program import Training
from piper_core.runtime.slices import Slicing, cut_batch


@dataclass(frozen=True, slots=True)
class Result:
    """One step: the loss, the norm of the gradient before it was clipped, and by name gradients (clipped) and updated
    parameters and buffers."""

    loss: float
    norm: float
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]


class Reference:
    """A whole model in one process, run slice by slice with autograd."""

    def __init__(self, model: nn.Module, slicing: Slicing, training: Training) -> None:
        self.model, self.slicing, self.training = model, slicing, training
        self.optimizer = _torch_optimizer(training.optimizer, list(model.parameters()))

    def step(self, *inputs: Tensor) -> Result:
        """Run one step on the global batch."""
        self.optimizer.zero_grad()
        loss = 0.0
        slicing, training = self.slicing, self.training
        with counting(self.model) as counts:
            for replica in range(slicing.replicas):
                parts = cut_batch(inputs, slicing, replica, range(slicing.microbatches), training.reduction)
                for part in parts.values():
                    set_loss_weight(self.model, part.auxiliary)
                    each = self.model(*part.inputs)
                    (each * part.weight).backward()
                    loss += float(each.detach()) * part.weight
        update_balance(self.model, counts, training.balance_rate)
        parameters = [each for each in self.model.parameters() if each.grad is not None]
        limit = training.clip.max_norm if training.clip is not None else float("inf")
        norm = float(nn.utils.clip_grad_norm_(parameters, limit))
        gradients = {name: each.grad.clone() for name, each in self.model.named_parameters() if each.grad is not None}
        self.optimizer.step()
        after = {name: each.detach().clone() for name, each in self.model.named_parameters()}
        return Result(loss, norm, gradients, after, {name: each.clone() for name, each in self.model.named_buffers()})

    def steps(self, batches: Sequence[tuple[Tensor, ...]], see: Callable[[Result], None]) -> None:
        """Run a step on each batch."""
        for batch in batches:
            see(self.step(*batch))


def _torch_optimizer(config: Optimizer, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return torch's plain optimizer, one tensor after another."""
    if isinstance(config, AdamW):
        return torch.optim.AdamW(parameters, config.lr, config.betas, config.eps, config.weight_decay, foreach=False)
    return torch.optim.SGD(parameters, config.lr, config.momentum, weight_decay=config.weight_decay, foreach=False)
