"""How tensor parallelism divides the modules of a model (Shoeybi 2019, arXiv 1909.08053, section 3).

Weights become DTensors, of which a rank holds its part; activations are plain tensors, the rank's own. Where values
enter what is divided and where they leave it, a DTensor changes its placement, which is a collective in one direction
and its transpose in the other::

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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional

from piper_core.models.attention import Attention, LatentAttention
from piper_core.models.feed_forward import FeedForward
from piper_core.models.moe import Experts


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """The ranks that divide a model, and whether they divide the sequence too where they do not divide weights."""

    mesh: DeviceMesh
    sequence: bool = False

    @property
    def outside(self) -> Placement:
        """Where activations lie outside divided layers."""
        return Shard(1) if self.sequence else Replicate()

    def enter(self, x: Tensor) -> Tensor:
        """Return x whole on every rank; its gradient is summed over ranks."""
        whole = DTensor.from_local(x, self.mesh, (self.outside,), run_check=False).redistribute(
            placements=(Replicate(),)
        )
        return whole.to_local(grad_placements=(Partial(),))

    def leave(self, x: Tensor, operation: str = "sum", *, whole: bool = False) -> Tensor:
        """Return the sum of the ranks' x, this rank's part of the sequence (``whole``: all of it)."""
        outside = Replicate() if whole else self.outside
        summed = DTensor.from_local(x, self.mesh, (Partial(operation),), run_check=False)
        return summed.redistribute(placements=(outside,)).to_local()


def local(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def divide(module: nn.Module, name: str, mesh: DeviceMesh, dim: int) -> None:
    """Replace a parameter by this rank's part along ``dim``; nothing is sent."""
    whole = getattr(module, name)
    if whole is None or isinstance(whole, DTensor):
        return
    part = whole.detach().chunk(mesh.size(), dim)[mesh.get_local_rank()].contiguous()
    setattr(module, name, nn.Parameter(DTensor.from_local(part, mesh, (Shard(dim),), run_check=False)))


class Style(ParallelStyle):
    """A style of ours: ``_apply`` is what ``parallelize_module`` calls."""

    def __init__(self, group: TensorGroup) -> None:
        self.group = group

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.apply(module)
        return module

    def apply(self, module: nn.Module) -> None:
        raise NotImplementedError


class Enter(Style):
    """What the module returns enters what is divided."""

    def apply(self, module: nn.Module) -> None:
        module.register_forward_hook(lambda _module, _inputs, output: self.group.enter(output))


class Column(Style):
    """Linear layer divided by outputs, which stay where they are."""

    def apply(self, module: nn.Module) -> None:
        divide(module, "weight", self.group.mesh, 0)
        divide(module, "bias", self.group.mesh, 0)
        replace_forward(module, _column)


class Row(Style):
    """Linear layer divided by inputs; partial sums leave, and the whole bias is added once."""

    def apply(self, module: nn.Module) -> None:
        divide(module, "weight", self.group.mesh, 1)
        group = self.group

        def forward(self: Any, x: Tensor) -> Tensor:
            y = group.leave(functional.linear(x, local(self.weight)))
            return y if self.bias is None else y + self.bias

        replace_forward(module, forward)


def _column(self: Any, x: Tensor) -> Tensor:
    return functional.linear(x, local(self.weight), None if self.bias is None else local(self.bias))


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Give one module another forward."""
    module.forward = MethodType(forward, module)


def block_plan(block: nn.Module, group: TensorGroup) -> dict[str, ParallelStyle]:
    """Return the styles of a block's attention and dense or shared feed-forward layers, by name."""
    plan: dict[str, ParallelStyle] = {}
    for name, module in block.named_modules():
        found: dict[str, ParallelStyle] = {}
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
) -> dict[str, ParallelStyle]:
    made: dict[str, ParallelStyle] = {name: Enter(group) for name in enter}
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
                if not isinstance(parameter, DTensor):
                    found.add(f"{prefix}.{name}.{each}" if prefix else f"{name}.{each}")
    for name, parameter in model.named_parameters():
        if group.sequence and not isinstance(parameter, DTensor):
            found.add(name)
    return tuple(sorted(found))
