"""How tensor parallelism divides the modules of a model (Shoeybi 2019, arXiv 1909.08053, section 3).

A rank holds its part of a weight; activations are the rank's own. Where values enter what is divided and where they
leave it there is a collective (:mod:`piper_core.frontend.exchange`) in one direction and its transpose in the other::

    enter   tensor:   as it is              gradient: all_reduce
            sequence: all_gather            gradient: reduce_scatter
    leave   tensor:   all_reduce            gradient: as it is
            sequence: reduce_scatter        gradient: all_gather

One value enters a region for all layers that read it (PyTorch's own styles enter each layer by itself, which costs an
all_reduce a layer).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from piper_core.frontend import exchange
from piper_core.frontend.communicator import Operation
from piper_core.frontend.shares import divide, is_divided
from piper_core.models.attention import Attention, LatentAttention
from piper_core.models.feed_forward import FeedForward
from piper_core.models.moe import Experts

AXIS = "tensor"


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """The ranks that divide a model, this one's place, and whether they divide the sequence too where they do not
    divide weights."""

    size: int
    rank: int = 0
    sequence: bool = False

    def enter(self, x: Tensor) -> Tensor:
        """Return x (b, s, ...) whole on every rank; its gradient is summed over ranks."""
        return exchange.all_gather(x, 1, self.size, AXIS) if self.sequence else exchange.enter(x, AXIS)

    def leave(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' x (b, s, ...), under ``sequence`` this rank's part of it."""
        return exchange.reduce_scatter(x, 1, self.size, AXIS) if self.sequence else self.total(x)

    def total(self, x: Tensor, operation: Operation = "sum") -> Tensor:
        """Return the sum or maximum of the ranks' x, all of it."""
        return exchange.all_reduce(x, AXIS, operation)


class Style:
    """How one module is divided, in place."""

    def __init__(self, group: TensorGroup) -> None:
        self.group = group

    def part(self, module: nn.Module, name: str, dim: int) -> None:
        """Leave this rank its part of a parameter along ``dim``."""
        divide(module, name, AXIS, dim, self.group.rank, self.group.size)

    def apply(self, module: nn.Module) -> None:
        raise NotImplementedError


class Enter(Style):
    """What the module returns enters what is divided."""

    def apply(self, module: nn.Module) -> None:
        module.register_forward_hook(lambda _module, _inputs, output: self.group.enter(output))


class Column(Style):
    """Linear layer divided by outputs, which stay where they are."""

    def apply(self, module: nn.Module) -> None:
        self.part(module, "weight", 0)
        self.part(module, "bias", 0)


class Row(Style):
    """Linear layer divided by inputs; partial sums leave, and the whole bias is added once."""

    def apply(self, module: nn.Module) -> None:
        self.part(module, "weight", 1)
        group = self.group

        def forward(self: Any, x: Tensor) -> Tensor:
            y = group.leave(functional.linear(x, self.weight))
            return y if self.bias is None else y + self.bias

        replace_forward(module, forward)


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Give one module another forward."""
    module.forward = MethodType(forward, module)


def block_plan(block: nn.Module, group: TensorGroup) -> dict[str, Style]:
    """Return the styles of a block's attention and dense or shared feed-forward layers, by name."""
    plan: dict[str, Style] = {}
    for name, module in block.named_modules():
        found: dict[str, Style] = {}
        match module:
            case LatentAttention():
                column = ("q", "kv")
                enter = ("q_norm", "kv_norm", "shared_key") if module.q_norm is not None else ("norm",)
                found = _styles(group, enter, column, ("o",))
            case Attention():
                found = _styles(group, ("norm",), ("q", "k", "v"), ("o",))
            case FeedForward() if hasattr(module, "norm"):
                found = _styles(group, ("norm",), ("gate", "up") if module.gate is not None else ("up",), ("down",))
        plan |= {f"{name}.{child}" if name else child: style for child, style in found.items()}
    return plan


def _styles(
    group: TensorGroup, enter: tuple[str, ...], column: tuple[str, ...], row: tuple[str, ...]
) -> dict[str, Style]:
    made: dict[str, Style] = {name: Enter(group) for name in enter}
    made |= {name: Column(group) for name in column}
    return made | {name: Row(group) for name in row}


def summed_gradients(model: nn.Module, group: TensorGroup) -> tuple[str, ...]:
    """Return the parameters that every rank holds whole but of whose gradient it computes a part, to be summed; sorted,
    since all ranks must sum in one order.

    Those are: under sequence parallelism all that are whole, since each rank sees its part of the tokens; norms of
    single heads, since each rank sees its own heads; latent projections that read what has entered; biases of experts,
    of which each rank adds its part.
    """
    found = set()
    for prefix, module in model.named_modules():
        inside: tuple[str, ...] = ()
        if isinstance(module, Attention):
            inside = ("q_norm", "k_norm")
        elif isinstance(module, LatentAttention) and module.q_norm is None:
            inside = ("kv_down", "kv_norm")
        elif isinstance(module, Experts):
            inside = ("down", "shared")
        for name in inside:
            child = getattr(module, name)
            for each, parameter in child.named_parameters() if child is not None else ():
                if not is_divided(parameter, AXIS):
                    found.add(f"{prefix}.{name}.{each}" if prefix else f"{name}.{each}")
    for name, parameter in model.named_parameters():
        if group.sequence and not is_divided(parameter, AXIS):
            found.add(name)
    return tuple(sorted(found))
