"""How a rank talks to others, whatever carries it: messages on channels, collectives in groups, all asynchronous."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Work(Protocol):
    """Something under way; tensors that it reads or writes must be left alone until it is over."""

    def wait(self) -> object:
        """Return when it is over; raise what went wrong."""
        ...


class Group(Protocol):
    """Ranks that exchange among themselves, as one of them sees it."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members in order."""
        ...

    @property
    def index(self) -> int:
        """Its own place among them."""
        ...


class Communicator(Protocol):
    """One rank's end of everything.

    The k-th send on a (source, destination, channel) meets the k-th receive there; the k-th collective of each member
    of a group meets those of the others. Nothing else orders or blocks anything. Tensors are contiguous.
    """

    @property
    def rank(self) -> int: ...

    def group(self, ranks: tuple[int, ...], label: str) -> Group:
        """Return the group of these ranks and label; every member must ask, all ranks in one order of labels."""
        ...

    def send(self, tensor: Tensor, peer: int, channel: int) -> Work: ...

    def recv(self, tensor: Tensor, peer: int, channel: int) -> Work:
        """Receive into ``tensor``."""
        ...

    def all_reduce(self, tensor: Tensor, group: Group, operation: str = "sum") -> Work:
        """Reduce in place; ``operation`` is sum, max or min."""
        ...

    def all_gather(self, out: Tensor, part: Tensor, group: Group) -> Work:
        """Gather equal parts into ``out``, one after another; ``part`` may be this rank's place there."""
        ...

    def reduce_scatter(self, out: Tensor, whole: Tensor, group: Group) -> Work:
        """Sum ``whole``, of which this rank's part (along dimension 0) goes to ``out``."""
        ...

    def all_to_all(
        self, out: Tensor, given: Tensor, arriving: Sequence[int], leaving: Sequence[int], group: Group
    ) -> Work:
        """Send ``leaving[i]`` rows of ``given`` to member i, and receive ``arriving[i]`` rows of ``out`` from it."""
        ...
