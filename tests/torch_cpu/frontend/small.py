"""Small models of a person's own, as no preset is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from piper_core import annotate


class Plain(nn.Module):
    """A stack of blocks that knows nothing of annotations; attention and mlp are found by their names."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.before = nn.LayerNorm(width)
            self.attn = nn.Linear(width, width)
            self.after = nn.LayerNorm(width)
            self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attn(self.before(x))
            return x + self.mlp(self.after(x))

    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(4, width)
        self.blocks = nn.ModuleList(self.Block(width) for _ in range(depth))
        self.leave = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x).square().mean()


class Staged(nn.Module):
    """Two annotated stages without layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            x = self.first(x).relu()
        with annotate("PP"), annotate("attention"):
            x = annotate("EP")(self.second)(x)
        return x.sum()


class Shared(nn.Module):
    """One weight, used directly by two blocks: its gradient has parts from both."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        with annotate("PP"):
            x = torch.tanh(x @ self.weight)
        with annotate("PP"):
            x = torch.tanh(x @ self.weight.T) @ self.weight
        return x.square().sum()


class Circle(nn.Module):
    """Two regions that feed each other in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with annotate("LAYER"):
            with annotate("attention"):
                x = self.a(x)
            with annotate("mlp"):
                x = self.b(x)
            with annotate("attention"):
                x = self.c(x)
        return x.sum()


class Failing(nn.Module):
    """A forward that ``how`` spoils."""

    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(4, 4), how
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.linear(x)).sum()


def gradients(model: nn.Module, *inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and gradients by eager autograd."""
    model.zero_grad(set_to_none=True)
    loss = model(*inputs)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
