"""A communicator for one rank: answers of the right shape, at once, made of what the rank itself has.

So the chunks of a model that ranks divide run without the other ranks, and take the time of their compute; what the
collectives themselves take is measured apart. Results are copies, as those of real groups are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from piper_core.frontend.degrees import Degrees


@dataclass(frozen=True, slots=True)
class Alone:
    """Rank 0 of groups whose other members are just like it."""

    degrees: Degrees

    def rank(self, axis: str) -> int:
        return 0

    def all_reduce(self, x: Tensor, operation: str, axis: str) -> Tensor:
        return x.clone()

    def all_gather(self, x: Tensor, axis: str) -> Tensor:
        return x.repeat(self.degrees.by_axis()[axis], *[1] * (x.dim() - 1))

    def reduce_scatter(self, x: Tensor, axis: str) -> Tensor:
        return x[: x.shape[0] // self.degrees.by_axis()[axis]].clone()

    def all_to_all(self, x: Tensor, arriving: Sequence[int], leaving: Sequence[int], axis: str) -> Tensor:
        """As many rows as arrive, from the first on; where more arrive than left, again from the first."""
        want, have = sum(arriving), x.shape[0]
        if not have:
            return x.new_zeros(want, *x.shape[1:])
        return x.repeat(-(-want // have), *[1] * (x.dim() - 1))[:want].contiguous() if want > have else x[:want].clone()

    def pass_on(self, tensors: Sequence[Tensor], axis: str) -> Callable[[], list[Tensor]]:
        copies = [each.clone() for each in tensors]
        return lambda: copies
