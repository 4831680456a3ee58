"""What communicators on ``torch.distributed`` have in common, whatever the backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar

import torch.distributed as dist
from torch import Tensor

from piper_core.runtime.communicator import Group, Work

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@dataclass(frozen=True, slots=True)
class Members:
    """A group's ranks and their process group."""

    ranks: tuple[int, ...]
    index: int
    handle: dist.ProcessGroup


class ProcessCommunicator:
    """One process's communicator: groups, and the collectives that are called alike. ``torch.distributed`` is set up
    before it is made.

    Groups are made by all of their members, in one order for every two of them; see
    :class:`piper_core.runtime.communicator.Communicator`.
    """

    backend: ClassVar[str]

    def __init__(self, timeout_s: float = 300.0) -> None:
        self.rank = dist.get_rank()
        self._timeout = timedelta(seconds=timeout_s)
        self._groups: dict[tuple[tuple[int, ...], str], Members] = {}

    def group(self, ranks: tuple[int, ...], label: str) -> Group:
        if (ranks, label) not in self._groups:
            made = dist.new_group(
                list(ranks), timeout=self._timeout, backend=self.backend, use_local_synchronization=True,
                group_desc=f"{label}-{'-'.join(map(str, ranks))}",
            )  # fmt: skip
            assert isinstance(made, dist.ProcessGroup)
            self._groups[ranks, label] = Members(ranks, ranks.index(self.rank), made)
        return self._groups[ranks, label]

    def all_reduce(self, tensor: Tensor, group: Group, operation: str = "sum") -> Work:
        return started(dist.all_reduce(tensor, _OPERATIONS[operation], handle(group), async_op=True))

    def all_to_all(
        self, out: Tensor, given: Tensor, arriving: Sequence[int], leaving: Sequence[int], group: Group
    ) -> Work:
        work = dist.all_to_all_single(out, given, list(arriving), list(leaving), handle(group), async_op=True)
        return started(work)


def handle(group: Group) -> dist.ProcessGroup:
    """Return the process group of one of our groups."""
    assert isinstance(group, Members)
    return group.handle


def started(work: Work | None) -> Work:
    """Return what torch says is under way; it says None only to ranks outside of the group."""
    assert work is not None
    return work
