"""Which part of the global batch each (rank, microbatch) gets, and what its loss weighs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from piper_core.errors import ConfigError
from piper_core.frontend.degrees import Degrees
from piper_core.frontend.rank_graphs import rank_part

IGNORED = -100
"""A target of that value is left out of the loss, as in ``torch.nn.functional.cross_entropy``."""


class Reduction(StrEnum):
    """How the losses of slices make one loss: every token counts alike, or every microbatch does."""

    TOKEN = "token"
    MICROBATCH = "microbatch"


@dataclass(frozen=True, slots=True)
class Slicing:
    """``replicas`` x ``microbatches`` slices of ``sequences`` each; slice (d, m) begins at sequence
    (m x replicas + d) x sequences."""

    replicas: int
    microbatches: int
    sequences: int

    @property
    def batch(self) -> int:
        """Sequences of the global batch."""
        return self.replicas * self.microbatches * self.sequences

    def rows(self, replica: int, microbatch: int) -> slice:
        """Return which sequences of the batch a slice is."""
        start = (microbatch * self.replicas + replica) * self.sequences
        return slice(start, start + self.sequences)

    def check(self, inputs: Sequence[Tensor]) -> None:
        """Reject a batch of another size.

        Raises:
            ConfigError: with the size that is expected.
        """
        for each in inputs:
            if len(each) != self.batch:
                raise ConfigError(
                    f"the batch has {len(each)} sequences; the strategy takes {self.batch}: {self.replicas} replicas x "
                    f"{self.microbatches} microbatches x {self.sequences}"
                )


@dataclass(frozen=True, slots=True)
class Slice:
    """One microbatch of one rank: its inputs, what its loss weighs, and what auxiliary losses of its tokens weigh."""

    inputs: tuple[Tensor, ...]
    weight: float
    auxiliary: float


def cut_batch(
    inputs: Sequence[Tensor],
    slicing: Slicing,
    replica: int,
    microbatches: Sequence[int],
    reduction: Reduction,
    degrees: Degrees | None = None,
    context: int = 0,
) -> dict[int, Slice]:
    """Return a rank's slices by microbatch; ``context`` is its place in its context group.

    The last of several inputs are the targets. With one input alone, or targets that are no integers, every sequence
    counts alike.

    Raises:
        ConfigError: a batch of another size; a slice of which no target counts.
    """
    slicing.check(inputs)
    degrees = degrees or Degrees()
    targets = inputs[-1] if len(inputs) > 1 and inputs[-1].dtype == torch.int64 else None
    valid = None if targets is None else (targets != IGNORED).flatten(1).sum(1)
    share = 1.0 / (slicing.replicas * slicing.microbatches)
    found = {}
    for microbatch in microbatches:
        rows = slicing.rows(replica, microbatch)
        mine = tuple(rank_part(each[rows], degrees, {"context": context}).contiguous() for each in inputs)
        weight = auxiliary = share
        if valid is not None:
            whole, part = int(valid[rows].sum()), int((mine[-1] != IGNORED).sum())
            if not part:
                raise ConfigError(
                    f"no target of microbatch {microbatch} of replica {replica} counts: the mean of its losses is "
                    "undefined"
                )
            if reduction is Reduction.TOKEN:
                auxiliary = whole / int(valid.sum())
            weight = auxiliary * part / whole
        found[microbatch] = Slice(mine, weight, auxiliary)
    return found
