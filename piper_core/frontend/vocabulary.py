"""Embedding, head and cross-entropy divided by vocabulary (Shoeybi 2019, arXiv 1909.08053, section 3).

Where a rank's part of the vocabulary or of the sequence begins is a buffer and not a constant, so that one graph serves
every rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from piper_core.frontend.sharding_plan import Column, Enter, Style, TensorGroup, replace_forward
from piper_core.models.layers import widen
from piper_core.models.transformer import Embed, Head

IGNORED = -100
"""The target that stands for none."""


def embed_plan(embed: Embed, group: TensorGroup) -> dict[str, Style]:
    """Return the styles of an embedding, by name."""
    plan: dict[str, Style] = {"tokens": Table(group)}
    if embed.positions is not None and group.sequence:
        plan["positions"] = Positions(group)
    return plan


def head_plan(group: TensorGroup) -> dict[str, Style]:
    """Return the styles of a head, by name; its loss is set by :func:`divide_loss`."""
    return {"norm": Enter(group), "projection": Column(group)}


class Table(Style):
    """Embedding divided by rows: each rank looks up the tokens that are its own, and the sum leaves."""

    def apply(self, module: nn.Module) -> None:
        group = self.group
        self.part(module, "weight", 0)
        offset(module, group, module.get_parameter("weight").shape[0])

        def forward(self: Any, tokens: Tensor) -> Tensor:
            row, strange = _own(tokens, self.first, self.weight.shape[0])
            found = functional.embedding(row, self.weight).masked_fill(strange.unsqueeze(-1), 0.0)
            return group.leave(found)

        replace_forward(module, forward)


class Positions(Style):
    """Learned positions of this rank's part of the sequence; the table is whole on every rank."""

    def apply(self, module: nn.Module) -> None:
        group = self.group
        offset(module, group, 1)

        def forward(self: Any, positions: Tensor) -> Tensor:
            length = positions.shape[0] // group.size
            mine = torch.arange(length, device=positions.device) + self.first * length
            return functional.embedding(positions.index_select(0, mine), self.weight)

        replace_forward(module, forward)


def divide_loss(head: Head, group: TensorGroup) -> None:
    """Let a head's loss take the rank's part of the logits."""
    offset(head, group, head.projection.weight.shape[0])

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        first = head.first
        assert isinstance(first, Tensor)
        return cross_entropy(widen(logits).flatten(0, 1), targets.flatten(), first, group)

    head.loss = loss  # type: ignore[method-assign]  # that is what the method is for


def cross_entropy(logits: Tensor, targets: Tensor, first: Tensor, group: TensorGroup) -> Tensor:
    """Return the mean cross-entropy of logits (n, part of the vocabulary that begins at ``first``), on every rank.

    Three numbers a token are reduced: the maximum, then the sum of exponentials and the target's logit together.
    """
    most = group.total(logits.detach().amax(-1), "max")
    shifted = logits - most.unsqueeze(-1)
    row, strange = _own(targets, first, logits.shape[1])
    picked = shifted.gather(1, row.unsqueeze(-1)).squeeze(-1).masked_fill(strange, 0.0)
    total, target = group.total(torch.stack((shifted.exp().sum(-1), picked))).unbind()
    counted = targets != IGNORED
    return (total.log() - target).masked_fill(~counted, 0.0).sum() / counted.sum()


def offset(module: nn.Module, group: TensorGroup, size: int) -> None:
    """Give a module the buffer ``first``: where the rank's part of what is ``size`` a rank begins."""
    module.register_buffer("first", torch.tensor(group.rank * size), persistent=False)


def _own(index: Tensor, first: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return indices into the rank's part, 0 where they lie outside, and where that is."""
    row = index - first
    strange = (row < 0) | (row >= size)
    return row.masked_fill(strange, 0), strange
