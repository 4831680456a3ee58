"""Mixture of experts: the router region and the expert region, dropless.

The router sorts the copies of its tokens by expert and counts them: what expert parallelism exchanges. ``balanced``
routing replaces the choice, not the work: copy n goes to expert n mod experts, so that every expert has its fair share
whatever the weights. It is for timing and tracing costs; a model that trains is "dropless".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from piper_core.arch.record import Architecture
from piper_core.models.feed_forward import FeedForward
from piper_core.models.grouped import GroupedLinear
from piper_core.models.layers import Linear, activation, norm, widen
from piper_core.names import Region

Routing = Literal["dropless", "balanced"]


class Routed(NamedTuple):
    """What the router hands to the experts. ``rows`` (n, hidden) are copies of tokens, top-k for each, sorted by expert
    and then by token; ``counts`` (experts,) says how many each expert has, ``places`` (n,) in which row each token's
    copies lie, ``weights`` (n / k, k) what their outputs count for. ``normed`` is every token, (b, s, hidden), for a
    shared expert."""

    rows: Tensor
    counts: Tensor
    places: Tensor
    weights: Tensor
    normed: Tensor


class Router(nn.Module):
    """Norm, scores, choice of experts (ties go to the lower index), copies sorted by expert."""

    region = Region.ROUTER
    bias: Tensor
    loss_weight: Tensor

    def __init__(self, architecture: Architecture, routing: Routing, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        arch = self.architecture = architecture
        self.routing = routing
        self.norm = norm(arch, device, dtype)
        self.scores = Linear(arch.hidden, arch.experts, False, device, dtype)
        high = torch.float64 if dtype == torch.float64 else torch.float32
        if arch.balance == "bias":
            self.register_buffer("bias", torch.zeros(arch.experts, device=device, dtype=high))
        else:
            self.register_buffer("loss_weight", torch.ones((), device=device, dtype=high), persistent=False)

    def forward(self, x: Tensor) -> Routed:
        """Route x of (b, s, hidden)."""
        arch, h = self.architecture, self.norm(x)
        tokens = h.flatten(0, 1)
        logits = widen(self.scores(tokens))
        scores = logits.sigmoid() if arch.balance == "bias" else logits.softmax(-1)
        chosen = self._choose(scores)
        weights = scores.gather(1, chosen)
        if arch.normalise_top_k:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = weights * arch.routed_scale
        flat = chosen.flatten()
        counts = torch.zeros(arch.experts, dtype=torch.int64, device=x.device).scatter_add(
            0, flat, torch.ones_like(flat)
        )
        if arch.balance == "loss" and arch.balance_loss:
            share = self.share(counts, scores.dtype)
            loss = arch.balance_loss * arch.experts * (share * scores.mean(0)).sum()  # arXiv 2101.03961, equation 4
            weights = with_loss(weights, loss, self.loss_weight)
        order = flat.sort(stable=True).indices
        places = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=x.device))
        return Routed(tokens[order // arch.top_k], counts, places, weights.to(x.dtype), h)

    def share(self, counts: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the part of all copies that each expert is given."""
        return counts.to(dtype) / counts.sum()

    def _choose(self, scores: Tensor) -> Tensor:
        """Return the experts of each token, (tokens, top_k), highest score first."""
        arch, tokens = self.architecture, scores.shape[0]
        scores = scores.detach() + self.bias if arch.balance == "bias" else scores.detach()
        if arch.expert_groups:  # a group is worth its two best experts
            grouped = scores.view(tokens, arch.expert_groups, -1)
            worth = grouped.sort(dim=-1, descending=True).values[..., :2].sum(-1)
            best = worth.sort(dim=-1, descending=True, stable=True).indices[:, : arch.top_groups]
            barred = torch.ones_like(worth, dtype=torch.bool).scatter(1, best, False)
            scores = grouped.masked_fill(barred.unsqueeze(-1), float("-inf")).flatten(1)
        chosen = scores.sort(dim=-1, descending=True, stable=True).indices[:, : arch.top_k].contiguous()
        if self.routing == "balanced":
            return torch.arange(tokens * arch.top_k, device=scores.device).view(tokens, -1) % arch.experts
        return chosen


