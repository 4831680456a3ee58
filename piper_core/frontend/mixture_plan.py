"""How tensor parallelism divides a mixture: each expert by its width; the router is whole on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from piper_core.frontend import exchange
from piper_core.frontend.sharding_plan import AXIS, Column, Style, TensorGroup, replace_forward
from piper_core.models.grouped import grouped_bias, grouped_linear
from piper_core.models.moe import Experts, Routed
from piper_core.models.transformer import Block


def mixture_plan(block: Block, group: TensorGroup) -> dict[str, Style]:
    """Return the styles of a block's experts, by name; none in a dense block."""
    if not hasattr(block, "moe"):
        return {}
    experts = block.moe.experts
    plan: dict[str, Style] = {"moe.router": Routes(group), "moe.experts": Mixture(group)}
    for name in ("gate", "up", "down"):
        if getattr(experts, name) is not None:
            plan[f"moe.experts.{name}"] = Grouped(group, 2 if name == "down" else 1)
    if experts.shared is not None:
        shared = ("gate", "up") if experts.shared.gate is not None else ("up",)
        plan |= {f"moe.experts.shared.{name}": Column(group) for name in shared}
        plan["moe.experts.shared.down"] = PartialRow(group)
    return plan


class Routes(Style):
    """Router that sees a part of the tokens under sequence parallelism."""

    def apply(self, module: nn.Module) -> None:
        if self.group.sequence:
            share_counts(module, AXIS, self.group.size)


def share_counts(router: nn.Module, axis: str, ranks: int) -> None:
    """Let a router's auxiliary loss be of the tokens of all ranks of ``axis``, each giving its tokens' gradients."""
    inner = router.share

    def share(counts: Tensor, dtype: torch.dtype) -> Tensor:
        part: Tensor = inner(exchange.all_reduce(counts, axis), dtype)  # type: ignore[operator]  # a Router's method
        return part / ranks

    router.share = share  # type: ignore[assignment]  # a Router's method


class PartialRow(Style):
    """Linear layer divided by inputs whose partial sums stay partial; the first rank adds the bias."""

    def apply(self, module: nn.Module) -> None:
        self.part(module, "weight", 1)
        size = self.group.size

        def forward(self: Any, x: Tensor) -> Tensor:
            y: Tensor = functional.linear(x, self.weight)
            return y if self.bias is None else y + self.bias / size

        replace_forward(module, forward)


class Grouped(Style):
    """Every expert's linear layer divided along ``dim`` of its weight (experts, out, in)."""

    def __init__(self, group: TensorGroup, dim: int) -> None:
        super().__init__(group)
        self.dim = dim

    def apply(self, module: nn.Module) -> None:
        self.part(module, "weight", self.dim)
        size = 1 if self.dim == 1 else self.group.size
        if self.dim == 1:
            self.part(module, "bias", 1)

        def forward(self: Any, x: Tensor, counts: Tensor) -> Tensor:
            y: Tensor = grouped_linear(x, self.weight, counts)
            if self.bias is not None:
                y = grouped_bias(y, self.bias / size, counts)
            return y

        replace_forward(module, forward)


class Mixture(Style):
    """Experts between what enters, rows and weights, and what leaves, their weighted sum.

    Under sequence parallelism each rank routes its own tokens: rows are gathered with their counts, sorted by expert,
    and what the experts made of them is scattered back to where they came from.
    """

    def apply(self, module: nn.Module) -> None:
        group = self.group
        if not group.sequence:
            replace_forward(module, lambda self, x, routed: x + _reduced(self, routed, group))
            return
        inner = module.compute

        def compute(rows: Tensor, counts: Tensor) -> Tensor:
            every = exchange.all_gather(counts.unsqueeze(0), 0, group.size, AXIS)
            y: Tensor = inner(exchange.gather_rows(rows, every, AXIS), every.sum(0))  # type: ignore[operator]
            scattered: Tensor = exchange.scatter_rows(y, every, AXIS)
            return scattered

        module.compute = compute  # type: ignore[assignment]  # what lies between dispatch and combine
        if module.shared is not None:
            shared = module.shared.forward  # type: ignore[union-attr]  # a FeedForward
            replace_forward(module.shared, lambda _self, x: group.leave(shared(group.enter(x))))  # type: ignore[arg-type]


def _reduced(experts: Experts, routed: Routed, group: TensorGroup) -> Tensor:
    """Return what experts add where every rank has every token.

    Tokens enter, and are copied for their experts afterwards: the gradients of a token's copies are summed before ranks
    sum theirs.
    """
    whole, weights = group.enter(routed.normed), group.enter(routed.weights)
    order = torch.empty_like(routed.places).scatter(
        0, routed.places, torch.arange(len(routed.places), device=routed.places.device)
    )
    rows = whole.flatten(0, 1).index_select(0, order // weights.shape[1])
    out = experts.combine(experts.compute(rows, routed.counts), routed._replace(weights=weights))
    return group.leave(out if experts.shared is None else out + experts.shared(whole))
