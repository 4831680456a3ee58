"""A communicator for one rank: answers of the right shape, at once, made of what the rank itself has.

So the chunks of a model that ranks divide run without the other ranks, through the runtime's own groups, and take the
time of their compute; what the collectives themselves take is measured apart. Results are copies, as those of real
groups are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from piper_core.frontend.degrees import Degrees
from piper_core.runtime.communicator import Group, Work
from piper_core.runtime.groups import AxisGroups

_RING = 1


@dataclass(frozen=True, slots=True)
class Likes:
    """A group in which this rank is the first, and the others are just like it."""

    ranks: tuple[int, ...]
    index: int = 0


class Over:
    """What is over already."""

    def wait(self) -> None:
        """Return at once."""


OVER = Over()


class Alone:
    """Rank 0, whose messages come back to it."""

    rank = 0

    def __init__(self) -> None:
        self._messages: deque[Tensor] = deque()

    def group(self, ranks: tuple[int, ...], label: str) -> Group:
        return Likes(ranks)

    def send(self, tensor: Tensor, peer: int, channel: int) -> Work:
        self._messages.append(tensor)
        return OVER

    def recv(self, tensor: Tensor, peer: int, channel: int) -> Work:
        tensor.copy_(self._messages.popleft())
        return OVER

    def all_reduce(self, tensor: Tensor, group: Group, operation: str = "sum") -> Work:
        return OVER

    def all_gather(self, out: Tensor, part: Tensor, group: Group) -> Work:
        out.view(len(group.ranks), *part.shape).copy_(part)
        return OVER

    def reduce_scatter(self, out: Tensor, whole: Tensor, group: Group) -> Work:
        out.copy_(whole[: out.shape[0]])
        return OVER

    def all_to_all(
        self, out: Tensor, given: Tensor, arriving: Sequence[int], leaving: Sequence[int], group: Group
    ) -> Work:  # fmt: skip
        """Receive as many rows as arrive, from the first on; where more arrive than left, again from the first."""
        want, have = sum(arriving), given.shape[0]
        if not have:
            out.zero_()
        elif want > have:
            out.copy_(given.repeat(-(-want // have), *[1] * (given.dim() - 1))[:want])
        else:
            out.copy_(given[:want])
        return OVER


def groups_alone(degrees: Degrees) -> AxisGroups:
    """Return the groups of a rank that is alone, by axis."""
    return AxisGroups(Alone(), {axis: Likes(tuple(range(size))) for axis, size in degrees.by_axis().items()}, _RING)
