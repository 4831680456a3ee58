"""How tensor parallelism divides a mixture: each expert by its width; the router is whole on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional

from piper_core.frontend.sharding_plan import Column, Style, TensorGroup, divide, local, replace_forward
from piper_core.models.grouped import grouped_linear
from piper_core.models.moe import Experts, Routed
from piper_core.models.transformer import Block


def mixture_plan(block: Block, group: TensorGroup) -> dict[str, ParallelStyle]:
    """Return the styles of a block's experts, by name; none in a dense block."""
    if not hasattr(block, "moe"):
        return {}
    experts = block.moe.experts
    plan: dict[str, ParallelStyle] = {"moe.router": Routes(group), "moe.experts": Mixture(group)}
    for name in ("gate", "up", "down"):
        if getattr(experts, name) is not None:
            plan[f"moe.experts.{name}"] = Grouped(group, 2 if name == "down" else 1)
    if experts.shared is not None:
        shared = ("gate", "up") if experts.shared.gate is not None else ("up",)
        plan |= {f"moe.experts.shared.{name}": Column(group) for name in shared}
        plan["moe.experts.shared.down"] = PartialRow(group)
    return plan


class Routes(Style):
    """Router that sees a part of the tokens: the auxiliary loss is of all, each rank giving its tokens' gradients."""

    def apply(self, module: nn.Module) -> None:
        group = self.group

        def share(counts: Tensor, dtype: torch.dtype) -> Tensor:
            every = group.leave(counts, whole=True)
            return every.to(dtype) / (every.sum() * group.mesh.size())

        if group.sequence:
            module.share = share  # type: ignore[assignment]  # a Router's method


class PartialRow(Style):
    """Linear layer divided by inputs whose partial sums stay partial; the first rank adds the bias."""

    def apply(self, module: nn.Module) -> None:
        divide(module, "weight", self.group.mesh, 1)
        size = self.group.mesh.size()

        def forward(self: Any, x: Tensor) -> Tensor:
            y: Tensor = functional.linear(x, local(self.weight))
            return y if self.bias is None else y + self.bias / size

        replace_forward(module, forward)


class Grouped(Style):
    """Every expert's linear layer divided along ``dim`` of its weight (experts, out, in)."""

    def __init__(self, group: TensorGroup, dim: int) -> None:
        super().__init__(group)
        self.dim = dim

    def apply(self, module: nn.Module) -> None:
        divide(module, "weight", self.group.mesh, self.dim)
        size = 1 if self.dim == 1 else self.group.mesh.size()
        if self.dim == 1:
            divide(module, "bias", self.group.mesh, 1)

        def forward(self: Any, x: Tensor, counts: Tensor) -> Tensor:
            y: Tensor = grouped_linear(x, local(self.weight), counts)
            if self.bias is None:
                return y
            return y + (local(self.bias) / size).repeat_interleave(counts, 0, output_size=len(x))

        replace_forward(module, forward)


class Mixture(Style):
    """Experts between what enters, rows and weights, and what leaves, their weighted sum.

    Under sequence parallelism each rank routes its own tokens: rows are gathered with their counts, sorted by expert,
    and what the experts made of them is scattered back to where they came from.
    """

    def apply(self, module: nn.Module) -> None:
        group = self.group

        def forward(self: Experts, x: Tensor, routed: Routed) -> Tensor:
            return x + (_exchanged if group.sequence else _reduced)(self, routed, group)

        replace_forward(module, forward)


def _reduced(experts: Experts, routed: Routed, group: TensorGroup) -> Tensor:
    """Return what experts add where every rank has every token.

    Tokens enter, and are copied for their experts afterwards: the gradients of a token's copies are summed before ranks
    sum theirs.
    """
    whole, weights = group.enter(routed.normed), group.enter(routed.weights)
    order = _inverse(routed.places)
    rows = whole.flatten(0, 1).index_select(0, order // weights.shape[1])
    out = experts.combine(experts.compute(rows, routed.counts), routed._replace(weights=weights))
    return group.leave(out if experts.shared is None else out + experts.shared(whole))


def _exchanged(experts: Experts, routed: Routed, group: TensorGroup) -> Tensor:
    """Return what experts add to this rank's part of the sequence."""
    size = group.mesh.size()
    along = TensorGroup(group.mesh, True)
    rows = along.enter(routed.rows.unsqueeze(0)).squeeze(0)
    counts = whole_counts(routed.counts, group)
    expert = torch.arange(counts.shape[1], device=counts.device).repeat(size)
    order = expert.repeat_interleave(counts.flatten(), output_size=len(rows)).sort(stable=True).indices
    y = experts.compute(rows.index_select(0, order), counts.sum(0)).index_select(0, _inverse(order))
    out = experts.combine(along.leave(y.unsqueeze(0)).squeeze(0), routed)
    if experts.shared is not None:
        out = out + group.leave(experts.shared(group.enter(routed.normed)))
    return out


def _inverse(order: Tensor) -> Tensor:
    """Return where each of 0, 1, ... lies in a permutation."""
    return torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))


def whole_counts(counts: Tensor, group: TensorGroup) -> Tensor:
    """Return every rank's counts, (ranks, experts)."""
    spread = DTensor.from_local(counts.unsqueeze(0), group.mesh, (Shard(0),), run_check=False)
    return spread.redistribute(placements=(Replicate(),)).to_local()