class Experts(nn.Module):
    """All experts, the shared one, weighted combination, residual add."""

    region = Region.EXPERT

    def __init__(self, architecture: Architecture, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        arch = architecture
        grouped = partial(GroupedLinear, arch.experts, bias=arch.bias, device=device, dtype=dtype)
        self.act = activation(arch.activation)
        self.gate = grouped(arch.hidden, arch.expert_ffn) if arch.gated else None
        self.up = grouped(arch.hidden, arch.expert_ffn)
        self.down = grouped(arch.expert_ffn, arch.hidden)
        self.shared = FeedForward(arch, arch.shared_ffn, device, dtype) if arch.shared_ffn else None

    def forward(self, x: Tensor, routed: Routed) -> Tensor:
        """Return (b, s, hidden): x and what the experts make of its copies."""
        out = self.combine(self.compute(routed.rows, routed.counts), routed)
        return x + out if self.shared is None else x + out + self.shared(routed.normed)

    def combine(self, y: Tensor, routed: Routed) -> Tensor:
        """Return (b, s, hidden): each token's weighted sum of what experts made of its copies, y (n, hidden)."""
        copies = y.index_select(0, routed.places).view(*routed.weights.shape, -1)
        return (copies * routed.weights.unsqueeze(-1)).sum(1).view_as(routed.normed)

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the outputs of rows (n, hidden) sorted by expert: what lies between dispatch and combine."""
        up = self.up(rows, counts)
        inner = self.act(up) if self.gate is None else self.act(self.gate(rows, counts)) * up
        return self.down(inner, counts)  # type: ignore[no-any-return]  # modules return Any


class Moe(nn.Module):
    """A layer's mixture: ``router``, then ``experts``, ``shared`` among them."""

    def __init__(self, architecture: Architecture, routing: Routing, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.router = Router(architecture, routing, device, dtype)
        self.experts = Experts(architecture, device, dtype)

    @property
    def shared(self) -> FeedForward | None:
        """The expert that all tokens use."""
        return self.experts.shared

    def forward(self, x: Tensor) -> Tensor:
        """Return (b, s, hidden) for x of (b, s, hidden)."""
        return self.experts(x, self.router(x))  # type: ignore[no-any-return]  # modules return Any


# --- balance ---


@torch.library.custom_op("piper_core::with_loss", mutates_args=())
def with_loss(x: Tensor, loss: Tensor, weight: Tensor) -> Tensor:
    """Return a copy of x whose backward also gives ``loss`` the gradient ``weight``.

    A block returns hidden states alone, so the auxiliary loss is not added to the model's loss: its gradient enters
    where its value is known, and no scalar travels between pipeline stages.
    """
    return x.clone()


@with_loss.register_fake
def _(x: Tensor, loss: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[2])


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    return gradient, ctx.saved_tensors[0].clone(), None


with_loss.register_autograd(_backward, setup_context=_save)


def routers(model: nn.Module) -> Iterator[tuple[int, Router]]:
    """Yield (layer, router) of each mixture in a model or a list of blocks."""
    for block in model.modules():
        router = getattr(getattr(block, "moe", None), "router", None)
        if isinstance(router, Router):
            yield int(block.index), router  # type: ignore[arg-type]  # a Block's


def set_loss_weight(model: nn.Module, weight: float) -> None:
    """Weigh auxiliary losses as the loss of this slice of the batch is weighed (1 unless set)."""
    for _, router in routers(model):
        if router.architecture.balance == "loss":
            router.loss_weight.fill_(weight)


@contextmanager
def counting(model: nn.Module) -> Iterator[dict[int, Tensor]]:
    """Add up, by layer, how many copies each expert is given in the forwards inside, (experts,) int64."""
    counts: dict[int, Tensor] = {}

    def hook(layer: int, module: nn.Module, inputs: object, routed: Routed) -> None:
        counts[layer] = counts[layer] + routed.counts if layer in counts else routed.counts

    hooks = [router.register_forward_hook(partial(hook, layer)) for layer, router in routers(model)]
    try:
        yield counts
    finally:
        for each in hooks:
            each.remove()


def update_balance(model: nn.Module, counts: Mapping[int, Tensor], rate: float = 0.001) -> None:
    """Move each bias by ``rate`` towards experts that had fewer copies than the mean (arXiv 2408.15664, algorithm 1);
    ``counts`` are of the whole batch, summed over data ranks. Models balanced by a loss stay as they are."""
    for layer, router in routers(model):
        if router.architecture.balance == "bias":
            given = counts[layer].to(router.bias.dtype)
            router.bias += rate * torch.sign(given.mean() - given)
